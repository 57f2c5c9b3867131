-- Cancel by kind and key, with the successor that waits under it; see delayq.cancel.
-- $3 milliseconds of waiting for a lock; null: as long as the session allows.
with patience as materialized (
    select set_config('lock_timeout', coalesce($3::text, current_setting('lock_timeout')), true) as set
)
select delayq.cancel(kind => case when patience.set is not null then $1::text end, key => $2::text) as answer
  from patience
