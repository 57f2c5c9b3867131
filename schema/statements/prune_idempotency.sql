-- Idempotency rows whose task ended $1 days ago; $2 rows at the most. One whose task came back
-- (revived) is spared. How many.
with gone as (
    delete from delayq.idempotency i
     where (i.kind, i.idempotency_key) in (
         select c.kind, c.idempotency_key from delayq.idempotency c
          where c.ended_at < delayq.clock() - $1::integer * interval '1 day'
            and not exists (select from delayq.tasks t where t.id = c.task_id)
            and not exists (select from delayq.dead_tasks d where d.id = c.task_id)
          limit $2::integer)
    returning 1
)
select count(*) from gone
