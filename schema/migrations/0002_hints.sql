-- Hints: LISTEN/NOTIFY tells the nodes what the next sweep would find anyway.
--
-- One channel, `delayq`. A message is lines; the first is its verb:
--   due            then one line a task: id:execute_at in microseconds:priority:kind
--   scan T         look at the window from T (microseconds) on: too many to list
--   join N, leave N, drain N     a node came, goes, is asked to go
--   cancel ID      a running task is asked to end
--   kind K         the settings of a kind changed
-- Whoever reads must survive strangers' nonsense on this channel.
--
-- Nothing is sent for the far future: a NOTIFY makes commits queue behind one lock (with 50
-- clients 2,800 inserts a second instead of 14,500). `set delayq.hints = off` mutes them, for
-- PREPARE TRANSACTION, which refuses a transaction that notified.

create function delayq.notify(p_message text) returns void
    language sql volatile
as $$
    select case when coalesce(pg_catalog.current_setting('delayq.hints', true), '') <> 'off'
                then pg_catalog.pg_notify('delayq', p_message) end
$$;

-- The line of a task. Null if its kind holds a control character: a line break would forge a line.
create function delayq.hint_line(id bigint, execute_at timestamptz, priority smallint, kind text) returns text
    language sql immutable parallel safe
as $$
    select case when kind collate "C" !~ '[\x01-\x1f\x7f]'
                then id || ':' || delayq.micros(execute_at) || ':' || priority || ':' || kind end
$$;

-- The message about some tasks; null: nothing to tell.
create function delayq.hint_text(tasks bigint, listed bigint, lines text, first timestamptz) returns text
    language sql immutable parallel safe
as $$
    -- 8,000 bytes is the server's limit, and over it the caller's INSERT would fail
    select case when tasks = 0 then null
                when tasks <= 100 and listed = tasks and octet_length(lines) <= 7500 then e'due\n' || lines
                else 'scan ' || delayq.micros(first) end
$$;

create function delayq.hint(p_ids bigint[], p_execute_at timestamptz[], p_priorities smallint[], p_kinds text[])
    returns void language plpgsql set search_path = pg_catalog, pg_temp
as $$
declare
    v_until timestamptz := delayq.clock() + delayq.hint_horizon();
begin
    -- 101 are enough to know that they are too many to list; the first is the earliest
    perform delayq.notify(m.message)
       from (select delayq.hint_text(count(*), count(soon.line), string_agg(soon.line, e'\n'), min(soon.at)) as message
               from (select t.at, delayq.hint_line(t.id, t.at, t.priority, t.kind) as line
                       from unnest(p_ids, p_execute_at, p_priorities, p_kinds) as t(id, at, priority, kind)
                      where t.at <= v_until order by t.at limit 101) as soon) as m
      where m.message is not null;
end $$;

-- The same about what an INSERT brought, which is usually far ahead: then a look is all.
create function delayq.hint_inserted() returns trigger
    language plpgsql set search_path = pg_catalog, pg_temp
as $$
declare
    v_until timestamptz := delayq.clock() + delayq.hint_horizon();
begin
    if exists (select from inserted where execute_at <= v_until) then
        perform delayq.notify(m.message)
           from (select delayq.hint_text(count(*), count(soon.line), string_agg(soon.line, e'\n'), min(soon.at)) as message
                   from (select t.execute_at as at, delayq.hint_line(t.id, t.execute_at, t.priority, t.kind) as line
                           from inserted t
                          where t.execute_at <= v_until order by t.execute_at limit 101) as soon) as m;
    end if;
    return null;
end $$;

create trigger hint after insert on delayq.tasks
    referencing new table as inserted
    for each statement execute function delayq.hint_inserted();
