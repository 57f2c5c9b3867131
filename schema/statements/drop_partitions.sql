-- Partitions that ended $1 days ago or earlier.
select day, answer from delayq.drop_partitions(delayq.clock() - $1::integer * interval '1 day')
