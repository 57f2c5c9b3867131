-- Declare a peer dead: $1 whose, $2 its expires_at as the judge saw it unchanged for a whole TTL.
-- Waits for a beat in flight and then judges again; no row: it lives, or was buried already.
update delayq.nodes set state = 'dead'
 where id = $1::bigint and state <> 'dead' and expires_at = $2::timestamptz
returning id
