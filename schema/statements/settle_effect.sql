-- Settle one lease as succeeded inside the transaction of its effect; see delayq.settle.
select delayq.settle($1::bigint, $2::bigint, $3::bigint)
