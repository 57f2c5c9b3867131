-- The heartbeat: extends every lease of this node at once, and brings the news back.
--
-- $1 this incarnation    $2 TTL in ms    $3 counters, for people    $4 latest_at in microseconds
-- `state` null: this incarnation was buried. It is never revived: cancel everything, come back as
-- another. A beat lost in a crash of the database costs nothing, so it commits asynchronously.
with asynchronously as materialized (
    select set_config('synchronous_commit', 'off', true)
), me as (
    update delayq.nodes n
       set expires_at = delayq.clock() + $2::bigint * interval '1 millisecond', counters = $3::jsonb,
           latest_at = delayq.instant($4::bigint)
      from asynchronously
     where n.id = $1::bigint and n.state <> 'dead'
    returning n.state
)
select (select me.state from me) as state,
       delayq.clock() as clock,
       (select coalesce(jsonb_agg(jsonb_build_object(
                   'id', n.id, 'state', n.state, 'kinds', n.kinds,
                   'expires_at_us', delayq.micros(n.expires_at), 'ttl_ms', n.ttl_ms,
                   'latest_at_us', delayq.micros(n.latest_at))), '[]')
          from delayq.nodes n)::text as nodes,
       (select coalesce(array_agg(k.kind), '{}') from delayq.kinds k where k.paused) as paused
