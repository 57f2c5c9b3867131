-- Schedule one task that waits for nobody: no key, no idempotency key. The shortest way there is;
-- $2 microseconds from now, or else $3 as an instant.
insert into delayq.tasks (kind, execute_at, payload, headers, priority, max_attempts, timeout_ms, misfire_grace_ms)
values ($1::text,
        case when $2::bigint is not null then delayq.clock() + $2 * interval '1 microsecond'
             else delayq.instant($3::bigint) end,
        $4::text::jsonb, $5::text::jsonb, $6::smallint, $7::integer, $8::bigint, $9::bigint)
returning id, delayq.micros(execute_at) as execute_at_us
