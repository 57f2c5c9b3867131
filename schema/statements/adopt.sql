-- Take over what dead or missing nodes ran; see delayq.adopt.
select id, verdict, execute_at from delayq.adopt($1::bigint[], $2::bigint)
