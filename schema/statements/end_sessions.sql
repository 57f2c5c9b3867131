-- End the database sessions of a buried node: a frozen client can hold row locks for hours.
-- Those in this database: the name may be used in another one, by somebody who is not ours to end.
select pg_terminate_backend(pid)
  from pg_stat_activity
 where application_name = 'delayq/' || $1::bigint and pid <> pg_backend_pid()
   and datname = current_database()
