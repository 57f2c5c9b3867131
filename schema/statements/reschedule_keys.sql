-- Move by kind and keys; $5 false passes over what a stranger holds locked. See delayq.reschedule_keys.
select key, id, answer from delayq.reschedule_keys($1::text, $2::text[], $3::bigint, $4::bigint, $5::boolean)
