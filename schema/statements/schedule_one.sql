-- Schedule one task that may have to wait for a stranger; see delayq.schedule_one.
-- $13 milliseconds of waiting for a lock; null: as long as the session allows.
with patience as materialized (
    select set_config('lock_timeout', coalesce($13::text, current_setting('lock_timeout')), true) as set
)
select s.outcome, s.id, s.state, s.execute_at_us, s.follow_up
  from patience
 cross join lateral delayq.schedule_one(
           case when patience.set is not null then $1::text end,
           $2::text::jsonb, $3::bigint, $4::bigint, $5::text, $6::text, $7::text,
           $8::smallint, $9::integer, $10::bigint, $11::bigint, $12::text::jsonb) as s
