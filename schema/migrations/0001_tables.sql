-- delayq: the tables, and the protocol that they carry.
--
-- THE PROTOCOL
--
-- A task is a promise: run the handler of `kind` with `payload` once `execute_at` has come. The
-- row in `delayq.tasks` is the promise itself; what nodes keep in memory is a cache of it.
-- `delayq.tasks` holds live tasks only. Whoever ends a task moves its row out in the same
-- statement: to `task_history` (succeeded, cancelled, missed) or to `dead_tasks`.
--
--                    schedule                       cancel
--                       |        .------------------------------------> cancelled (history)
--                       v       |
--                   [ pending ] --- lease (token, attempt + 1) ---> [ running ]
--                       ^                                               |
--                       |                                               |-- returned --> succeeded (history)
--                       |<-- retry, snooze, release, adopt -------------|-- too late --> missed    (history)
--                       |                                               |-- cancel ----> cancelled (history)
--                       '--- revive ------------- dead (dead_tasks) <---'-- gave up
--
-- Who may believe what, until when, by which clock:
--
--  * Every instant is a reading of one clock, `delayq.clock()`: the database's. The wall clock of
--    a node decides nothing.
--  * Nobody claims a row by loading a timer. The lease, taken when the task is due, is the only
--    truth: it writes the node's incarnation and a fencing token, unique with the id, new at
--    every lease: hashint8extended(id, nonce), the nonce chosen at random by the node for each
--    statement. A sequence would re-issue tokens after a crash, since leases commit
--    asynchronously (losing one only means that the task runs again).
--  * A lease carries no expiry of its own. It lives as long as its node does: the node's beat
--    moves `nodes.expires_at`, all its leases with it. A lease statement checks that the node's
--    own row is alive, so a node that slept through its burial can lease nothing.
--  * Death is written, never inferred: a peer sets `nodes.state = 'dead'` with the `expires_at` it
--    saw unchanged for a whole TTL of its own good beats. That update waits for a beat in flight
--    and then judges again. (A node that leaves something behind marks itself.) Only tasks of nodes
--    marked dead, or with no row, are adopted.
--  * Every write that ends a lease names id and token. No row means: lost, or settled already.
--    History keeps the token, so the two can be told apart.
--  * Everyone who leaves `running` goes through `delayq.settle_many`: a requested cancel wins over
--    a retry, a waiting `next` becomes the successor at any final state and takes the place of
--    a retry.
--
-- Why no index knows of state or leases: a lease then is a HOT update and costs a fifth. The
-- lease columns are NOT NULL with defaults of full width for the same reason: a row that grows
-- may not fit its page. Any index or predicate on a column that a lease changes undoes this.

-- The one clock. It must stay inlinable (plain SQL, no SET clause): with a pinned search_path a
-- lease of 500 takes twice as long. It is volatile, so it is no bound for an index range: where
-- a range is needed the statement takes the instant as a parameter.
create function delayq.clock() returns timestamptz
    language sql volatile parallel safe
as $$ select pg_catalog.clock_timestamp() $$;

-- How far ahead a write must lie to send no hint (see the notify trigger). Nodes refuse to sweep
-- slower than a third of it, or a task between the two would be found too late.
create function delayq.hint_horizon() returns interval
    language sql immutable parallel safe
as $$ select interval '30 seconds' $$;

-- Instants travel as integer microseconds since 1970, durations as integers too: exact, and safe
-- from what drivers make of infinity or the year 12000 (which are told as the years 1 and 9999: a
-- row that somebody spoilt by hand must not hide the others of a list).
create function delayq.micros(timestamptz) returns bigint
    language sql immutable parallel safe
as $$
    select case when $1 between timestamptz '0001-01-01 00:00:00+00' and timestamptz '9999-12-31 00:00:00+00'
                then (extract(epoch from $1 at time zone 'UTC') * 1000000)::bigint
                when $1 > timestamptz '2000-01-01 00:00:00+00' then 253402214400000000
                when $1 < timestamptz '2000-01-01 00:00:00+00' then -62135596800000000 end
$$;

-- (In two steps, since an interval is multiplied as a double: above 2^53 microseconds, the year
-- 2255, it would round. Whole days as 24 hours, so that no time zone of the session matters.)
create function delayq.instant(micros bigint) returns timestamptz
    language sql immutable parallel safe
as $$
    select (timestamp '1970-01-01 00:00:00' + (micros / 86400000000) * interval '24 hours'
                                            + (micros % 86400000000) * interval '1 microsecond') at time zone 'UTC'
$$;

-- Tasks are shared out among the nodes by buckets. No column holds it: PostgreSQL 18 reads and parses
-- the expression of a stored generated column again for every row of an update, whatever it writes,
-- which doubled a lease. Plain SQL and immutable, so that it is inlined, here and in the index alike.
create function delayq.bucket(id bigint) returns smallint
    language sql immutable parallel safe
as $$ select ((id # (id >> 8)) & 255)::smallint $$;

-- What is to be in `next`. No part of the domain itself: whatever a domain has to judge is made ready
-- for every INSERT, also of the rows without a successor (a tenth of the work of scheduling a task).
create function delayq.is_order(p_next jsonb) returns boolean
    language plpgsql immutable parallel safe set search_path = pg_catalog, pg_temp
as $$
begin
    return coalesce(
        jsonb_typeof(p_next) = 'object'
        and p_next ->> 'id' ~ '^[1-9][0-9]{0,18}$'
        and (p_next ->> 'id')::numeric <= 9223372036854775807
        and pg_column_size(p_next -> 'payload') <= 4194304
        and pg_column_size(p_next -> 'headers') <= 65536
        and coalesce(octet_length(p_next ->> 'idempotency_key') between 1 and 500, true)
        and p_next ->> 'priority' ~ '^(-?[0-9]{1,2}|-?100)$'
        and p_next ->> 'execute_at_us' ~ '^[0-9]{15,18}$'
        and (p_next ->> 'execute_at_us')::numeric between 946684800000000 and 221845391999999999
        and p_next ->> 'created_at_us' ~ '^[0-9]{1,18}$'
        and coalesce(p_next ->> 'misfire_grace_ms' ~ '^[0-9]{1,11}$', true)
        and coalesce((p_next ->> 'misfire_grace_ms')::numeric <= 31622400000, true)
        and coalesce(p_next ->> 'timeout_ms' ~ '^[1-9][0-9]{0,10}$', true)
        and coalesce((p_next ->> 'timeout_ms')::numeric <= 31622400000, true)
        and coalesce(p_next ->> 'max_attempts' ~ '^([1-9][0-9]{0,3}|10000)$', true), false);
end $$;

-- Bounds of single columns are domains, not CHECKs of the table: a CHECK is read, parsed and judged
-- again by every lease, whatever it writes (a quarter of its work, measured in instructions), a
-- domain only where its column is written. Sizes by pg_column_size: casting a payload to text made
-- every lease eight times slower.
create domain delayq.kind as text collate "C" constraint kind_is_a_name check (octet_length(value) between 1 and 500);
create domain delayq.key as text collate "C" constraint key_is_short check (octet_length(value) between 1 and 500);
create domain delayq.idempotency_key as text collate "C"
    constraint idempotency_key_is_short check (octet_length(value) between 1 and 500);
create domain delayq.execute_at as timestamptz
    constraint execute_at_is_sane check (value >= '2000-01-01 00:00+00' and value < '9000-01-01 00:00+00');
create domain delayq.due_at as timestamptz
    constraint due_at_is_sane check (value >= '2000-01-01 00:00+00' and value < '9000-01-01 00:00+00');
create domain delayq.payload as jsonb constraint payload_is_bounded check (pg_column_size(value) <= 4194304);
create domain delayq.headers as jsonb constraint headers_are_bounded check (pg_column_size(value) <= 65536);
create domain delayq.next as jsonb
    constraint next_is_bounded check (pg_column_size(value) <= 8388608)
    -- a successor that cannot be inserted would keep its forerunner from ever being settled
    constraint next_is_an_order check (value is null or delayq.is_order(value));
create domain delayq.errors as jsonb constraint errors_are_bounded check (pg_column_size(value) <= 262144);
create domain delayq.misfire_grace_ms as bigint
    constraint misfire_grace_ms_is_sane check (value between 0 and 31622400000);
create domain delayq.timeout_ms as bigint constraint timeout_ms_is_sane check (value between 1 and 31622400000);
create domain delayq.max_attempts as integer constraint max_attempts_is_sane check (value between 1 and 10000);
create domain delayq.priority as smallint constraint priority_is_sane check (value between -100 and 100);
create domain delayq.counter as integer constraint counter_is_not_negative check (value >= 0);
create domain delayq.finished_state as text collate "C"
    constraint state_is_final check (value in ('succeeded', 'cancelled', 'missed'));

create table delayq.tasks (
    id                bigint generated always as identity primary key,
    kind              delayq.kind not null,
    payload           delayq.payload not null default '{}',
    headers           delayq.headers not null default '{}',
    key               delayq.key,
    idempotency_key   delayq.idempotency_key,
    priority          delayq.priority not null default 0,
    due_at            delayq.due_at,                                -- as asked; null: execute_at
    execute_at        delayq.execute_at not null default delayq.clock(),  -- when it fires next
    misfire_grace_ms  delayq.misfire_grace_ms,
    timeout_ms        delayq.timeout_ms,                            -- null: the handler's
    max_attempts      delayq.max_attempts,                          -- null: the handler's
    attempt           delayq.counter not null default 0,
    interruptions     delayq.counter not null default 0,
    state             text collate "C" not null default 'pending',
    -- written by the lease, always at full width
    lease_owner       bigint not null default 0,
    lease_token       bigint not null default 0,
    leased_at         timestamptz not null default '-infinity',     -- kept afterwards: a task once leased is no misfire
    deadline_at       timestamptz not null default 'infinity',
    attempt_limit     integer not null default 0,                   -- max_attempts, resolved
    cancel_requested  boolean not null default false,
    next              delayq.next,                                  -- the successor that waits (replace while running)
    errors            delayq.errors not null default '[]',          -- the last few, bounded
    created_at        timestamptz not null default delayq.clock(),

    -- short, since it is read and parsed again by every INSERT and every lease
    constraint running_means_leased check (
        id > 0 and case when lease_token = 0 then state = 'pending' and lease_owner = 0
                        else state = 'running' and lease_owner <> 0 end)
) with (
    fillfactor = 40,                        -- room for the lease and one more version beside each row: HOT updates,
                                            -- also while a snapshot keeps dead versions from being pruned
    vacuum_truncate = off,                  -- an emptied table is not cut to 0 pages under the plans
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_insert_scale_factor = 0.1,
    autovacuum_analyze_scale_factor = 0.02,
    autovacuum_analyze_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0
);

-- Not compressed: what pg_column_size says is what a statement sends.
alter table delayq.tasks alter column payload set storage external;

-- The window: read per bucket in this order. `kind` is a key column, since an INCLUDE column
-- filters only after the visit to the heap. `id + 0`, so that no search by ids can be matched to
-- this index: when a queue ran empty, was vacuumed and then fills, the statistics say that the
-- table has no rows, every index looks equally good, and a lease of 500 read this one from end to
-- end 500 times (6 s instead of 5 ms, until the next ANALYZE).
create index tasks_window on delayq.tasks (delayq.bucket(id), execute_at, kind, (id + 0));
create unique index tasks_key on delayq.tasks (kind, key) where key is not null;
-- Empty but for debounced tasks that run just now; a lease changes nothing in it.
create unique index tasks_follow_up on delayq.tasks (((next ->> 'id')::bigint)) where next is not null;

comment on table delayq.tasks is 'live tasks: pending and running';
comment on column delayq.tasks.execute_at is 'when it fires next, by delayq.clock()';
comment on column delayq.tasks.lease_owner is 'incarnation of the node that runs it; 0 while pending';

-- Append-only. One partition a UTC day, made ahead; the default one is a net, emptied by DELETE.
create table delayq.task_history (
    id              bigint not null,
    kind            text collate "C" not null,
    state           delayq.finished_state not null,
    payload         jsonb,                       -- null above 4 KiB
    headers         jsonb not null,
    key             text collate "C",
    idempotency_key text collate "C",
    priority        smallint not null,
    due_at          timestamptz not null,
    execute_at      timestamptz not null,
    created_at      timestamptz not null,
    attempt         integer not null,
    interruptions   integer not null,
    errors          jsonb not null,
    node            bigint,                      -- null: it never ran
    lease_token     bigint not null,             -- 0: it ended while pending
    started_at      timestamptz,                 -- the handler's start in its last attempt
    finished_at     timestamptz not null,
    lateness_us     bigint,                      -- started_at - execute_at of the last attempt
    successor       bigint
) partition by range (finished_at);
create index task_history_id on delayq.task_history (id);
create table delayq.task_history_default partition of delayq.task_history default;
alter table delayq.task_history_default alter column payload set storage external;

-- Never dropped by age: a person revives or discards them.
create table delayq.dead_tasks (
    id               bigint primary key,
    kind             text collate "C" not null,
    payload          jsonb not null,
    headers          jsonb not null,
    key              text collate "C",
    idempotency_key  text collate "C",
    priority         smallint not null,
    due_at           timestamptz not null,
    execute_at       timestamptz not null,
    created_at       timestamptz not null,
    misfire_grace_ms bigint,
    timeout_ms       bigint,
    max_attempts     integer,
    attempt          integer not null,
    interruptions    integer not null,
    errors           jsonb not null,
    node             bigint,
    lease_token      bigint not null,
    started_at       timestamptz,
    finished_at      timestamptz not null,
    lateness_us      bigint,
    successor        bigint
);
create index dead_tasks_kind on delayq.dead_tasks (kind, id);

-- One row a request that was given an idempotency key. Lives as long as its task, and then until
-- its retention has passed since `ended_at` (noticed by the pruner, not written by the settle).
create table delayq.idempotency (
    kind            text collate "C" not null,
    idempotency_key text collate "C" not null,
    task_id         bigint not null,
    scheduled_at    timestamptz not null default delayq.clock(),
    applied_at      timestamptz,
    ended_at        timestamptz,
    primary key (kind, idempotency_key)
);

-- Settings of a kind that people change while it runs; nodes read them with the beat.
create table delayq.kinds (
    kind       text collate "C" primary key check (octet_length(kind) between 1 and 500),
    paused     boolean not null default false,
    updated_at timestamptz not null default delayq.clock()
);

-- One row a running process. Nothing refers to it by foreign key: a beat must not lock tasks.
create table delayq.nodes (
    id         bigint primary key check (id <> 0),   -- the incarnation: random, never host or pid
    name       text not null,
    host       text not null,
    pid        integer not null,
    version    text not null,
    kinds      text[] not null check (coalesce(array_ndims(kinds), 1) = 1),
    state      text not null check (state in ('joining', 'active', 'draining', 'dead')),
    started_at timestamptz not null default delayq.clock(),
    expires_at timestamptz not null,
    ttl_ms     bigint not null default 0,            -- its own: a judge with a shorter one must wait as long
    -- the latest that its clock of the database has shown: what it leased was due by then, and after
    -- a step back of that clock it lies, with its orphans, in the future
    latest_at  timestamptz not null default '-infinity',
    counters   jsonb not null default '{}'
) with (fillfactor = 20, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
