-- A page of live tasks by id. $1 beyond this id, $2 kind, $3 state, $4 key (null: any), $5 rows.
select t.id, t.kind, t.state, t.payload::text as payload, t.headers::text as headers, t.key, t.idempotency_key,
       t.priority, delayq.micros(coalesce(t.due_at, t.execute_at)) as due_at_us,
       delayq.micros(t.execute_at) as execute_at_us, delayq.micros(t.created_at) as created_at_us, t.attempt,
       t.max_attempts, t.timeout_ms, t.misfire_grace_ms, t.interruptions, t.errors::text as errors,
       t.cancel_requested, nullif(t.lease_owner, 0) as node,
       case when t.state = 'running' then delayq.micros(t.leased_at) end as leased_at_us,
       case when t.deadline_at < 'infinity' then delayq.micros(t.deadline_at) end as deadline_at_us,
       null::bigint as started_at_us, null::bigint as finished_at_us, null::bigint as lateness_us,
       (t.next ->> 'id')::bigint as follow_up
  from delayq.tasks t
 where t.id > $1::bigint
   and ($2::text is null or t.kind = $2) and ($3::text is null or t.state = $3) and ($4::text is null or t.key = $4)
 order by t.id limit $5::integer
