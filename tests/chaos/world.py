"""What the harness and the processes that it starts have agreed on."""

from __future__ import annotations

VERSION, SEED, LOAD = "CHAOS_VERSION", "CHAOS_SEED", "CHAOS_LOAD"
"""Environment variables."""
EFFECT_KINDS = frozenset({"charge", "plain", "order_once"})
MAY_DIE = frozenset({"doomed"})
SCHEMA = """
    create schema chaos;
    create table chaos.orders (name text primary key);
    create table chaos.effects (task bigint not null, token bigint not null, ref text not null,
                                request text, follows boolean not null);
    -- who owned what, in the order in which it was committed: the row's own lock is the order
    create table chaos.leases (seq bigserial primary key, task bigint not null,
                               token bigint not null, owner bigint not null,
                               execute_at timestamptz not null, at timestamptz not null);
    create function chaos.note_lease() returns trigger
        language plpgsql security definer set search_path = pg_catalog, pg_temp
    as $$
    begin
        insert into chaos.leases (task, token, owner, execute_at, at)
        values (new.id, coalesce(nullif(new.lease_token, 0), old.lease_token),
                new.lease_owner, new.execute_at, delayq.clock());
        return null;
    end $$;
    create trigger zz_note_lease after update on delayq.tasks for each row
        when (old.lease_token is distinct from new.lease_token) execute function chaos.note_lease();
    -- statements fail as on a full disk, as often as this says
    create table chaos.failing (share float8 not null);
    insert into chaos.failing values (0);
    create function chaos.fail() returns trigger
        language plpgsql security definer set search_path = pg_catalog, pg_temp
    as $$
    begin
        if random() < (select share from chaos.failing) then
            raise exception 'no space left on device' using errcode = '53100';
        end if;
        return null;
    end $$;
    create trigger aa_fail before insert or update or delete on delayq.tasks
        for each statement execute function chaos.fail();
    create trigger aa_fail before insert on delayq.task_history
        for each statement execute function chaos.fail();
"""
