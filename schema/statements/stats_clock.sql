-- The database's clock, for the ranges of the other figures.
select delayq.clock() as clock, delayq.micros(delayq.clock()) as clock_us
