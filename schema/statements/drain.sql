-- A node stops firing: peers take over at once.
with me as (
    update delayq.nodes set state = 'draining' where id = $1::bigint and state <> 'dead' returning id
)
select me.id, delayq.notify('leave ' || me.id) from me
