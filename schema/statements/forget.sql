-- Remove the rows of dead nodes that no task refers to.
delete from delayq.nodes n
 where n.state = 'dead' and n.id = any ($1::bigint[])
   and not exists (select from generate_series(0, 255) as b(bucket)
                    cross join lateral (
                        select from delayq.tasks t
                         where t.bucket = b.bucket::smallint and t.execute_at <= $2::timestamptz
                           and t.state = 'running' and t.lease_owner = n.id limit 1) as t)
returning n.id
