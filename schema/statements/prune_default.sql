-- The net under the partitions: old rows go one batch at a time. $1 days kept, $2 rows. How many.
with gone as (
    delete from delayq.task_history_default
     where ctid = any (array(select ctid from delayq.task_history_default
                              where finished_at < delayq.clock() - $1::integer * interval '1 day' limit $2::integer))
    returning 1
)
select count(*) from gone
