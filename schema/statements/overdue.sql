-- Overdue tasks that nobody seems to fire: oldest first, bounded, without those held already.
--
-- $1 buckets    $2 from when on (the unbounded scan is once a minute: with vacuum held back it
-- grows with every dead row)    $3 due until    $4 kinds    $5 ids held    $6 rows a bucket
-- $7 rows in all
select t.id, t.execute_at, t.kind, t.priority
  from unnest($1::smallint[]) as b(bucket)
 cross join lateral (
     select c.id, c.execute_at, c.kind, c.priority
       from delayq.tasks c
      where delayq.bucket(c.id) = b.bucket and c.execute_at >= $2::timestamptz and c.execute_at <= $3::timestamptz
        and c.state = 'pending' and c.kind = any ($4::text[])
        and c.kind between (select min(k) from unnest($4::text[]) as k) and (select max(k) from unnest($4::text[]) as k)
        and not c.id = any ($5::bigint[])
      order by c.execute_at
      limit $6::integer) as t
 order by t.execute_at
 limit $7::integer
