-- The hot path: settle a batch of successes; how many were settled. Fewer than were sent: the
-- general statement sorts them out. The arrays come as text: the driver looks at each element of a
-- list that it encodes.
select count(*)
  from delayq.settle_many($1::text::bigint[], $2::text::bigint[], $3::text::bigint[])
