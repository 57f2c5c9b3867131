-- Cancel by kind and key, with the successor that waits under it; see delayq.cancel.
select delayq.cancel(kind => $1::text, key => $2::text)
