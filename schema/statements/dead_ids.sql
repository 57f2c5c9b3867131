-- The ids of the dead tasks of a kind, a page at a time: $1 kind, $2 beyond this id, $3 rows.
select d.id from delayq.dead_tasks d where d.kind = $1::text and d.id > $2::bigint order by d.id limit $3::integer
