-- Cancel by ids; see delayq.cancel_many.
select id, answer from delayq.cancel_many($1::bigint[], $2::boolean)
