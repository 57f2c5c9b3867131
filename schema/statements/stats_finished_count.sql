-- How many tasks finished since $1, by final state, and when the first of them did. `older`: rows
-- from before $1, which tell that everything since then was seen.
--
-- $2, $3 a range of the partition of today, $4 where in it to begin: a place near its end bounds
-- what is read, whatever the day brought    $5, $6, $7 the same of yesterday
select f.state, count(*) filter (where f.finished_at >= $1::timestamptz) as tasks,
       count(*) filter (where f.finished_at < $1::timestamptz) as older,
       delayq.micros(pg_catalog.min(f.finished_at) filter (where f.finished_at >= $1::timestamptz)) as first_us
  from (
      select h.state, h.finished_at from delayq.task_history h
       where h.finished_at >= $2::timestamptz and h.finished_at < $3::timestamptz and h.ctid >= $4::text::tid
      union all
      select h.state, h.finished_at from delayq.task_history h
       where h.finished_at >= $5::timestamptz and h.finished_at < $6::timestamptz and h.ctid >= $7::text::tid) as f
 group by f.state
