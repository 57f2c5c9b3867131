-- What keeps vacuum from removing dead rows: the oldest transactions, prepared transactions and
-- replication slots of the server. `age_s` null: it does not tell. `wal_bytes`: what a slot keeps.
(select 'transaction' as what, a.pid::text as name, a.application_name as detail,
        extract(epoch from clock_timestamp() - a.xact_start)::float8 as age_s, true as active,
        null::bigint as wal_bytes
   from pg_stat_activity a
  where a.xact_start is not null and a.pid <> pg_backend_pid() and a.backend_type in ('client backend', 'walsender')
    and (a.backend_xmin is not null or a.backend_xid is not null)
    and (a.datname = current_database() or a.datname is null)
  order by a.xact_start limit 3)
union all
(select 'prepared', p.gid, p.database, extract(epoch from clock_timestamp() - p.prepared)::float8, false, null
   from pg_prepared_xacts p where p.database = current_database() order by p.prepared limit 3)
union all
(select 'slot', s.slot_name, s.slot_type, null, s.active,
        case when not pg_is_in_recovery() then pg_wal_lsn_diff(pg_current_wal_lsn(), s.restart_lsn)::bigint end
   from pg_replication_slots s
  where not s.active and not s.temporary
  order by s.restart_lsn nulls last limit 3)
