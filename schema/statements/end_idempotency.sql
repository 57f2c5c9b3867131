-- Notice which idempotency rows have lost their task: their retention counts from here.
-- $1 rows at the most. How many.
with ended as (
    update delayq.idempotency i set ended_at = delayq.clock()
     where (i.kind, i.idempotency_key) in (
         select c.kind, c.idempotency_key from delayq.idempotency c
          where c.ended_at is null and c.scheduled_at < delayq.clock() - interval '1 hour'
            and not exists (select from delayq.tasks t where t.id = c.task_id)
            and not exists (select from delayq.tasks t
                             where t.next is not null and (t.next ->> 'id')::bigint = c.task_id)
            and not exists (select from delayq.dead_tasks d where d.id = c.task_id)
          limit $1::integer)
    returning 1
)
select count(*) from ended
