-- Pause or resume a kind on every node: $1 kind, $2 paused.
with changed as (
    insert into delayq.kinds as k (kind, paused) values ($1::text, $2::boolean)
    on conflict (kind) do update set paused = excluded.paused, updated_at = delayq.clock()
    returning kind
)
select changed.kind, delayq.notify('kind ' || changed.kind) from changed
