-- Lateness and run time of the tasks that finished since $1: in all (kind and node null), by kind,
-- and by node. Percentiles 50, 95, 99 and 100 in microseconds, of those that ran.
--
-- $2, $3 a range of the partition of today, $4 where in it to begin: a place near its end bounds
-- what is read, whatever the day brought    $5, $6, $7 the same of yesterday
with recent as materialized (
    select f.*,
           -- an odd row of a stranger's own INSERT must not fail all figures
           case when isfinite(f.started_at) then f.finished_at - f.started_at end as run
      from (
          select h.kind, h.node, h.state, h.attempt, h.lateness_us, h.started_at, h.finished_at
            from delayq.task_history h
           where h.finished_at >= $2::timestamptz and h.finished_at < $3::timestamptz and h.ctid >= $4::text::tid
          union all
          select h.kind, h.node, h.state, h.attempt, h.lateness_us, h.started_at, h.finished_at
            from delayq.task_history h
           where h.finished_at >= $5::timestamptz and h.finished_at < $6::timestamptz
             and h.ctid >= $7::text::tid) as f
     where f.finished_at >= $1::timestamptz
), grouped as (
    select r.kind, r.node, grouping(r.kind, r.node) as grouping, count(*) as tasks,
           count(*) filter (where r.state = 'succeeded') as succeeded,
           count(*) filter (where r.state = 'cancelled') as cancelled,
           count(*) filter (where r.state = 'missed') as missed,
           count(*) filter (where r.attempt > 1) as retried,
           delayq.micros(pg_catalog.min(r.finished_at)) as first_us,
           pg_catalog.percentile_disc(array[0.5, 0.95, 0.99, 1]) within group (order by r.lateness_us) as lateness_us,
           pg_catalog.percentile_disc(array[0.5, 0.95, 0.99, 1]) within group (order by r.run) as run
      from recent r
     group by grouping sets ((), (r.kind), (r.node))
)
select g.kind, g.node, g.grouping, g.tasks, g.succeeded, g.cancelled, g.missed, g.retried, g.first_us, g.lateness_us,
       array(select (extract(epoch from p.run) * 1000000)::bigint
               from pg_catalog.unnest(g.run) with ordinality as p(run, nr) order by p.nr) as run_us
  from grouped g
 order by g.grouping desc, g.tasks desc
 limit 1000
