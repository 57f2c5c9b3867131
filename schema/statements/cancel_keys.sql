-- Cancel by kind and keys; $3 false passes over what a stranger holds locked. See delayq.cancel_keys.
select key, id, answer from delayq.cancel_keys($1::text, $2::text[], $3::boolean)
