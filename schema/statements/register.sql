-- A node comes: $1 incarnation, $2 name, $3 host, $4 pid, $5 version, $6 kinds, $7 TTL in ms.
insert into delayq.nodes (id, name, host, pid, version, kinds, state, expires_at, ttl_ms)
values ($1::bigint, $2::text, $3::text, $4::integer, $5::text, $6::text[], 'joining',
        delayq.clock() + $7::bigint * interval '1 millisecond', $7::bigint)
-- (Sent again after an unknown answer it finds the row that it wrote.)
on conflict (id) do nothing
