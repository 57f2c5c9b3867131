-- A row that fails every lease by itself is set aside as dead, with the reason: it must not stop
-- the batch that it is in. $1 id, $2 the error as a JSON object.
with gone as (
    delete from delayq.tasks t where t.id = $1::bigint and t.state = 'pending' returning t.*
)
insert into delayq.dead_tasks (
    id, kind, payload, headers, key, idempotency_key, priority, due_at, execute_at, created_at, misfire_grace_ms,
    timeout_ms, max_attempts, attempt, interruptions, errors, lease_token, finished_at)
select g.id, g.kind, g.payload, g.headers, g.key, g.idempotency_key, g.priority, coalesce(g.due_at, g.execute_at),
       g.execute_at, g.created_at, g.misfire_grace_ms, g.timeout_ms, g.max_attempts, g.attempt, g.interruptions,
       delayq.errors_with(g.errors, $2::text, 5), 0, delayq.clock()
  from gone g
returning id
