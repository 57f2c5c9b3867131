-- The database's clock, for the first sample of a node.
select delayq.clock()
