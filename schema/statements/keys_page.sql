-- A page of the keys of live tasks of a kind that begin with a prefix, in their order: $1 kind,
-- $2 prefix (plain text), $3 beyond this key, $4 rows. No more rows than that are read: the index
-- is in the order of the bytes, so the first key that begins otherwise ends the range.
select k.key
  from (select t.key from delayq.tasks t
         where t.kind = $1::text and t.key >= $2::text and t.key > $3::text
         order by t.key limit $4::integer) as k
 where starts_with(k.key, $2::text)
