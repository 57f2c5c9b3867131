-- Payloads that were too long to come with their leases: in the order of the ids as many as fit
-- into $3 bytes, and one at the least. Null: it did not fit (ask again). No row: the lease is lost.
-- Sizes by pg_column_size: what is stored outside the row is not read for it.
select p.id, case when p.ahead < $3::bigint then p.payload::text end as payload
  from (select t.id, t.payload,
               sum(pg_column_size(t.payload)) over (order by t.id) - pg_column_size(t.payload) as ahead
          from delayq.tasks t
         where t.id = any ($1::bigint[]) and t.lease_token = any ($2::bigint[])) p
