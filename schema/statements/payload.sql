-- A payload that was too long to come with the lease. No row: the lease is lost.
select payload::text from delayq.tasks where id = $1::bigint and lease_token = $2::bigint
