-- A page of finished tasks by id, the newest first: history is long, and people ask what happened
-- just now. $1 before this id, $2 kind, $3 state, $4 key (null: any), $5 rows.
select h.id, h.kind, h.state, h.payload::text as payload, h.headers::text as headers, h.key, h.idempotency_key,
       h.priority, delayq.micros(h.due_at) as due_at_us, delayq.micros(h.execute_at) as execute_at_us,
       delayq.micros(h.created_at) as created_at_us, h.attempt, null::integer as max_attempts,
       null::bigint as timeout_ms, null::bigint as misfire_grace_ms, h.interruptions, h.errors::text as errors,
       false as cancel_requested, h.node, null::bigint as leased_at_us, null::bigint as deadline_at_us,
       delayq.micros(h.started_at) as started_at_us, delayq.micros(h.finished_at) as finished_at_us, h.lateness_us,
       h.successor as follow_up
  from delayq.task_history h
 where h.id < $1::bigint
   and ($2::text is null or h.kind = $2) and ($3::text is null or h.state = $3) and ($4::text is null or h.key = $4)
 order by h.id desc limit $5::integer
