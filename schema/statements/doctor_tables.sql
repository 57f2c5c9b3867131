-- How vacuum fares with the tables that are written most.
select c.relname as name, coalesce(s.n_live_tup, 0) as live_rows, coalesce(s.n_dead_tup, 0) as dead_rows,
       delayq.micros(greatest(s.last_vacuum, s.last_autovacuum)) as vacuumed_us,
       not coalesce('autovacuum_enabled=false' = any (c.reloptions) or 'autovacuum_enabled=off' = any (c.reloptions),
                    false) as autovacuum
  from pg_class c
  left join pg_stat_all_tables s on s.relid = c.oid
 where c.relnamespace = 'delayq'::regnamespace and c.relname in ('tasks', 'nodes', 'dead_tasks', 'idempotency')
 order by c.relname
