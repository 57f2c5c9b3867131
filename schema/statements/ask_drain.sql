-- Ask a node to drain, from afar. It hears the hint, or sees its state at its next beat.
with it as (
    update delayq.nodes set state = 'draining' where id = $1::bigint and state in ('joining', 'active') returning id
)
select it.id, delayq.notify('drain ' || it.id) from it
