-- Remove dead tasks for good; see delayq.discard_many.
select id, answer from delayq.discard_many($1::bigint[])
