-- The server as this session sees it. Needs no schema of ours.
select current_setting('server_version_num')::integer as version,
       pg_is_in_recovery() as standby,
       current_setting('server_encoding') as encoding,
       (extract(epoch from clock_timestamp()) * 1000000)::bigint as clock_us,
       current_user::text as role,
       r.rolsuper or pg_has_role('pg_read_all_stats', 'usage') as sees_all,
       pg_notification_queue_usage() as notify_usage,
       current_setting('autovacuum') = 'on' and current_setting('track_counts') = 'on' as autovacuum
  from pg_roles r where r.rolname = current_user
