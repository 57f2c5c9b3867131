-- What this role lacks, to schedule (app) and to run tasks (node). Names, sorted; none: nothing.
with functions(name, needed) as (
    values ('schedule_many', 'app'), ('schedule_one', 'app'), ('cancel', 'app'), ('cancel_many', 'app'),
           ('reschedule', 'app'), ('reschedule_many', 'app'), ('lock_key', 'app'), ('run_now', 'app'),
           ('revive_many', 'app'), ('discard_many', 'app'), ('find', 'app'), ('clock', 'app'),
           ('settle_many', 'node'), ('settle', 'node'), ('adopt', 'node'),
           ('make_partitions', 'node'), ('drop_partitions', 'node')
), relations(name, privilege, needed) as (
    values ('tasks', 'select', 'app'), ('task_history', 'select', 'app'), ('dead_tasks', 'select', 'app'),
           ('nodes', 'select', 'app'), ('kinds', 'select', 'app'),
           ('tasks', 'insert', 'node'), ('tasks', 'update', 'node'), ('tasks', 'delete', 'node'),
           ('dead_tasks', 'insert', 'node'), ('task_history', 'insert', 'node'),
           ('nodes', 'insert', 'node'), ('nodes', 'update', 'node'), ('nodes', 'delete', 'node'),
           ('idempotency', 'update', 'node'), ('kinds', 'insert', 'node')
), missing as (
    select f.needed, 'execute on delayq.' || f.name as what
      from functions f
      join pg_proc p on p.proname = f.name and p.pronamespace = 'delayq'::regnamespace
     where not has_function_privilege(p.oid, 'execute')
    union
    select r.needed, r.privilege || ' on delayq.' || r.name
      from relations r
      join pg_class c on c.relname = r.name and c.relnamespace = 'delayq'::regnamespace
     where not has_table_privilege(c.oid, r.privilege)
    union
    select 'app', 'usage on schema delayq' where not has_schema_privilege('delayq'::regnamespace, 'usage')
)
select array(select m.what from missing m where m.needed = 'app' order by 1) as app,
       array(select m.what from missing m where m.needed = 'node' order by 1) as node
