-- Every node that has a row, oldest first; $1 at the most.
select id, name, host, pid, version, kinds, state, delayq.micros(started_at) as started_at_us,
       delayq.micros(expires_at) as expires_at_us, counters::text as counters
  from delayq.nodes order by started_at, id limit $1::integer
