-- How far ahead writes are hinted, in microseconds: nodes may not sweep slower than a third of it.
select (extract(epoch from delayq.hint_horizon()) * 1000000)::bigint
