-- The verbs: the public SQL interface, and what every client calls.
--
-- Verbs whose answers must be true look until they are: they try, then look in every table with
-- one fresh snapshot, and start over if the task moved meanwhile. So their answers hold at read
-- committed, as of the moment after any wait. At a stricter isolation level a conflict is an
-- error (40001), never a false answer.
--
-- They are SECURITY DEFINER, so that a role may schedule and cancel without being able to write
-- the tables. Those that look for tasks force custom plans: in a session that cached its plans
-- while the table was empty, a cancel among 300,000 rows takes 100 ms instead of one.

-- Many tasks without keys, in one statement. Parallel arrays; a null `delays_us` takes the
-- instant. Answers in the order of the arrays.
create function delayq.schedule_many(
    p_kinds text[], p_payloads text[], p_delays_us bigint[], p_execute_at_us bigint[], p_priorities smallint[],
    p_max_attempts integer[], p_timeouts_ms bigint[], p_misfire_graces_ms bigint[], p_headers text[])
    returns table (id bigint, execute_at_us bigint)
    language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    v_now timestamptz := delayq.clock();
begin
    -- ids are drawn in the order of the arrays: the sort happens below the identity's nextval
    return query
    with written as (
        insert into delayq.tasks (kind, payload, headers, priority, execute_at, misfire_grace_ms, timeout_ms,
                                  max_attempts, created_at)
        select r.kind, r.payload::jsonb, r.headers::jsonb, r.priority,
               case when r.delay_us is not null then v_now + r.delay_us * interval '1 microsecond'
                    else delayq.instant(r.execute_at_us) end,
               r.misfire_grace_ms, r.timeout_ms, r.max_attempts, v_now
          from unnest(p_kinds, p_payloads, p_delays_us, p_execute_at_us, p_priorities, p_max_attempts,
                      p_timeouts_ms, p_misfire_graces_ms, p_headers) with ordinality
               as r(kind, payload, delay_us, execute_at_us, priority, max_attempts, timeout_ms,
                    misfire_grace_ms, headers, nr)
         order by r.nr
        returning id, execute_at
    )
    select w.id, delayq.micros(w.execute_at) from written w order by w.id;
end $$;

-- One task, with everything that may have to wait for a stranger. `outcome`: created; kept (a
-- live task with the key); replaced (that pending task has the new instant, payload and options);
-- waiting (that task runs just now: the new one waits as `follow_up`); conflict (on_conflict is
-- error); repeated (the idempotency key was used before).
create function delayq.schedule_one(
    p_kind text, p_payload jsonb, p_delay_us bigint, p_execute_at_us bigint, p_key text, p_on_conflict text,
    p_idempotency_key text, p_priority smallint, p_max_attempts integer, p_timeout_ms bigint,
    p_misfire_grace_ms bigint, p_headers jsonb)
    returns table (outcome text, id bigint, state text, execute_at_us bigint, follow_up bigint)
    language plpgsql security definer set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_custom_plan
as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_at timestamptz;
    v_id bigint;
    v_task delayq.tasks;
begin
    if p_on_conflict is null or p_on_conflict not in ('keep', 'replace', 'error') then
        raise exception 'on_conflict must be keep, replace or error' using errcode = '22023';
    end if;
    for v_round in 1 .. 1000 loop
        v_now := delayq.clock();
        v_at := case when p_delay_us is not null then v_now + p_delay_us * interval '1 microsecond'
                     else coalesce(delayq.instant(p_execute_at_us), v_now) end;

        if p_idempotency_key is not null then
            select i.task_id into v_id from delayq.idempotency i
             where i.kind = p_kind and i.idempotency_key = p_idempotency_key;
            if found then
                perform delayq.refuse_old_snapshot(v_id, null, null);
                return query select 'repeated'::text, v_id, f.state, f.execute_at_us, null::bigint
                    from (select 1) as one left join delayq.find(v_id) f on true;
                return;
            end if;
        end if;

        if p_key is not null then
            -- looked at before any insert, so that a keep burns no id
            if p_on_conflict = 'replace' then
                select * into v_task from delayq.tasks t where t.kind = p_kind and t.key = p_key for update;
            else
                select * into v_task from delayq.tasks t where t.kind = p_kind and t.key = p_key;
            end if;
            if found then
                perform delayq.refuse_old_snapshot(v_task.id, null, null);
                if p_on_conflict = 'error' then
                    return query select 'conflict'::text, v_task.id, v_task.state, delayq.micros(v_task.execute_at),
                                        null::bigint;
                    return;
                elsif p_on_conflict = 'keep' then
                    if p_idempotency_key is not null
                       and not delayq.claim_idempotency(p_kind, p_idempotency_key, v_task.id) then
                        continue;
                    end if;
                    return query select 'kept'::text, v_task.id, v_task.state, delayq.micros(v_task.execute_at),
                                        (v_task.next ->> 'id')::bigint;
                    return;
                elsif v_task.state = 'pending' then
                    if p_idempotency_key is not null
                       and not delayq.claim_idempotency(p_kind, p_idempotency_key, v_task.id) then
                        continue;
                    end if;
                    update delayq.tasks t
                       set payload = p_payload, headers = p_headers, priority = p_priority, execute_at = v_at,
                           due_at = v_at, max_attempts = p_max_attempts, timeout_ms = p_timeout_ms,
                           misfire_grace_ms = p_misfire_grace_ms, attempt = 0, interruptions = 0,
                           errors = '[]', leased_at = '-infinity', attempt_limit = 0,
                           idempotency_key = coalesce(p_idempotency_key, t.idempotency_key)
                     where t.id = v_task.id;
                    perform delayq.hint(array[v_task.id], array[v_at], array[p_priority], array[p_kind]);
                    return query select 'replaced'::text, v_task.id, 'pending'::text, delayq.micros(v_at), null::bigint;
                    return;
                else
                    v_id := coalesce((v_task.next ->> 'id')::bigint,
                                     nextval(pg_get_serial_sequence('delayq.tasks', 'id')));
                    if p_idempotency_key is not null
                       and not delayq.claim_idempotency(p_kind, p_idempotency_key, v_id) then
                        continue;
                    end if;
                    update delayq.tasks t
                       set next = jsonb_build_object(
                               'id', v_id, 'execute_at_us', delayq.micros(v_at), 'payload', p_payload,
                               'headers', p_headers, 'priority', p_priority, 'max_attempts', p_max_attempts,
                               'timeout_ms', p_timeout_ms, 'misfire_grace_ms', p_misfire_grace_ms,
                               'idempotency_key', coalesce(p_idempotency_key, v_task.next ->> 'idempotency_key'),
                               'created_at_us', delayq.micros(v_now))
                     where t.id = v_task.id;
                    return query select 'waiting'::text, v_task.id, 'running'::text,
                                        delayq.micros(v_task.execute_at), v_id;
                    return;
                end if;
            end if;
        end if;

        v_id := nextval(pg_get_serial_sequence('delayq.tasks', 'id'));
        if p_idempotency_key is not null and not delayq.claim_idempotency(p_kind, p_idempotency_key, v_id) then
            continue;
        end if;
        insert into delayq.tasks (id, kind, payload, headers, key, idempotency_key, priority, execute_at,
                                  misfire_grace_ms, timeout_ms, max_attempts, created_at)
        overriding system value
        values (v_id, p_kind, p_payload, p_headers, p_key, p_idempotency_key, p_priority, v_at,
                p_misfire_grace_ms, p_timeout_ms, p_max_attempts, v_now)
        on conflict (kind, key) where key is not null do nothing;
        if found then
            return query select 'created'::text, v_id, 'pending'::text, delayq.micros(v_at), null::bigint;
            return;
        end if;
        -- somebody took the key while we waited for it: look again. The idempotency row that we
        -- just wrote points to a task that never came to be.
        if p_idempotency_key is not null then
            delete from delayq.idempotency i
             where i.kind = p_kind and i.idempotency_key = p_idempotency_key and i.task_id = v_id;
        end if;
    end loop;
    raise exception 'the key changes hands faster than it can be looked at' using errcode = '40001';
end $$;

-- Many tasks in one statement, some of which have keys or idempotency keys: what schedule_one
-- answers for each, with its place in the arrays. Those whose keys nobody has are written together,
-- the others one by one; all in the order of their keys, so that two such statements hardly ever
-- wait for each other in a circle. Ids are drawn in the order of the arrays.
create function delayq.schedule_keyed(
    p_kinds text[], p_payloads text[], p_delays_us bigint[], p_execute_at_us bigint[], p_priorities smallint[],
    p_max_attempts integer[], p_timeouts_ms bigint[], p_misfire_graces_ms bigint[], p_headers text[],
    p_keys text[], p_on_conflicts text[], p_idempotency_keys text[])
    returns table (nr bigint, outcome text, id bigint, state text, execute_at_us bigint, follow_up bigint)
    language plpgsql security definer set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_custom_plan
as $$
#variable_conflict use_column
declare
    v_now timestamptz := delayq.clock();
    v_sequence regclass := pg_get_serial_sequence('delayq.tasks', 'id');
    v_nrs bigint[];                 -- those that look new, and the ids that were drawn for them
    v_ids bigint[];
    v_claimed bigint[] := '{}';     -- ids whose idempotency keys are theirs
    v_written bigint[] := '{}';     -- nrs
    v_place integer := 1;
    v_row record;
begin
    -- (scalar subqueries, which no statistics can turn into joins that read the tables)
    select coalesce(array_agg(f.nr), '{}'), coalesce(array_agg(nextval(v_sequence)), '{}') into v_nrs, v_ids
      from (select r.nr
              from unnest(p_kinds, p_keys, p_idempotency_keys) with ordinality as r(kind, key, idempotency_key, nr)
             where (r.key is null
                    or (select t.id from delayq.tasks t where t.kind = r.kind and t.key = r.key) is null)
               and (r.idempotency_key is null
                    or (select i.task_id from delayq.idempotency i
                         where i.kind = r.kind and i.idempotency_key = r.idempotency_key) is null)
             order by r.nr) as f;

    if exists (select from unnest(p_idempotency_keys) as i where i is not null) then
        with claimed as (
            insert into delayq.idempotency (kind, idempotency_key, task_id)
            select n.kind, n.idempotency_key, v_ids[n.place]
              from (select r.*, row_number() over (order by r.nr) as place
                      from unnest(p_kinds, p_idempotency_keys) with ordinality as r(kind, idempotency_key, nr)
                     where r.nr = any(v_nrs)) as n
             where n.idempotency_key is not null
             order by n.kind collate "C", n.idempotency_key collate "C", n.nr
            on conflict do nothing
            returning task_id
        )
        select coalesce(array_agg(c.task_id), '{}') into v_claimed from claimed c;
    end if;

    for id, execute_at_us in
        with written as (
            insert into delayq.tasks (id, kind, payload, headers, key, idempotency_key, priority, execute_at,
                                      misfire_grace_ms, timeout_ms, max_attempts, created_at)
            overriding system value
            select v_ids[n.place], n.kind, n.payload::jsonb, n.headers::jsonb, n.key, n.idempotency_key, n.priority,
                   case when n.delay_us is not null then v_now + n.delay_us * interval '1 microsecond'
                        else delayq.instant(n.execute_at_us) end,
                   n.misfire_grace_ms, n.timeout_ms, n.max_attempts, v_now
              from (select r.*, row_number() over (order by r.nr) as place
                      from unnest(p_kinds, p_payloads, p_delays_us, p_execute_at_us, p_priorities, p_max_attempts,
                                  p_timeouts_ms, p_misfire_graces_ms, p_headers, p_keys, p_idempotency_keys)
                           with ordinality
                           as r(kind, payload, delay_us, execute_at_us, priority, max_attempts, timeout_ms,
                                misfire_grace_ms, headers, key, idempotency_key, nr)
                     where r.nr = any(v_nrs)) as n
             where n.idempotency_key is null or v_ids[n.place] = any(v_claimed)
             order by n.kind collate "C", n.key collate "C", n.nr
            on conflict (kind, key) where key is not null do nothing
            returning id, execute_at
        )
        select w.id, delayq.micros(w.execute_at) from written w order by w.id
    loop
        -- both lists ascend: no join is needed to know which request this was
        while v_ids[v_place] <> id loop
            v_place := v_place + 1;
        end loop;
        nr := v_nrs[v_place]; outcome := 'created'; state := 'pending';
        v_written := v_written || nr;
        return next;
    end loop;
    if cardinality(v_written) = cardinality(p_kinds) then
        return;
    end if;

    for v_row in
        select r.*, v_ids[array_position(v_nrs, r.nr)] as drawn
          from unnest(p_kinds, p_payloads, p_delays_us, p_execute_at_us, p_priorities, p_max_attempts, p_timeouts_ms,
                      p_misfire_graces_ms, p_headers, p_keys, p_on_conflicts, p_idempotency_keys) with ordinality
               as r(kind, payload, delay_us, execute_at_us, priority, max_attempts, timeout_ms, misfire_grace_ms,
                    headers, key, on_conflict, idempotency_key, nr)
         where r.nr <> all(v_written)
         order by r.kind collate "C", r.key collate "C" nulls first, r.idempotency_key collate "C", r.nr
    loop
        if v_row.drawn = any(v_claimed) then
            -- somebody took the key meanwhile: this claim points to a task that never came to be
            delete from delayq.idempotency i
             where i.kind = v_row.kind and i.idempotency_key = v_row.idempotency_key and i.task_id = v_row.drawn;
        end if;
        return query select v_row.nr, s.* from delayq.schedule_one(
            v_row.kind, v_row.payload::jsonb, v_row.delay_us, v_row.execute_at_us, v_row.key, v_row.on_conflict,
            v_row.idempotency_key, v_row.priority, v_row.max_attempts, v_row.timeout_ms, v_row.misfire_grace_ms,
            v_row.headers::jsonb) s;
    end loop;
end $$;

-- At a stricter level than read committed the caller's snapshot may be older than the truth. This
-- raises 40001 if the live task `p_id`, or the one that holds a key, came, changed or went since
-- then; to be called before an answer that rests on having looked. A unique index sees beyond any
-- snapshot, so a row that is not to be seen is tried for by an insert, which is then undone.
create function delayq.refuse_old_snapshot(p_id bigint, p_kind text, p_key text) returns void
    language plpgsql set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_custom_plan
as $$
declare
    v_seen boolean;
    v_now timestamptz := delayq.clock();
begin
    if current_setting('transaction_isolation') in ('read committed', 'read uncommitted') then
        return;
    end if;
    begin       -- (FOR KEY SHARE would not mind that a lease has changed the row since)
        perform 1 from delayq.tasks t
          where t.id = p_id or (t.kind = p_kind and t.key = p_key)
             or (t.next is not null and (t.next ->> 'id')::bigint = p_id) for share;
        v_seen := found;
        raise exception using errcode = 'DQ001';    -- lets go of the lock: a lease is not to wait for it
    exception when sqlstate 'DQ001' then
        null;
    end;
    if v_seen or p_id <= 0 then     -- (no task has such an id)
        return;
    end if;
    begin
        -- (the greatest id stands for none; a sequence would be moved for good)
        insert into delayq.tasks (id, kind, key, execute_at, next) overriding system value
        values (coalesce(p_id, 9223372036854775807), coalesce(p_kind, '?'), p_key, '8999-12-31 00:00+00',
                case when p_id is not null then jsonb_build_object(
                    'id', p_id, 'execute_at_us', delayq.micros(v_now), 'created_at_us', delayq.micros(v_now),
                    'payload', '{}'::jsonb, 'headers', '{}'::jsonb, 'priority', 0) end)
        on conflict do nothing;
        insert into delayq.dead_tasks (id, kind, payload, headers, priority, due_at, execute_at, created_at, attempt,
                                       interruptions, errors, lease_token, finished_at)
        select p_id, '?', '{}', '{}', 0, v_now, v_now, v_now, 0, 0, '[]', 0, v_now
         where p_id is not null and not exists (select from delayq.dead_tasks d where d.id = p_id)
        on conflict do nothing;
        raise exception using errcode = 'DQ001';
    exception when sqlstate 'DQ001' then
        null;
    end;
end $$;

-- False if the key is taken (then somebody's request came first, and the caller looks again).
create function delayq.claim_idempotency(p_kind text, p_idempotency_key text, p_task_id bigint) returns boolean
    language plpgsql set search_path = pg_catalog, pg_temp
as $$
begin
    insert into delayq.idempotency (kind, idempotency_key, task_id) values (p_kind, p_idempotency_key, p_task_id)
    on conflict do nothing;
    return found;
end $$;

-- Where a task is now: one row, or none. `follow_up`: it waits behind a running task.
create function delayq.find(p_id bigint)
    returns table (place text, state text, execute_at_us bigint, cancel_requested boolean)
    language sql stable set search_path = pg_catalog, pg_temp
as $$
    select 'tasks', t.state, delayq.micros(t.execute_at), t.cancel_requested from delayq.tasks t where t.id = p_id
    union all
    select 'follow_up', 'pending', (t.next ->> 'execute_at_us')::bigint, false from delayq.tasks t
     where t.next is not null and (t.next ->> 'id')::bigint = p_id
    union all
    select 'dead_tasks', 'dead', delayq.micros(d.execute_at), false from delayq.dead_tasks d where d.id = p_id
    union all
    select 'task_history', h.state, delayq.micros(h.execute_at), false from delayq.task_history h where h.id = p_id
    limit 1
$$;

create function delayq.live(p_id bigint) returns boolean
    language sql stable set search_path = pg_catalog, pg_temp
as $$
    select exists (select from delayq.tasks t where t.id = p_id)
        or exists (select from delayq.tasks t where t.next is not null and (t.next ->> 'id')::bigint = p_id)
$$;

-- The public form of schedule, for any client in any language. `delay` and `at` exclude each
-- other; neither: now. `created` is false if a live task held the key or the idempotency key was
-- used before. on_conflict => 'error' raises unique_violation.
create function delayq.schedule(
    kind text, payload jsonb default '{}', delay interval default null, at timestamptz default null,
    key text default null, on_conflict text default 'keep', idempotency_key text default null,
    priority integer default 0, max_attempts integer default null, timeout interval default null,
    misfire_grace interval default null, headers jsonb default '{}')
    returns table (id bigint, created boolean, state text, execute_at timestamptz, follow_up bigint)
    language plpgsql set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    v record;
begin
    if delay is not null and at is not null then
        raise exception 'delay and at exclude each other: give one' using errcode = '22023';
    end if;
    if extract(epoch from delay) < 0 then
        raise exception 'delay must not be negative' using errcode = '22023';
    end if;
    select * into v from delayq.schedule_one(
        schedule.kind, schedule.payload, (extract(epoch from delay) * 1000000)::bigint, delayq.micros(at),
        schedule.key, schedule.on_conflict, schedule.idempotency_key, schedule.priority::smallint,
        schedule.max_attempts, (extract(epoch from schedule.timeout) * 1000)::bigint,
        (extract(epoch from misfire_grace) * 1000)::bigint, schedule.headers);
    if v.outcome = 'conflict' then
        raise exception 'task % of kind % already holds this key', v.id, schedule.kind using errcode = '23505';
    end if;
    return query select v.id, v.outcome not in ('kept', 'repeated'), v.state,
                        delayq.instant(v.execute_at_us), v.follow_up;
end $$;

-- Lock tasks by (distinct) ids, in one order for everybody, with the holders behind which some of
-- them wait: one that waits is decided under the lock of its holder. p_wait false: passes over
-- those that a stranger holds locked, and names them.
create function delayq.lock_tasks(p_ids bigint[], p_wait boolean, out locked bigint[], out holders bigint[])
    language plpgsql set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_custom_plan
as $$
declare
    v_ids bigint[];
begin
    if cardinality(p_ids) <= 10 then
        holders := array(select t.id from delayq.tasks t
                          where t.next is not null and (t.next ->> 'id')::bigint = any(p_ids));
    else
        -- (+ 0: so many single searches would look dearer than reading the whole table. Those that
        -- wait are few, and the partial index is them all.)
        holders := array(select t.id from delayq.tasks t
                          where t.next is not null and (t.next ->> 'id')::bigint + 0 = any(p_ids));
    end if;
    v_ids := p_ids || holders;
    locked := '{}';
    if p_wait then
        perform 1 from delayq.tasks t where t.id = any(v_ids) order by t.id for update;
        return;
    end if;
    v_ids := array(select t.id from delayq.tasks t where t.id = any(v_ids) order by t.id for update skip locked);
    if holders <> '{}' then
        v_ids := v_ids || array(select (t.next ->> 'id')::bigint from delayq.tasks t
                                 where t.id = any(v_ids) and t.next is not null);
    elsif cardinality(v_ids) = cardinality(p_ids) then
        return;     -- all of them
    end if;
    locked := array(select i from unnest(p_ids) as i where i <> all(v_ids) and delayq.live(i));
end $$;

-- The live tasks that hold keys, locked in the order of their ids, so that what follows is about
-- these: one row a key. Answered already: `not_found`, or (p_wait false) `locked` by a stranger.
create function delayq.lock_keys(p_kind text, p_keys text[], p_wait boolean)
    returns table (key text, id bigint, answer text)
    language plpgsql set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_custom_plan
as $$
#variable_conflict use_column
declare
    v_left text[] := array(select distinct k from unnest(p_keys) as k);
    v_keys text[];
    v_ids bigint[];
    v_got bigint[];
begin
    for v_round in 1 .. 1000 loop
        -- (scalar subqueries, which no statistics can turn into joins that read the table)
        v_keys := '{}';
        v_ids := '{}';
        for key, id in
            select k, (select t.id from delayq.tasks t where t.kind = p_kind and t.key = k) from unnest(v_left) as k
        loop
            if id is null then
                perform delayq.refuse_old_snapshot(null, p_kind, key);
                answer := 'not_found';
                return next;
            else
                v_keys := v_keys || key;
                v_ids := v_ids || id;
            end if;
        end loop;

        if p_wait then
            v_got := array(select t.id from delayq.tasks t where t.id = any(v_ids) order by t.id for update);
        else
            v_got := array(select t.id from delayq.tasks t where t.id = any(v_ids) order by t.id for update skip locked);
        end if;
        v_left := '{}';
        for key, id, answer in
            select h.key, h.id,
                   case when h.id = any(v_got) then null
                        when p_wait or (select t.id from delayq.tasks t where t.id = h.id) is null then 'left'
                        else 'locked' end
              from unnest(v_keys, v_ids) as h(key, id)
        loop
            if answer = 'left' then     -- before it could be locked: who holds the key now?
                v_left := v_left || key;
            else
                return next;
            end if;
        end loop;
        exit when v_left = '{}';
    end loop;
    if v_left <> '{}' then
        raise exception 'the key changes hands faster than it can be looked at' using errcode = '40001';
    end if;
end $$;

-- Cancel tasks whose locks are ours, and those that wait behind `p_holders`, whose locks are ours
-- too: the answers for those that are there.
create function delayq.cancel_locked(p_ids bigint[], p_holders bigint[])
    returns table (id bigint, answer text)
    language plpgsql set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_custom_plan
as $$
#variable_conflict use_column
begin
    for id, answer in
        with gone as (
            delete from delayq.tasks t where t.id = any(p_ids) and t.state = 'pending' returning t.*
        ), archived as (
            insert into delayq.task_history (
                id, kind, state, payload, headers, key, idempotency_key, priority, due_at, execute_at,
                created_at, attempt, interruptions, errors, node, lease_token, finished_at)
            select g.id, g.kind, 'cancelled', case when pg_column_size(g.payload) <= 4096 then g.payload end,
                   g.headers, g.key, g.idempotency_key, g.priority, coalesce(g.due_at, g.execute_at),
                   g.execute_at, g.created_at, g.attempt, g.interruptions, g.errors, null, 0, delayq.clock()
              from gone g
        ), asked as (
            update delayq.tasks t set cancel_requested = true
             where t.id = any(p_ids) and t.state = 'running' returning t.id
        ), withdrawn as (
            update delayq.tasks t set next = null
             where t.id = any(p_holders) and t.id <> all(p_ids) and (t.next ->> 'id')::bigint = any(p_ids)
            returning t.*, (select old.next from delayq.tasks old where old.id = t.id) as next_was
        ), withdrawn_archived as (
            insert into delayq.task_history (
                id, kind, state, payload, headers, key, idempotency_key, priority, due_at, execute_at,
                created_at, attempt, interruptions, errors, node, lease_token, finished_at)
            select (w.next_was ->> 'id')::bigint, w.kind, 'cancelled',
                   case when pg_column_size(w.next_was -> 'payload') <= 4096 then w.next_was -> 'payload' end,
                   w.next_was -> 'headers', w.key, w.next_was ->> 'idempotency_key',
                   (w.next_was ->> 'priority')::smallint,
                   delayq.instant((w.next_was ->> 'execute_at_us')::bigint),
                   delayq.instant((w.next_was ->> 'execute_at_us')::bigint),
                   delayq.instant((w.next_was ->> 'created_at_us')::bigint), 0, 0, '[]', null, 0, delayq.clock()
              from withdrawn w
        )
        select g.id, 'cancelled' as answer from gone g
        union all select a.id, 'cancel_requested' from asked a
        union all select (w.next_was ->> 'id')::bigint, 'cancelled' from withdrawn w
    loop
        if answer = 'cancel_requested' then
            perform delayq.notify('cancel ' || id);
        end if;
        return next;
    end loop;
end $$;

-- Cancel by id. `cancelled`: it will not run. `cancel_requested`: it runs just now and was asked
-- to end. p_wait false: rows that a stranger holds locked are answered `locked`; call for those
-- alone, with p_wait.
create function delayq.cancel_many(p_ids bigint[], p_wait boolean default true)
    returns table (id bigint, answer text)
    language plpgsql security definer set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_custom_plan
as $$
#variable_conflict use_column
declare
    v_left bigint[] := array(select distinct i from unnest(p_ids) as i where i is not null order by i);
    v_answered bigint[];
    v_locked bigint[];
    v_holders bigint[];
    v_row record;
begin
    for v_round in 1 .. 1000 loop
        select l.locked, l.holders into v_locked, v_holders from delayq.lock_tasks(v_left, p_wait) as l;
        if v_locked <> '{}' then
            return query select i, 'locked'::text from unnest(v_locked) as i;
            v_left := array(select i from unnest(v_left) as i where i <> all(v_locked) order by i);
        end if;

        v_answered := '{}';
        for id, answer in select c.id, c.answer from delayq.cancel_locked(v_left, v_holders) c loop
            v_answered := v_answered || id;
            return next;
        end loop;
        if cardinality(v_answered) = cardinality(v_left) then
            return;
        end if;
        v_left := array(select i from unnest(v_left) as i where i <> all(v_answered));

        -- those that nobody answered for: where are they, in one fresh snapshot?
        v_answered := '{}';
        for v_row in
            select i as id, f.place from unnest(v_left) as i left join lateral delayq.find(i) f on true
        loop
            if v_row.place is null or v_row.place in ('dead_tasks', 'task_history') then
                perform delayq.refuse_old_snapshot(v_row.id, null, null);
                id := v_row.id;
                answer := case when v_row.place is null then 'not_found' else 'already_finished' end;
                v_answered := v_answered || v_row.id;
                return next;
            end if;
        end loop;
        if cardinality(v_answered) = cardinality(v_left) then
            return;
        end if;
        v_left := array(select i from unnest(v_left) as i where i <> all(v_answered) order by i);
    end loop;
    raise exception 'the task moves faster than it can be looked at' using errcode = '40001';
end $$;

-- Cancel the live tasks that hold keys, and what waits behind them: one row a key, in no order.
-- Answers as cancel_many; `not_found` has no id.
create function delayq.cancel_keys(p_kind text, p_keys text[], p_wait boolean default true)
    returns table (key text, id bigint, answer text)
    language plpgsql security definer set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_custom_plan
as $$
#variable_conflict use_column
declare
    v_keys text[] := '{}';
    v_ids bigint[] := '{}';
    v_waiting bigint[];
begin
    for key, id, answer in select l.key, l.id, l.answer from delayq.lock_keys(p_kind, p_keys, p_wait) l loop
        if answer is null then
            v_keys := v_keys || key;
            v_ids := v_ids || id;
        else
            return next;
        end if;
    end loop;
    if v_ids = '{}' then
        return;
    end if;
    v_waiting := array(select (t.next ->> 'id')::bigint from delayq.tasks t
                        where t.id = any(v_ids) and t.next is not null);
    if v_waiting <> '{}' then
        perform delayq.cancel_locked(v_waiting, v_ids);
    end if;
    return query select h.key, c.id, c.answer
                   from delayq.cancel_locked(v_ids, '{}') c join unnest(v_keys, v_ids) as h(key, id) on h.id = c.id;
end $$;

-- Cancel by id, or by kind and key: then a running holder is asked to end and its waiting
-- successor is removed.
create function delayq.cancel(id bigint default null, kind text default null, key text default null) returns text
    language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
begin
    perform delayq.check_reference(cancel.id, cancel.kind, cancel.key);
    if cancel.id is not null then
        return (select c.answer from delayq.cancel_many(array[cancel.id]) c);
    end if;
    return (select c.answer from delayq.cancel_keys(cancel.kind, array[cancel.key]) c);
end $$;

create function delayq.check_reference(p_id bigint, p_kind text, p_key text) returns void
    language plpgsql immutable set search_path = pg_catalog, pg_temp
as $$
begin
    if (p_id is null) = (p_kind is null or p_key is null) then
        raise exception 'name the task by id, or by kind and key' using errcode = '22023';
    end if;
end $$;

-- Move pending tasks whose locks are ours, and those that wait behind `p_holders`, whose locks are
-- ours too, each to its instant; `p_ids` ascend. The answers for those that are there and pending.
create function delayq.move_locked(p_ids bigint[], p_holders bigint[], p_at timestamptz[])
    returns table (id bigint, answer text, execute_at_us bigint)
    language plpgsql set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_custom_plan
as $$
#variable_conflict use_column
begin
    return query
    -- (width_bucket finds the place of an id in the sorted array: a join would be planned on
    -- whatever the statistics say)
    with moved as (
        update delayq.tasks t
           set execute_at = p_at[width_bucket(t.id, p_ids)], due_at = p_at[width_bucket(t.id, p_ids)]
         where t.id = any(p_ids) and t.state = 'pending'
        returning t.id, t.attempt, t.execute_at, t.priority, t.kind
    ), moved_next as (
        update delayq.tasks t
           set next = t.next || jsonb_build_object('execute_at_us', delayq.micros(
                          p_at[width_bucket((t.next ->> 'id')::bigint, p_ids)]))
         where t.id = any(p_holders) and (t.next ->> 'id')::bigint = any(p_ids)
        returning (t.next ->> 'id')::bigint as id, (t.next ->> 'execute_at_us')::bigint as at_us
    ), hinted as (
        select delayq.hint(array_agg(m.id), array_agg(m.execute_at), array_agg(m.priority), array_agg(m.kind))
          from moved m having count(*) > 0
    )
    select m.id, case when m.attempt > 0 then 'retry_moved' else 'moved' end as answer,
           delayq.micros(m.execute_at) as at_us
      from moved m where (select count(*) from hinted) >= 0
    union all select n.id, 'moved', n.at_us from moved_next n;
end $$;

-- Move a pending task (also one that waits for a retry, or behind a running one) to another
-- instant. `moved`; `retry_moved` (its failed attempts still count); `running`;
-- `already_finished`; `dead`; `not_found`; `locked` (only with p_wait false).
create function delayq.reschedule_many(
    p_ids bigint[], p_delays_us bigint[], p_execute_at_us bigint[], p_wait boolean default true)
    returns table (id bigint, answer text, execute_at_us bigint)
    language plpgsql security definer set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_custom_plan
as $$
#variable_conflict use_column
declare
    v_left bigint[] := array(select distinct i from unnest(p_ids) as i where i is not null order by i);
    v_at timestamptz[];             -- where each of these goes
    v_answered bigint[];
    v_locked bigint[];
    v_holders bigint[];
    v_row record;
begin
    for v_round in 1 .. 1000 loop
        select l.locked, l.holders into v_locked, v_holders from delayq.lock_tasks(v_left, p_wait) as l;
        if v_locked <> '{}' then
            return query select i, 'locked'::text, null::bigint from unnest(v_locked) as i;
            v_left := array(select i from unnest(v_left) as i where i <> all(v_locked) order by i);
        end if;
        v_at := array(select case when a.delay_us is not null then delayq.clock() + a.delay_us * interval '1 microsecond'
                                  else delayq.instant(a.at_us) end
                        from (select distinct on (r.id) r.*
                                from unnest(p_ids, p_delays_us, p_execute_at_us) with ordinality
                                     as r(id, delay_us, at_us, nr)
                               where r.id = any(v_left) order by r.id, r.nr desc) as a
                       order by a.id);

        v_answered := '{}';
        for id, answer, execute_at_us in
            select m.id, m.answer, m.execute_at_us from delayq.move_locked(v_left, v_holders, v_at) m
        loop
            v_answered := v_answered || id;
            return next;
        end loop;
        if cardinality(v_answered) = cardinality(v_left) then
            return;
        end if;
        v_left := array(select i from unnest(v_left) as i where i <> all(v_answered));

        v_answered := '{}';
        for v_row in
            select i as id, f.place, f.state, f.execute_at_us as at_us
              from unnest(v_left) as i left join lateral delayq.find(i) f on true
        loop
            continue when v_row.state = 'pending';       -- it moved meanwhile: start over
            perform delayq.refuse_old_snapshot(v_row.id, null, null);
            id := v_row.id;
            execute_at_us := v_row.at_us;
            answer := case when v_row.place is null then 'not_found' when v_row.state = 'running' then 'running'
                           when v_row.place = 'dead_tasks' then 'dead' else 'already_finished' end;
            v_answered := v_answered || v_row.id;
            return next;
        end loop;
        if cardinality(v_answered) = cardinality(v_left) then
            return;
        end if;
        v_left := array(select i from unnest(v_left) as i where i <> all(v_answered) order by i);
    end loop;
    raise exception 'the task moves faster than it can be looked at' using errcode = '40001';
end $$;

-- Move the live tasks that hold keys: one row a key, in no order. Answers as reschedule_many;
-- `not_found` has no id.
create function delayq.reschedule_keys(
    p_kind text, p_keys text[], p_delay_us bigint, p_execute_at_us bigint, p_wait boolean default true)
    returns table (key text, id bigint, answer text, execute_at_us bigint)
    language plpgsql security definer set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_custom_plan
as $$
#variable_conflict use_column
declare
    v_keys text[] := '{}';
    v_ids bigint[] := '{}';
    v_at timestamptz[];
begin
    for key, id, answer in select l.key, l.id, l.answer from delayq.lock_keys(p_kind, p_keys, p_wait) l loop
        if answer is null then
            v_keys := v_keys || key;
            v_ids := v_ids || id;
        else
            return next;
        end if;
    end loop;
    if v_ids = '{}' then
        return;
    end if;
    v_at := array_fill(case when p_delay_us is not null then delayq.clock() + p_delay_us * interval '1 microsecond'
                            else delayq.instant(p_execute_at_us) end, array[cardinality(v_ids)]);
    return query select h.key, h.id, coalesce(m.answer, 'running'),
                        coalesce(m.execute_at_us, (select delayq.micros(t.execute_at) from delayq.tasks t where t.id = h.id))
                   from unnest(v_keys, v_ids) as h(key, id)
                   left join delayq.move_locked(array(select i from unnest(v_ids) as i order by i), '{}', v_at) m
                     on m.id = h.id;
end $$;

create function delayq.reschedule(
    id bigint default null, kind text default null, key text default null,
    delay interval default null, at timestamptz default null)
    returns text language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_delay_us bigint := (extract(epoch from delay) * 1000000)::bigint;
    v_at_us bigint := delayq.micros(at);
begin
    perform delayq.check_reference(reschedule.id, reschedule.kind, reschedule.key);
    if (delay is null) = (at is null) then
        raise exception 'give delay or at' using errcode = '22023';
    end if;
    if v_delay_us < 0 then
        raise exception 'delay must not be negative' using errcode = '22023';
    end if;
    if reschedule.id is not null then
        return (select r.answer
                  from delayq.reschedule_many(array[reschedule.id], array[v_delay_us], array[v_at_us]) r);
    end if;
    return (select r.answer
              from delayq.reschedule_keys(reschedule.kind, array[reschedule.key], v_delay_us, v_at_us) r);
end $$;

create function delayq.run_now(id bigint default null, kind text default null, key text default null) returns text
    language sql security definer set search_path = pg_catalog, pg_temp
as $$
    select delayq.reschedule(run_now.id, run_now.kind, run_now.key, delay => interval '0')
$$;

create function delayq.run_now_many(p_ids bigint[]) returns table (id bigint, answer text)
    language sql security definer set search_path = pg_catalog, pg_temp
as $$
    select r.id, r.answer from delayq.reschedule_many(
        p_ids, array_fill(0::bigint, array[cardinality(p_ids)]), array_fill(null::bigint, array[cardinality(p_ids)])) r
$$;

-- Bring dead tasks back, under the same id, with all their attempts. `revived`; `key_taken` (a
-- live task holds the key); `live`; `already_finished`; `not_found`. Spread over `p_spread` from
-- now on, so that ten thousand do not arrive in one instant.
create function delayq.revive_many(p_ids bigint[], p_spread interval default '0')
    returns table (id bigint, answer text)
    language plpgsql security definer set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_custom_plan
as $$
#variable_conflict use_column
declare
    v_dead delayq.dead_tasks;
    v_id bigint;
    v_at timestamptz;
begin
    for v_id in select distinct i from unnest(p_ids) as i order by i loop
        answer := null;
        while answer is null loop
            select * into v_dead from delayq.dead_tasks d where d.id = v_id for update;
            answer := case when found then 'revived' else delayq.not_dead(v_id) end;
        end loop;
        if answer = 'revived' then
            v_at := delayq.clock() + random() * p_spread;
            insert into delayq.tasks (id, kind, payload, headers, key, idempotency_key, priority, due_at, execute_at,
                                      misfire_grace_ms, timeout_ms, max_attempts, errors, created_at)
            overriding system value
            values (v_dead.id, v_dead.kind, v_dead.payload, v_dead.headers, v_dead.key, v_dead.idempotency_key,
                    v_dead.priority, v_at, v_at, v_dead.misfire_grace_ms, v_dead.timeout_ms, v_dead.max_attempts,
                    v_dead.errors, v_dead.created_at)
            on conflict (kind, key) where key is not null do nothing;
            if found then
                delete from delayq.dead_tasks d where d.id = v_id;
            else
                answer := 'key_taken';
            end if;
        end if;
        id := v_id;
        return next;
    end loop;
end $$;

-- Why a task is not among the dead: `live`, `already_finished`, `not_found`. Null: it is, by now.
create function delayq.not_dead(p_id bigint) returns text
    language plpgsql set search_path = pg_catalog, pg_temp
as $$
declare
    v_place text := (select f.place from delayq.find(p_id) f);
begin
    if v_place = 'dead_tasks' then
        return null;
    end if;
    perform delayq.refuse_old_snapshot(p_id, null, null);
    return case v_place when 'tasks' then 'live' when 'follow_up' then 'live'
                        when 'task_history' then 'already_finished' else 'not_found' end;
end $$;

create function delayq.revive(id bigint) returns text
    language sql security definer set search_path = pg_catalog, pg_temp
as $$ select r.answer from delayq.revive_many(array[revive.id]) r $$;

-- Remove dead tasks for good. `discarded`; `live`; `already_finished`; `not_found`.
create function delayq.discard_many(p_ids bigint[]) returns table (id bigint, answer text)
    language plpgsql security definer set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_custom_plan
as $$
#variable_conflict use_column
declare
    v_id bigint;
begin
    for v_id in select distinct i from unnest(p_ids) as i order by i loop
        answer := null;
        while answer is null loop
            delete from delayq.dead_tasks d where d.id = v_id;
            answer := case when found then 'discarded' else delayq.not_dead(v_id) end;
        end loop;
        id := v_id;
        return next;
    end loop;
end $$;

create function delayq.discard(id bigint) returns text
    language sql security definer set search_path = pg_catalog, pg_temp
as $$ select d.answer from delayq.discard_many(array[discard.id]) d $$;
