-- Partitions of today and $1 days ahead; see delayq.make_partitions.
select day, answer from delayq.make_partitions($1::integer)
