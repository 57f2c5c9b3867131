"""`scripts/bench peers`: the same work on delayq and on other task queues that live in PostgreSQL.

Each rival runs in an environment of its own, on the settings that its documentation gives for
this work. What is measured is seen from outside: handlers write down when they start, and the
database is asked whether anything is left.
"""
