"""A private PostgreSQL server in a folder of the project: found, created, shared, stopped.

`binaries` finds the server's programs, `account` says as whom they run, `folder` lays out the
files, `probe` asks whether a server answers, `keeper` is the process that stops it once the last
user is gone, and `server` puts them together. Everyone else imports from `delayq.embedded`.
"""
