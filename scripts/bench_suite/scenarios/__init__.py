"""All scenarios by name, in the order in which they are run."""

from __future__ import annotations

from ..scenario import Scenario
from . import (
    backlog,
    burst,
    cancel,
    crash,
    deep,
    handoff,
    idle,
    lateness,
    lone,
    memory,
    nodes,
    reschedule,
    scale,
    schedule,
    snapshot,
    sustained,
    throughput,
)

_ALL = (
    throughput.SCENARIO,
    nodes.SCENARIO,
    scale.SCENARIO,
    *lateness.SCENARIOS,
    *burst.SCENARIOS,
    lone.SCENARIO,
    sustained.SCENARIO,
    schedule.SCENARIO,
    cancel.SCENARIO,
    reschedule.SCENARIO,
    idle.SCENARIO,
    deep.SCENARIO,
    backlog.SCENARIO,
    snapshot.SCENARIO,
    memory.SCENARIO,
    handoff.SCENARIO,
    crash.SCENARIO,
)
SCENARIOS: dict[str, Scenario] = {scenario.name: scenario for scenario in _ALL}
