-- A notification to ourselves: $1 channel, $2 message.
select pg_notify($1::text, $2::text)
