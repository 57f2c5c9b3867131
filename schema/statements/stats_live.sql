-- Live tasks by kind and state, of the first $1 rows in the order of the window: exact if there
-- are fewer, else see stats_sample. An emptied table that is still large costs nothing here.
select f.kind, f.state, count(*) as tasks
  from (select t.kind, t.state from delayq.tasks t order by delayq.bucket(t.id), t.execute_at, t.kind, t.id + 0 limit $1::integer) as f
 group by f.kind, f.state
 order by tasks desc, f.kind
