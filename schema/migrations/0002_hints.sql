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

create function delayq.hint(p_ids bigint[], p_execute_at timestamptz[], p_priorities smallint[], p_kinds text[])
    returns void language plpgsql set search_path = pg_catalog, pg_temp
as $$
declare
    v_until timestamptz := delayq.clock() + delayq.hint_horizon();
    v_lines text;
    v_bytes bigint;
    v_count bigint;
    v_first timestamptz;
begin
    select count(*), min(execute_at) into v_count, v_first
      from unnest(p_execute_at) as t(execute_at) where execute_at <= v_until;
    if v_count = 0 then
        return;
    end if;
    if v_count <= 100 then
        select string_agg(id || ':' || delayq.micros(execute_at) || ':' || priority || ':' || kind, e'\n')
          into v_lines
          from unnest(p_ids, p_execute_at, p_priorities, p_kinds) as t(id, execute_at, priority, kind)
         where execute_at <= v_until;
        -- a kind with a line break in it cannot be listed: v_bytes stays null
        if not exists (select from unnest(p_execute_at, p_kinds) as t(execute_at, kind)
                        where execute_at <= v_until and kind collate "C" ~ '[\x01-\x1f\x7f]') then
            v_bytes := octet_length(v_lines);
        end if;
    end if;
    -- 8,000 bytes is the server's limit, and over it the caller's INSERT would fail
    if v_bytes <= 7500 then
        perform delayq.notify(e'due\n' || v_lines);
    else
        perform delayq.notify('scan ' || delayq.micros(v_first));
    end if;
end $$;

create function delayq.hint_inserted() returns trigger
    language plpgsql set search_path = pg_catalog, pg_temp
as $$
declare
    v_ids bigint[]; v_at timestamptz[]; v_priorities smallint[]; v_kinds text[];
    v_until timestamptz := delayq.clock() + delayq.hint_horizon();
begin
    -- 101 are enough to know that they are too many to list; the first is the earliest
    select array_agg(id), array_agg(execute_at), array_agg(priority), array_agg(kind)
      into v_ids, v_at, v_priorities, v_kinds
      from (select id, execute_at, priority, kind from inserted
             where execute_at <= v_until order by execute_at limit 101) as soon;
    if v_ids is not null then
        perform delayq.hint(v_ids, v_at, v_priorities, v_kinds);
    end if;
    return null;
end $$;

create trigger hint after insert on delayq.tasks
    referencing new table as inserted
    for each statement execute function delayq.hint_inserted();
