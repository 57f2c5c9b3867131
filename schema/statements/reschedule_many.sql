-- Move tasks by ids; see delayq.reschedule_many.
select id, answer, execute_at_us
  from delayq.reschedule_many($1::bigint[], $2::bigint[], $3::bigint[], $4::boolean)
