-- One page of a walk through the idempotency rows, by key. Those whose task has ended are noticed:
-- their retention counts from here. Those noticed $1 days ago go, unless the task came back
-- (revived). $2, $3 kind and key of the last row of the page before, $4 rows.
-- Where the next page begins; no row: this was the last one.
--
-- By key, since no index knows which rows have ended: a search for them would read all of those
-- whose tasks still wait, a million or more, for every batch.
with page as materialized (
    select c.ctid as place, c.kind, c.idempotency_key, c.task_id, c.ended_at, c.scheduled_at
      from delayq.idempotency c
     where (c.kind, c.idempotency_key) > ($2::text collate "C", $3::text collate "C")
     order by c.kind, c.idempotency_key
     limit $4::integer
), over as materialized (
    select p.place, p.ended_at from page p
     where (p.ended_at < delayq.clock() - $1::integer * interval '1 day'
            or p.ended_at is null and p.scheduled_at < delayq.clock() - interval '1 hour')
       and not exists (select from delayq.tasks t where t.id = p.task_id)
       and not exists (select from delayq.tasks t
                        where t.next is not null and (t.next ->> 'id')::bigint = p.task_id)
       and not exists (select from delayq.dead_tasks d where d.id = p.task_id)
), ended as (
    update delayq.idempotency i set ended_at = delayq.clock()
     where i.ctid = any (array(select o.place from over o where o.ended_at is null)) and i.ended_at is null
), gone as (
    delete from delayq.idempotency i
     where i.ctid = any (array(select o.place from over o where o.ended_at is not null))
       and i.ended_at is not null
)
select p.kind, p.idempotency_key from page p
 where (select count(*) from page) = $4::integer
 order by p.kind desc, p.idempotency_key desc
 limit 1
