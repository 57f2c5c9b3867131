-- How long, in pages, the history partitions of today and yesterday are, and the default one: what
-- finished last stands at the end. 0: there is none, or it is empty. The midnight is UTC.
with today as (
    select (delayq.clock() at time zone 'UTC')::date as day
), leaf as (
    select t.day, to_regclass('delayq.task_history_' || to_char(t.day, 'YYYYMMDD')) as today,
           to_regclass('delayq.task_history_' || to_char(t.day - 1, 'YYYYMMDD')) as yesterday
      from today t
)
select l.day::timestamp at time zone 'UTC' as midnight,
       coalesce(pg_relation_size(l.today), 0) / b.bytes as today,
       coalesce(pg_relation_size(l.yesterday), 0) / b.bytes as yesterday,
       coalesce(pg_relation_size('delayq.task_history_default'), 0) / b.bytes as default
  from leaf l cross join (select current_setting('block_size')::integer as bytes) as b
