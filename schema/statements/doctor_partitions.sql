-- History partitions from today (UTC) on without a gap, and rows in the default one, $1 counted at
-- the most.
with there as (
    select to_date(right(c.relname, 8), 'YYYYMMDD') - (delayq.clock() at time zone 'UTC')::date as ahead
      from pg_inherits i join pg_class c on c.oid = i.inhrelid
     where i.inhparent = 'delayq.task_history'::regclass and c.relname ~ '^task_history_\d{8}$'
)
select (select count(*) from there t
         where t.ahead >= 0 and (select count(*) from there o where o.ahead between 0 and t.ahead) = t.ahead + 1)
           as days,
       (select count(*) from (select from delayq.task_history_default limit $1::integer) as d) as in_default
