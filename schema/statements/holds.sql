-- What a lease statement with an unknown answer (connection lost, time-out) holds: $1 ids asked
-- for, $2 the nonce of that statement. They are released, since nobody knows their payloads here.
select id, lease_token
  from delayq.tasks
 where id = any ($1::bigint[]) and state = 'running' and lease_token = hashint8extended(id, $2::bigint)
