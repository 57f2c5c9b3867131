-- Upkeep: history partitions, retention, and who may do what.

-- Make the partitions of today (UTC) and of `p_days` days ahead. Each is created as a table with
-- its CHECK and then attached: settles of other days never wait for it. A lock that is not to be
-- had within 50 ms is given up, to be tried again: behind a waiting ATTACH every settle would
-- queue. `made`; `there`; `locked` (try again); `refused` (the default partition already holds
-- rows of that day: they stay there until the pruner deletes them).
create function delayq.make_partitions(p_days integer default 7) returns table (day date, answer text)
    language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_today date := (delayq.clock() at time zone 'UTC')::date;
    v_name text;
    v_from text;
    v_to text;
begin
    perform set_config('lock_timeout', '50ms', true);
    for v_day in 0 .. least(p_days, 60) loop
        day := v_today + v_day;
        v_name := 'task_history_' || to_char(day, 'YYYYMMDD');
        v_from := to_char(day, 'YYYY-MM-DD') || ' 00:00:00+00';
        v_to := to_char(day + 1, 'YYYY-MM-DD') || ' 00:00:00+00';
        if to_regclass('delayq.' || v_name) is not null then
            answer := 'there';
            return next;
            continue;
        end if;
        begin
            execute format('create table delayq.%I (like delayq.task_history including all)', v_name);
            execute format('alter table delayq.%I alter column payload set storage external', v_name);
            execute format('alter table delayq.%I add constraint %I check (finished_at >= %L and finished_at < %L)',
                           v_name, v_name || '_day', v_from, v_to);
            execute format('alter table delayq.task_history attach partition delayq.%I for values from (%L) to (%L)',
                           v_name, v_from, v_to);
            -- it has served: every settlement would judge it again
            execute format('alter table delayq.%I drop constraint %I', v_name, v_name || '_day');
            answer := 'made';
        exception
            when lock_not_available or deadlock_detected then answer := 'locked';
            when check_violation then answer := 'refused';
            -- another node was quicker; while both are at it the catalog's own index speaks first
            when duplicate_table or duplicate_object or unique_violation then answer := 'there';
        end;
        return next;
    end loop;
end $$;

-- Empty and drop the partitions that end at or before `p_before`. Emptied first, which locks only
-- the leaf; dropped under the same short lock limit, and left for the next time if it is not to
-- be had.
create function delayq.drop_partitions(p_before timestamptz) returns table (day date, answer text)
    language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_name text;
begin
    perform set_config('lock_timeout', '50ms', true);
    for v_name in
        select c.relname from pg_inherits i join pg_class c on c.oid = i.inhrelid
         where i.inhparent = 'delayq.task_history'::regclass and c.relname ~ '^task_history_\d{8}$' order by 1
    loop
        day := to_date(right(v_name, 8), 'YYYYMMDD');
        continue when (day + 1)::timestamp at time zone 'UTC' > p_before;
        answer := 'locked';
        begin
            execute format('truncate delayq.%I', v_name);
            answer := 'emptied';
        exception when lock_not_available or deadlock_detected or undefined_table then
            null;   -- the last: another node was quicker
        end;
        begin       -- in a block of its own: what undoes the drop must not undo the emptying
            if answer = 'emptied' then
                execute format('drop table delayq.%I', v_name);
                answer := 'dropped';
            end if;
        exception when lock_not_available or deadlock_detected then
            null;
        end;
        return next;
    end loop;
end $$;

-- Rights. Both roles are made by the administrator (roles belong to the cluster, not to this
-- database; see scripts/deploy/roles.sql); neither owns anything. A login role that runs handlers
-- is granted delayq_node and the application's own tables.
create function delayq.grant_app(p_role name) returns void
    language plpgsql set search_path = pg_catalog, pg_temp
as $$
begin
    execute format('grant usage on schema delayq to %I', p_role);
    execute format('grant select on all tables in schema delayq to %I', p_role);
    -- idempotency_key is left out: only the functions keep its promise
    execute format('grant insert (kind, payload, headers, key, priority, due_at, execute_at, misfire_grace_ms,
                    timeout_ms, max_attempts) on delayq.tasks to %I', p_role);
    execute format('grant execute on function delayq.clock(), delayq.bucket(bigint), delayq.hint_horizon(), delayq.micros(timestamptz),
                    delayq.instant(bigint), delayq.notify(text),
                    delayq.hint_line(bigint, timestamptz, smallint, text), delayq.hint_text(bigint, bigint, text, timestamptz),
                    delayq.hint(bigint[], timestamptz[], smallint[], text[]), delayq.is_order(jsonb), delayq.find(bigint),
                    delayq.live(bigint), delayq.check_reference(bigint, text, text),
                    delayq.schedule_many(text[], text[], bigint[], bigint[], smallint[], integer[], bigint[], bigint[], text[]),
                    delayq.schedule_keyed(text[], text[], bigint[], bigint[], smallint[], integer[], bigint[], bigint[], text[],
                                          text[], text[], text[]),
                    delayq.schedule_one(text, jsonb, bigint, bigint, text, text, text, smallint, integer, bigint, bigint, jsonb),
                    delayq.schedule(text, jsonb, interval, timestamptz, text, text, text, integer, integer, interval, interval, jsonb),
                    delayq.cancel(bigint, text, text), delayq.cancel_many(bigint[], boolean),
                    delayq.cancel_keys(text, text[], boolean),
                    delayq.reschedule(bigint, text, text, interval, timestamptz),
                    delayq.reschedule_many(bigint[], bigint[], bigint[], boolean),
                    delayq.reschedule_keys(text, text[], bigint, bigint, boolean),
                    delayq.run_now(bigint, text, text), delayq.run_now_many(bigint[]),
                    delayq.revive(bigint), delayq.revive_many(bigint[], interval),
                    delayq.discard(bigint), delayq.discard_many(bigint[]) to %I', p_role);
end $$;

create function delayq.grant_node(p_role name) returns void
    language plpgsql set search_path = pg_catalog, pg_temp
as $$
begin
    perform delayq.grant_app(p_role);
    execute format('grant select, insert, update, delete on delayq.tasks, delayq.dead_tasks, delayq.nodes,
                    delayq.idempotency, delayq.kinds to %I', p_role);
    execute format('grant select, insert on delayq.task_history to %I', p_role);
    execute format('grant select, delete on delayq.task_history_default to %I', p_role);
    execute format('grant execute on all functions in schema delayq to %I', p_role);
    execute format('revoke execute on function delayq.grant_app(name), delayq.grant_node(name) from %I', p_role);
end $$;

revoke all on all functions in schema delayq from public;

select delayq.make_partitions(7);
