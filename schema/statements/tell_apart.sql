-- A settle did not return these: settled already under this very token (then its verdict is told),
-- still running under it (a stranger held the row locked: try again alone), or lost.
select o.id,
       case when t.id is not null then 'running'
            when d.id is not null then 'dead'
            else coalesce(h.state, 'lost') end as found
  from unnest($1::bigint[], $2::bigint[]) as o(id, token)
  left join delayq.tasks t on t.id = any ($1) and t.id = o.id and t.lease_token = o.token
  left join lateral (select h.state from delayq.task_history h
                      where h.id = o.id and h.lease_token = o.token limit 1) h on true
  left join delayq.dead_tasks d on d.id = o.id and d.lease_token = o.token
