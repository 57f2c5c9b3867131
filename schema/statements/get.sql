-- One task, wherever it is: live, waiting behind a running one, dead, or in history. Instants in
-- microseconds and JSON as text: a caller's own connection may have any codecs.
select t.id, t.kind, t.state, t.payload::text as payload, t.headers::text as headers, t.key, t.idempotency_key,
       t.priority, delayq.micros(coalesce(t.due_at, t.execute_at)) as due_at_us,
       delayq.micros(t.execute_at) as execute_at_us, delayq.micros(t.created_at) as created_at_us, t.attempt,
       t.max_attempts, t.timeout_ms, t.misfire_grace_ms, t.interruptions, t.errors::text as errors,
       t.cancel_requested, nullif(t.lease_owner, 0) as node,
       case when t.state = 'running' then delayq.micros(t.leased_at) end as leased_at_us,
       case when t.deadline_at < 'infinity' then delayq.micros(t.deadline_at) end as deadline_at_us,
       null::bigint as started_at_us, null::bigint as finished_at_us, null::bigint as lateness_us,
       (t.next ->> 'id')::bigint as follow_up
  from delayq.tasks t where t.id = $1::bigint
union all
select (t.next ->> 'id')::bigint, t.kind, 'pending', t.next ->> 'payload', t.next ->> 'headers', t.key,
       t.next ->> 'idempotency_key', (t.next ->> 'priority')::smallint, (t.next ->> 'execute_at_us')::bigint,
       (t.next ->> 'execute_at_us')::bigint, (t.next ->> 'created_at_us')::bigint, 0,
       (t.next ->> 'max_attempts')::integer, (t.next ->> 'timeout_ms')::bigint,
       (t.next ->> 'misfire_grace_ms')::bigint, 0, '[]', false, null, null, null, null, null, null, null
  from delayq.tasks t where t.next is not null and (t.next ->> 'id')::bigint = $1::bigint
union all
select d.id, d.kind, 'dead', d.payload::text, d.headers::text, d.key, d.idempotency_key, d.priority,
       delayq.micros(d.due_at), delayq.micros(d.execute_at), delayq.micros(d.created_at), d.attempt, d.max_attempts,
       d.timeout_ms, d.misfire_grace_ms, d.interruptions, d.errors::text, false, d.node, null, null,
       delayq.micros(d.started_at), delayq.micros(d.finished_at), d.lateness_us, d.successor
  from delayq.dead_tasks d where d.id = $1::bigint
union all
select h.id, h.kind, h.state, h.payload::text, h.headers::text, h.key, h.idempotency_key, h.priority,
       delayq.micros(h.due_at), delayq.micros(h.execute_at), delayq.micros(h.created_at), h.attempt, null, null,
       null, h.interruptions, h.errors::text, false, h.node, null, null, delayq.micros(h.started_at),
       delayq.micros(h.finished_at), h.lateness_us, h.successor
  from delayq.task_history h where h.id = $1::bigint
limit 1
