-- Which server process answers: another one than before means a pooler between.
select pg_backend_pid()
