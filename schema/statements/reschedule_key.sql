-- Move the live task that holds a key, locked first, so that the answer is about this one.
select id, answer, execute_at_us
  from delayq.reschedule_many(array[delayq.lock_key($1::text, $2::text)], array[$3::bigint], array[$4::bigint], true)
