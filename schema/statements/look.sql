-- What became of these tasks? Asked for ids that a lease did not return, and by the understudy
-- before it fires.
select id, state, execute_at from delayq.tasks where id = any ($1::bigint[])
