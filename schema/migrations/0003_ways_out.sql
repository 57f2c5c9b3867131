-- The ways out: every statement that ends a lease, or ends a task, passes through here.

-- What really happens to a task whose attempt ended with `outcome`, given what was asked of it
-- meanwhile. Final: succeeded, cancelled, missed, dead. Back to pending: retry, snooze, release,
-- unstarted, adopt. Returning from the handler is success even if a cancel was requested.
create function delayq.verdict(outcome text, cancel_requested boolean, has_next boolean, attempts_left boolean)
    returns text language sql immutable parallel safe
as $$
    select case
        when outcome = 'succeeded' then 'succeeded'
        when cancel_requested then 'cancelled'
        when outcome in ('missed', 'dead', 'cancelled') then outcome
        when has_next then 'cancelled'                       -- the successor takes the place of the retry
        when outcome in ('retry', 'adopt') and not attempts_left then 'dead'
        else outcome
    end
$$;

-- Settle a batch of leases. Parallel arrays, one element a task:
--   lateness_us  the handler's start after execute_at (null: it never started)
--   outcomes     succeeded | missed | dead | retry | snooze | adopt (its node died) |
--                release (interrupted by shutdown) | unstarted (leased, and given back at once)
--   delays_us    for those that go back: fire again so long from now (null or 0: retry and snooze
--                now, the others keep their instant)
--   errors       one JSON object as text, appended to the last `p_errors_kept` (null: nothing)
-- No outcomes at all: all succeeded. So an effect settles, and it takes the short statement. (A node's
-- batches of successes have one of their own, statements/settle_succeeded.sql, which locks nothing first.)
-- Answers one row for each task that it settled: the verdict and, if it is pending again, when it
-- fires next. No row: the lease is not ours any more, it was settled already, or (unless p_wait)
-- a stranger holds a lock on the row. Join by id only: a join on the tokens too is planned as
-- nested loops on wrong statistics.
create function delayq.settle_many(
    p_ids bigint[], p_tokens bigint[], p_lateness_us bigint[], p_outcomes text[] default null,
    p_delays_us bigint[] default null, p_errors text[] default null, p_errors_kept integer default 5,
    p_wait boolean default false)
    returns table (id bigint, verdict text, execute_at timestamptz)
    language plpgsql set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    v_now timestamptz := delayq.clock();
    v_settled bigint;
begin
    if p_wait then
        perform 1 from delayq.tasks t
          where t.id = any(p_ids) and t.lease_token = any(p_tokens) order by t.id for update;
    end if;
    if p_outcomes is null then
        return query
        with gone as (
            delete from delayq.tasks t
             where t.id = any (array(
                 select c.id from delayq.tasks c
                  where c.id = any(p_ids) and c.lease_token = any(p_tokens) and c.state = 'running' and c.next is null
                  order by c.id for update skip locked))
            returning t.*
        ), archived as (
            insert into delayq.task_history (
                id, kind, state, payload, headers, key, idempotency_key, priority, due_at, execute_at, created_at,
                attempt, interruptions, errors, node, lease_token, started_at, finished_at, lateness_us)
            select g.id, g.kind, 'succeeded', case when pg_column_size(g.payload) <= 4096 then g.payload end, g.headers,
                   g.key, g.idempotency_key, g.priority, coalesce(g.due_at, g.execute_at), g.execute_at, g.created_at,
                   g.attempt, g.interruptions, g.errors, g.lease_owner, g.lease_token,
                   g.execute_at + o.lateness_us * interval '1 microsecond', v_now, o.lateness_us
              from gone g join unnest(p_ids, p_lateness_us) as o(id, lateness_us) on o.id = g.id
        )
        select g.id, 'succeeded'::text, null::timestamptz from gone g;
        get diagnostics v_settled = row_count;
        if v_settled = cardinality(p_ids) then
            return;
        end if;     -- some are locked, lost, or have a successor: the long way sorts them out
    end if;
    return query
    with outcome as (
        select * from unnest(p_ids, p_tokens, p_lateness_us,
                             coalesce(p_outcomes, array_fill('succeeded'::text, array[cardinality(p_ids)])),
                             p_delays_us, p_errors)
                   as o(id, token, lateness_us, outcome, delay_us, error)
    ), held as (
        select t.id, t.lease_token, t.cancel_requested, t.next is not null as has_next,
               t.attempt < t.attempt_limit as attempts_left
          from delayq.tasks t
         where t.id = any(p_ids) and t.lease_token = any(p_tokens) and t.state = 'running'
         order by t.id for update skip locked
    ), settled as materialized (
        select h.id, o.outcome, o.lateness_us, o.delay_us, o.error,
               delayq.verdict(o.outcome, h.cancel_requested, h.has_next, h.attempts_left) as verdict
          from held h join outcome o on o.id = h.id
         where o.token = h.lease_token
    ), gone as (
        delete from delayq.tasks t using settled s
         -- the ids once more: on the statistics of an emptied table the join alone reads it 500 times
         where t.id = any(p_ids) and t.id = s.id and s.verdict in ('succeeded', 'cancelled', 'missed', 'dead')
        returning t.*, s.verdict, s.lateness_us, s.error
    ), archived as (
        insert into delayq.task_history (
            id, kind, state, payload, headers, key, idempotency_key, priority, due_at, execute_at, created_at,
            attempt, interruptions, errors, node, lease_token, started_at, finished_at, lateness_us, successor)
        select g.id, g.kind, g.verdict, case when pg_column_size(g.payload) <= 4096 then g.payload end, g.headers,
               g.key, g.idempotency_key, g.priority, coalesce(g.due_at, g.execute_at), g.execute_at, g.created_at,
               g.attempt, g.interruptions, delayq.errors_with(g.errors, g.error, p_errors_kept), g.lease_owner,
               g.lease_token, g.execute_at + g.lateness_us * interval '1 microsecond', v_now, g.lateness_us,
               (g.next ->> 'id')::bigint
          from gone g where g.verdict <> 'dead'
    ), buried as (
        insert into delayq.dead_tasks (
            id, kind, payload, headers, key, idempotency_key, priority, due_at, execute_at, created_at,
            misfire_grace_ms, timeout_ms, max_attempts, attempt, interruptions, errors, node, lease_token,
            started_at, finished_at, lateness_us, successor)
        select g.id, g.kind, g.payload, g.headers, g.key, g.idempotency_key, g.priority,
               coalesce(g.due_at, g.execute_at), g.execute_at, g.created_at, g.misfire_grace_ms, g.timeout_ms,
               g.max_attempts, g.attempt, g.interruptions, delayq.errors_with(g.errors, g.error, p_errors_kept),
               g.lease_owner, g.lease_token, g.execute_at + g.lateness_us * interval '1 microsecond', v_now,
               g.lateness_us, (g.next ->> 'id')::bigint
          from gone g where g.verdict = 'dead'
    ), succeeded_by as (
        -- the key is free for it: the delete above is seen by the unique index within this statement
        insert into delayq.tasks (
            id, kind, payload, headers, key, idempotency_key, priority, due_at, execute_at,
            misfire_grace_ms, timeout_ms, max_attempts, created_at)
        overriding system value
        select (g.next ->> 'id')::bigint, g.kind, g.next -> 'payload', g.next -> 'headers', g.key,
               g.next ->> 'idempotency_key', (g.next ->> 'priority')::smallint,
               delayq.instant((g.next ->> 'execute_at_us')::bigint),
               delayq.instant((g.next ->> 'execute_at_us')::bigint),
               (g.next ->> 'misfire_grace_ms')::bigint, (g.next ->> 'timeout_ms')::bigint,
               (g.next ->> 'max_attempts')::integer, delayq.instant((g.next ->> 'created_at_us')::bigint)
          from gone g where g.next is not null
    ), back as (
        update delayq.tasks t
           set state = 'pending', lease_owner = 0, lease_token = 0, deadline_at = 'infinity',
               -- snooze and shutdown give the attempt back, a crash keeps it
               attempt = greatest(0, t.attempt - case when s.outcome in ('snooze', 'release', 'unstarted') then 1 else 0 end),
               interruptions = t.interruptions + case when s.outcome = 'release' then 1 else 0 end,
               errors = delayq.errors_with(t.errors, s.error, p_errors_kept),
               -- when it was asked for: null meant the instant that is moved now
               due_at = case when s.verdict in ('retry', 'snooze', 'adopt') then coalesce(t.due_at, t.execute_at)
                             else t.due_at end,
               -- put back at once: it keeps its instant, and so its place in the queue
               execute_at = case when s.outcome in ('release', 'unstarted', 'adopt') and coalesce(s.delay_us, 0) = 0 then t.execute_at
                                 else v_now + coalesce(s.delay_us, 0) * interval '1 microsecond' end
          from settled s
         where t.id = any(p_ids) and t.id = s.id and s.verdict in ('retry', 'snooze', 'release', 'unstarted', 'adopt')
        returning t.id, t.execute_at, t.priority, t.kind
    ), hinted as (
        select delayq.hint(array_agg(b.id), array_agg(b.execute_at::timestamptz), array_agg(b.priority::smallint), array_agg(b.kind::text))
          from back b having count(*) > 0
    )
    select s.id, s.verdict, b.execute_at::timestamptz
      from settled s left join back b on b.id = s.id
     where (select count(*) from hinted) >= 0;
end $$;

-- As many of the last errors as the table's limit has room for; a stub if the last alone is too long.
create function delayq.errors_that_fit(errors jsonb, kept integer) returns jsonb
    language sql immutable parallel safe
as $$
    select coalesce(
        (select fewer.list
           from generate_series(0, kept - 1) as n
          cross join lateral (select jsonb_path_query_array(errors, '$[last - $n to last]',
                                                            jsonb_build_object('n', n))) as fewer(list)
          where pg_column_size(fewer.list) <= 262144
          order by n desc limit 1),
        jsonb_build_array(jsonb_build_object('error', 'TooLong', 'message', 'the error was too long to keep')))
$$;

-- The last `kept` errors of a task, with `error` (a JSON object as text, or null) appended. Never
-- longer than the table allows, or a failure would be refused for its own text.
create function delayq.errors_with(errors jsonb, error text, kept integer) returns jsonb
    language sql immutable parallel safe
as $$
    select case when error is null then errors
                when pg_column_size(errors || error::jsonb) > 262144
                    then delayq.errors_that_fit(errors || error::jsonb, kept)
                else jsonb_path_query_array(errors || error::jsonb, '$[last - $n to last]',
                                            jsonb_build_object('n', kept - 1)) end
$$;

-- Settle one lease as succeeded inside the caller's own transaction, so that the effect and the
-- completion commit together. `settled`; `lost` (another node has it, or it was cancelled: roll
-- back); `already_settled` (under this very token); `already_applied` (the effect of its
-- idempotency key was committed before: roll back, and count it as done).
create function delayq.settle(p_id bigint, p_token bigint, p_lateness_us bigint default null) returns text
    language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_kind text;
    v_idempotency_key text;
    v_verdict text;
begin
    select t.kind, t.idempotency_key into v_kind, v_idempotency_key from delayq.tasks t
     where t.id = p_id and t.lease_token = p_token and t.state = 'running' for update;
    if not found then
        perform delayq.refuse_old_snapshot(p_id, null, null);
        perform 1 from delayq.task_history h where h.id = p_id and h.lease_token = p_token;
        return case when found then 'already_settled' else 'lost' end;
    end if;
    if v_idempotency_key is not null then
        insert into delayq.idempotency as i (kind, idempotency_key, task_id, applied_at)
        values (v_kind, v_idempotency_key, p_id, delayq.clock())
        on conflict (kind, idempotency_key) do update set applied_at = excluded.applied_at
            where i.applied_at is null;
        if not found then
            return 'already_applied';
        end if;
    end if;
    select s.verdict into v_verdict
      from delayq.settle_many(array[p_id], array[p_token], array[p_lateness_us]) s;
    return case when v_verdict is null then 'lost' else 'settled' end;
end $$;

-- Take the tasks of nodes that are marked dead, or have no row, back to pending; exhausted ones
-- go to the dead tasks. A first adoption fires at once, later ones wait: 2^n seconds, at most an
-- hour. Skips locked rows: call again for the rest. `p_overdue_us`: also take tasks of live
-- nodes so long past their own deadline.
create function delayq.adopt(p_ids bigint[], p_overdue_us bigint, p_reason text default 'its node died')
    returns table (id bigint, verdict text, execute_at timestamptz)
    language plpgsql set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    v_ids bigint[]; v_tokens bigint[]; v_delays bigint[]; v_errors text[];
begin
    select array_agg(t.id), array_agg(t.lease_token),
           array_agg(case when t.attempt <= 1 then 0
                          else least(3600, power(2, least(t.attempt - 1, 12)))::bigint * 1000000 end),
           array_agg(jsonb_build_object('attempt', t.attempt, 'at', to_char(delayq.clock() at time zone 'UTC',
                         'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), 'error', 'NodeLost', 'message',
                         case when t.alive then 'its node did not end it at its deadline' else p_reason end)::text)
      into v_ids, v_tokens, v_delays, v_errors
      from (select t.*, exists (select from delayq.nodes n where n.id = t.lease_owner and n.state <> 'dead') as alive
              from delayq.tasks t
             where t.id = any(p_ids) and t.state = 'running'
               and (not exists (select from delayq.nodes n where n.id = t.lease_owner and n.state <> 'dead')
                    or t.deadline_at < delayq.clock() - p_overdue_us * interval '1 microsecond')
             order by t.id for update skip locked) as t;
    if v_ids is null then
        return;
    end if;
    return query select s.* from delayq.settle_many(
        v_ids, v_tokens, null, array_fill('adopt'::text, array[cardinality(v_ids)]), v_delays, v_errors) s;
end $$;
