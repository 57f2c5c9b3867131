-- Lease those of these tasks that are due, pending and not locked by a stranger.
--
-- $1 ids, as the text of an array (the driver looks at each element of a list it encodes)
-- $2 this node's incarnation    $3 nonce, random for each statement
-- $4 kinds served   $5, $6, $7 by kind: max attempts, timeout in ms (null: none), and whether a
--                   deadline is written (a thread cannot be cancelled: it keeps its lease)
-- $8 microseconds ahead of execute_at that are allowed (the handler still starts at execute_at)
-- $9 bytes of payload sent along (a longer one is read when the worker starts)
-- $10 kinds whose handlers have a misfire grace of their own
-- $11 the id that is to bring the database's time back (one of them is enough)
-- $12 true: step over what is locked. Else the first locked row fails all of them, at once (55P03),
--     and they are asked for again with true: to lock each row before it is written would cost a
--     quarter of the lease, and next to none is ever locked.
--
-- The commit is asynchronous, inside this statement only: losing a lease in a crash of the
-- database means that the task runs again, and the token fences the first runner. The ids are
-- the only condition that an index can serve (hence array_position): on the statistics of a queue
-- that ran empty the planner would take the window index for the kind. In the order of the ids,
-- as an index scan over an array is, so that two leases do not wait for each other in a circle.
with quickly as materialized (
    select set_config('synchronous_commit', 'off', true),
           set_config('lock_timeout', case when $12::boolean then current_setting('lock_timeout') else '2ms' end, true)
)
update delayq.tasks t
   set state = 'running',
       lease_owner = $2,
       lease_token = hashint8extended(t.id, $3),
       leased_at = delayq.clock(),
       deadline_at = case when not ($7::boolean[])[array_position($4::text[], t.kind)] then 'infinity'
                          else coalesce(delayq.clock() + coalesce(t.timeout_ms, ($6::bigint[])[array_position($4::text[], t.kind)])
                                                         * interval '1 millisecond', 'infinity') end,
       attempt = t.attempt + 1,
       attempt_limit = coalesce(t.max_attempts, ($5::integer[])[array_position($4::text[], t.kind)])
 where t.id = any (case when $12::boolean then array(
                       select c.id from delayq.tasks c
                        where c.id = any ($1::text::bigint[]) and c.state = 'pending'
                        order by c.id for update skip locked)
                   else $1::text::bigint[] end)
   and t.state = 'pending'
   and t.execute_at <= delayq.clock() + $8::bigint * interval '1 microsecond'
   and array_position($4::text[], t.kind) is not null
   and exists (select from delayq.nodes n, quickly where n.id = $2 and n.state in ('joining', 'active'))
returning t.id,
          t.lease_token,
          t.kind,
          case when pg_column_size(t.payload) <= $9::integer then t.payload::text end as payload,
          t.execute_at,
          t.timeout_ms,
          t.misfire_grace_ms,
          t.attempt,
          t.due_at,
          case when t.misfire_grace_ms is not null or t.kind = any ($10::text[]) then
              (select o.leased_at = '-infinity' from delayq.tasks o where o.id = t.id) end as never_leased,
          case when t.headers <> '{}' then t.headers::text end as headers,
          t.idempotency_key,
          t.priority,
          case when t.id = $11::bigint then t.leased_at end as leased_at
