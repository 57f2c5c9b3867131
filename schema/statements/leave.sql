-- A node is gone. Its row goes only if no task refers to it any more; else its peers bury it.
with me as (
    delete from delayq.nodes where id = $1::bigint returning id
)
select me.id, delayq.notify('leave ' || me.id) from me
