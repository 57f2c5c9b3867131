-- How many connections there may be, and are: of the server, of this database, of this role.
-- Limits of -1 are none.
select current_setting('max_connections')::integer
           - current_setting('superuser_reserved_connections')::integer
           - coalesce(current_setting('reserved_connections', true)::integer, 0) as server_limit,
       (select count(*) from pg_stat_activity a where a.backend_type = 'client backend') as server_used,
       (select d.datconnlimit from pg_database d where d.datname = current_database()) as database_limit,
       (select count(*) from pg_stat_activity a
         where a.datname = current_database() and a.backend_type = 'client backend') as database_used,
       (select r.rolconnlimit from pg_roles r where r.rolname = session_user) as role_limit,
       (select count(*) from pg_stat_activity a
         where a.usename = session_user and a.backend_type = 'client backend') as role_used
