-- The listener's ping to itself, through the server: $1 its incarnation.
select pg_notify('delayq', 'ping ' || $1::text)
