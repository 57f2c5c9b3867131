-- The node holds its window now: it takes its share.
with me as (
    update delayq.nodes set state = 'active' where id = $1::bigint and state = 'joining' returning id
)
select me.id, delayq.notify('join ' || me.id) from me
