-- Which of the tasks that run here were asked to end? For nodes whose LISTEN is lost.
select id from delayq.tasks where id = any ($1::bigint[]) and cancel_requested
