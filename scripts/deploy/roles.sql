-- The roles of delayq, with no more rights than they need. Run it as the owner of the schema
-- delayq who may also create roles, after every `delayq migrate` (a new version brings new
-- functions); running it again changes nothing:
--
--   psql "$DELAYQ_DSN" -v ON_ERROR_STOP=1 -f scripts/deploy/roles.sql
--
--   delayq_app    schedules, cancels, moves and reads tasks; writes no table but by plain INSERT
--   delayq_node   runs tasks as well; a node needs no more than this and the application's grants
--
-- Neither can log in, neither owns anything. `delayq migrate` runs as the owner, not as one of
-- these.

begin;

do $$
declare
    v_role name;
begin
    foreach v_role in array array['delayq_app', 'delayq_node'] loop
        if not exists (select from pg_catalog.pg_roles where rolname = v_role) then
            begin
                execute format('create role %I nologin', v_role);
            exception when duplicate_object or unique_violation then
                null;       -- roles belong to the whole cluster: another database was quicker
            end;
        end if;
    end loop;
end $$;

select delayq.grant_app('delayq_app');
select delayq.grant_node('delayq_node');

commit;

-- Whoever logs in is given one of the two, and what the application itself needs. All nodes of a
-- database log in as the same role: then they may end the sessions of a node that died frozen.
--
--   create role shop_web  login password '…';
--   grant delayq_app to shop_web;
--   grant select, insert, update on orders to shop_web;
--
--   create role shop_node login password '…';
--   grant delayq_node to shop_node;
--   grant select, update on orders to shop_node;        -- what the handlers' effects touch
