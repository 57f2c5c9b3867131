-- Move the live task that holds a key; see delayq.reschedule_keys.
-- $5 milliseconds of waiting for a lock; null: as long as the session allows.
with patience as materialized (
    select set_config('lock_timeout', coalesce($5::text, current_setting('lock_timeout')), true) as set
)
select r.id, r.answer, r.execute_at_us
  from patience
 cross join lateral delayq.reschedule_keys(
           case when patience.set is not null then $1::text end, array[$2::text], $3::bigint, $4::bigint, true) as r
