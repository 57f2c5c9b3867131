-- Kinds that somebody paused.
select k.kind from delayq.kinds k where k.paused order by k.kind limit 1000
