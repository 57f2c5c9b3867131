-- Every node with what it said of itself at its last beat. Instants may be null: a stranger's row
-- dated at infinity is shown, not failed on. `live`: neither dead nor silent for its whole TTL.
select n.id, n.name, n.host, n.pid, n.version, n.kinds, n.state, n.counters::text as counters,
       case when isfinite(n.started_at) then delayq.micros(n.started_at) end as started_us,
       case when isfinite(n.expires_at) then delayq.micros(n.expires_at) end as expires_us,
       n.state <> 'dead' and n.expires_at > delayq.clock() as live
  from delayq.nodes n
 order by n.state = 'dead', n.name, n.id
 limit $1::integer
