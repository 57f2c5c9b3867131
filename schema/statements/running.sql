-- Running tasks, by bucket and id: $1 from this bucket on, $2 beyond this id in it, $3 up to which
-- bucket, $4 due until, $5 rows at the most.
-- Bucket by bucket, since running tasks were due when they were leased and no index knows of
-- states; what is read is what is due in these buckets, so a caller with a backlog asks for few of
-- them at a time. The inner limit keeps it so: without it, on statistics of an emptied table, the
-- whole table is read.
select b.bucket, t.id, t.lease_owner, t.lease_token, t.deadline_at, t.execute_at
  from generate_series($1::integer, $3::integer) as b(bucket)
 cross join lateral (
     select c.id, c.lease_owner, c.lease_token, c.deadline_at, c.execute_at
       from delayq.tasks c
      where delayq.bucket(c.id) = b.bucket::smallint and c.execute_at <= $4::timestamptz and c.state = 'running'
        and (b.bucket > $1::integer or c.id > $2::bigint)
      order by c.id
      limit $5::integer) as t
 order by b.bucket, t.id
 limit $5::integer
