-- Remove the rows of dead nodes: $1 those that no running task refers to, as the caller has just
-- seen. (Should one turn up after all, its node is missing, which is as good as dead.)
delete from delayq.nodes where id = any ($1::bigint[]) and state = 'dead' returning id
