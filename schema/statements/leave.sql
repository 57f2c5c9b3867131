-- A node is gone: $1 which, $2 whether it handed everything over. Then its row goes too, since no
-- task refers to it. Else it is marked dead, and its peers adopt what it left as soon as they hear.
-- One that was buried meanwhile keeps its row: they are at it already.
with gone as (
    delete from delayq.nodes where id = $1::bigint and $2::boolean and state <> 'dead' returning id
), dead as (
    update delayq.nodes set state = 'dead'
     where id = $1::bigint and not $2::boolean and state <> 'dead' returning id
)
select me.id, delayq.notify('leave ' || me.id)
  from (select id from gone union all select id from dead) as me
