-- Schedule many tasks, some of which may have to wait for a stranger; see delayq.schedule_keyed.
-- $13 milliseconds of waiting for a lock; null: as long as the session allows.
with patience as materialized (
    select set_config('lock_timeout', coalesce($13::text, current_setting('lock_timeout')), true) as set
)
select s.nr, s.outcome, s.id, s.state, s.execute_at_us, s.follow_up
  from patience
 cross join lateral delayq.schedule_keyed(
           case when patience.set is not null then $1::text[] end, $2::text[], $3::bigint[], $4::bigint[],
           $5::smallint[], $6::integer[], $7::bigint[], $8::bigint[], $9::text[], $10::text[], $11::text[],
           $12::text[]) as s
