-- What became of these tasks? Asked for ids that a lease did not return, and by the understudy
-- before it fires. With the time, since whoever looks may have been wrong about that.
select id, state, execute_at, delayq.clock() as now from delayq.tasks where id = any ($1::bigint[])
