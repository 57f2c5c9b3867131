-- Live tasks by kind and state, estimated from about $1 pages of the table: `share` of it was read.
with size as (
    select greatest(1, pg_relation_size('delayq.tasks') / current_setting('block_size')::integer) as pages
)
select s.kind, s.state, s.tasks, s.share
  from size
 cross join lateral (
     select t.kind, t.state, count(*) as tasks, least(1.0, $1::float8 / size.pages) as share
       from delayq.tasks t tablesample system (least(100.0, 100.0 * $1::float8 / size.pages))
      group by t.kind, t.state) as s
 order by s.tasks desc, s.kind
