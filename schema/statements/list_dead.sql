-- A page of dead tasks by id. $1 beyond this id, $2 kind, $3 key (null: any), $4 rows.
select d.id, d.kind, 'dead' as state, d.payload::text as payload, d.headers::text as headers, d.key,
       d.idempotency_key, d.priority, delayq.micros(d.due_at) as due_at_us,
       delayq.micros(d.execute_at) as execute_at_us, delayq.micros(d.created_at) as created_at_us, d.attempt,
       d.max_attempts, d.timeout_ms, d.misfire_grace_ms, d.interruptions, d.errors::text as errors,
       false as cancel_requested, d.node, null::bigint as leased_at_us, null::bigint as deadline_at_us,
       delayq.micros(d.started_at) as started_at_us, delayq.micros(d.finished_at) as finished_at_us, d.lateness_us,
       d.successor as follow_up
  from delayq.dead_tasks d
 where d.id > $1::bigint and ($2::text is null or d.kind = $2) and ($3::text is null or d.key = $3)
 order by d.id limit $4::integer
