-- The time zone that this role's sessions get by themselves, and columns without a zone.
select current_setting('TimeZone') as zone,
       (select count(*) from pg_attribute a join pg_class c on c.oid = a.attrelid
                         join pg_namespace n on n.oid = c.relnamespace
         where n.nspname = 'delayq' and a.atttypid = 'timestamp'::regtype and a.attnum > 0
           and not a.attisdropped) as naive
