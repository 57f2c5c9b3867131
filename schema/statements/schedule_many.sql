-- Schedule tasks without keys, shared by callers; see delayq.schedule_many.
select id, execute_at_us
  from delayq.schedule_many($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::smallint[], $6::integer[],
                            $7::bigint[], $8::bigint[], $9::text[])
