-- Bring dead tasks back, spread over $2 microseconds; see delayq.revive_many.
select id, answer from delayq.revive_many($1::bigint[], $2::bigint * interval '1 microsecond')
