-- Schedule one task that may have to wait for a stranger; see delayq.schedule_one.
select outcome, id, state, execute_at_us, follow_up
  from delayq.schedule_one($1::text, $2::text::jsonb, $3::bigint, $4::bigint, $5::text, $6::text, $7::text,
                           $8::smallint, $9::integer, $10::bigint, $11::bigint, $12::text::jsonb)
