-- Dead tasks by kind; $1 rows at the most are counted.
select f.kind, count(*) as tasks
  from (select d.kind from delayq.dead_tasks d order by d.kind limit $1::integer) as f
 group by f.kind
 order by tasks desc, f.kind
