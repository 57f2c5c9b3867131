-- For the transaction of a report: each of its statements ends after $1 ms, and the plans are
-- those that are bounded by what they read.
select set_config('statement_timeout', $1::text, true), set_config('enable_bitmapscan', 'off', true),
       set_config('max_parallel_workers_per_gather', '0', true), set_config('jit', 'off', true),
       set_config('plan_cache_mode', 'force_custom_plan', true)
