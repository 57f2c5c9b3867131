-- Move the live task that holds a key, locked first, so that the answer is about this one.
-- $5 milliseconds of waiting for a lock; null: as long as the session allows. No row: not found.
with patience as materialized (
    select set_config('lock_timeout', coalesce($5::text, current_setting('lock_timeout')), true) as set
)
select r.id, r.answer, r.execute_at_us
  from patience
 cross join lateral delayq.reschedule_many(
           array[delayq.lock_key(case when patience.set is not null then $1::text end, $2::text)],
           array[$3::bigint], array[$4::bigint], true) as r
