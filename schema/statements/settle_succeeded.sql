-- The hot path: settle a batch of successes; the command tag says how many were settled. Fewer than
-- were sent (lost, settled before, or with a successor that waits), or 55P03 at the first row that
-- a stranger holds locked: the general statement sorts them out.
--
-- $1 ids    $2 tokens    $3 the handlers' starts after execute_at, in microseconds: each the text of
-- an array (the driver looks at each element of a list that it encodes)
with quickly as materialized (
    select set_config('lock_timeout', '2ms', true)
), gone as (
    delete from delayq.tasks t
     using unnest($1::text::bigint[], $2::text::bigint[], $3::text::bigint[]) as o(id, token, lateness_us)
     -- the ids twice: as the condition that the index serves, and for the token that belongs to each
     where t.id = any ($1::text::bigint[]) and t.id = o.id and t.lease_token = o.token
       and t.state = 'running' and t.next is null
       and exists (select from quickly)
    returning t.id, t.kind, t.payload, t.headers, t.key, t.idempotency_key, t.priority, t.due_at, t.execute_at,
              t.created_at, t.attempt, t.interruptions, t.errors, t.lease_owner, t.lease_token, o.lateness_us
)
insert into delayq.task_history (
    id, kind, state, payload, headers, key, idempotency_key, priority, due_at, execute_at, created_at,
    attempt, interruptions, errors, node, lease_token, started_at, finished_at, lateness_us)
select g.id, g.kind, 'succeeded', case when pg_column_size(g.payload) <= 4096 then g.payload end, g.headers,
       g.key, g.idempotency_key, g.priority, coalesce(g.due_at, g.execute_at), g.execute_at, g.created_at,
       g.attempt, g.interruptions, g.errors, g.lease_owner, g.lease_token,
       g.execute_at + g.lateness_us * interval '1 microsecond', delayq.clock(), g.lateness_us
  from gone g
