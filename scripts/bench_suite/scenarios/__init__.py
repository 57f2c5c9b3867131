"""All scenarios by name, in the order in which they are run."""

from __future__ import annotations

from ..scenario import Scenario
from . import burst, cancel, idle, lateness, lone, schedule, throughput

SCENARIOS: dict[str, Scenario] = {
    module.SCENARIO.name: module.SCENARIO
    for module in (throughput, lateness, burst, lone, schedule, cancel, idle)
}
