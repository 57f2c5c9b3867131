-- Settle a batch of leases; see delayq.settle_many.
select id, verdict, execute_at
  from delayq.settle_many($1::bigint[], $2::bigint[], $3::bigint[], $4::text[], $5::bigint[], $6::text[],
                          $7::integer, $8::boolean)
