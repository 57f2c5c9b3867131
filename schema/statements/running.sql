-- Every running task, a page at a time: $1 beyond this id, $2 due until now, $3 rows at the most.
-- Read bucket by bucket, since running tasks are due ones and no index knows of states. The inner
-- limit keeps it so: without it, on statistics of an emptied table, the whole table is read.
select t.id, t.lease_owner, t.lease_token, t.deadline_at, t.cancel_requested
  from generate_series(0, 255) as b(bucket)
 cross join lateral (
     select c.id, c.lease_owner, c.lease_token, c.deadline_at, c.cancel_requested
       from delayq.tasks c
      where c.bucket = b.bucket::smallint and c.execute_at <= $2::timestamptz and c.state = 'running'
        and c.id > $1::bigint
      order by c.id
      limit $3::integer) as t
 order by t.id
 limit $3::integer
