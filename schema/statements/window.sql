-- A page of the window: pending tasks, bucket by bucket, each from the last row loaded onwards.
--
-- $1 buckets        $2, $3, $4 by bucket: execute_at, kind and id of the last row loaded
-- $5 by bucket: up to which instant    $6 kinds    $7 rows a bucket at the most
-- $8 only rows written since this xmin (null: all). It must be the xmin from before the FIRST
--    page of the pass before: with a later one, a row that committed in between is missed.
-- The kinds' first and last name stand there for PostgreSQL before 17, which keeps the order of the
-- index only if it looks for `any` in the table: what sorts outside of them costs no visit there.
--
-- The row without an id is none of the page's: it says the snapshot's xmin and the start of the server
-- (once, not in every row: reading them took a tenth of a load). If either went back or changed
-- (failover, recovery) the caller reads everything again.
select null::bigint as id, null::smallint as bucket, null::timestamptz as execute_at,
       null::text as kind, null::smallint as priority,
       pg_snapshot_xmin(pg_current_snapshot())::text::bigint as xmin,
       pg_postmaster_start_time() as server_started
union all
select t.id, b.bucket, t.execute_at, t.kind, t.priority, null, null
  from unnest($1::smallint[], $2::timestamptz[], $3::text[], $4::bigint[], $5::timestamptz[])
           as b(bucket, at, kind, id, until)
 cross join lateral (
     select c.id, c.execute_at, c.kind, c.priority
       from delayq.tasks c
      where delayq.bucket(c.id) = b.bucket
        and (c.execute_at, c.kind, c.id + 0) > (b.at, b.kind collate "C", b.id)
        and c.execute_at <= b.until
        and c.state = 'pending'
        and c.kind = any ($6::text[])
        and c.kind between (select min(k) from unnest($6::text[]) as k) and (select max(k) from unnest($6::text[]) as k)
        and ($8::bigint is null or age(c.xmin) <= age(($8::text::xid8)::xid))
      order by c.execute_at, c.kind, c.id + 0
      limit $7::integer) as t
