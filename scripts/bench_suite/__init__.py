"""Measures delayq beside plain asyncpg and plain asyncio; `scripts/bench` starts it.

One module per scenario in `scenarios/`; `server` makes databases, `processes` runs workers and
children, `raw` holds the figures without delayq, `report` says what came out.
"""
