-- Live tasks whose instant lies in ($1, $2], by kind, state and the node that runs them.
--
-- No index knows of states, so what runs is looked for where it must be: of each bucket the first
-- $3 rows and the last $3. `capped`: a bucket holds more, so the figures are lower bounds.
with seen as materialized (
    select b.bucket, t.kind, t.state, t.lease_owner, t.execute_at, t.leased_at, t.deadline_at
      from generate_series(0, 255) as b(bucket)
     cross join lateral (
         (select c.id, c.kind, c.state, c.lease_owner, c.execute_at, c.leased_at, c.deadline_at
            from delayq.tasks c
           where delayq.bucket(c.id) = b.bucket::smallint and c.execute_at > $1::timestamptz and c.execute_at <= $2::timestamptz
           order by c.execute_at, c.kind, c.id limit $3::integer)
         union
         (select c.id, c.kind, c.state, c.lease_owner, c.execute_at, c.leased_at, c.deadline_at
            from delayq.tasks c
           where delayq.bucket(c.id) = b.bucket::smallint and c.execute_at > $1::timestamptz and c.execute_at <= $2::timestamptz
           order by c.execute_at desc, c.kind desc, c.id desc limit $3::integer)) as t
)
select s.kind, s.state, nullif(s.lease_owner, 0) as node, count(*) as tasks,
       delayq.micros(pg_catalog.min(s.execute_at)) as oldest_us,
       delayq.micros(pg_catalog.min(s.leased_at) filter (where s.state = 'running' and isfinite(s.leased_at))) as leased_us,
       count(*) filter (where s.state = 'running' and s.deadline_at < delayq.clock()) as past_deadline,
       (select coalesce(pg_catalog.max(n.rows), 0) > $3::integer
          from (select count(*) as rows from seen group by bucket) as n) as capped
  from seen s
 group by s.kind, s.state, s.lease_owner
 order by tasks desc, s.kind
