-- Which live task holds this key of this kind?
select id from delayq.tasks where kind = $1::text and key = $2::text
