-- Was the effect of this idempotency key committed before? Read before the body of an effect runs.
select exists (select from delayq.idempotency
                where kind = $1::text and idempotency_key = $2::text and applied_at is not null)
