"""All faults by name, and which of them may be on at the same time."""

from __future__ import annotations

import random

from tests.chaos import network_faults as network
from tests.chaos import process_faults as process
from tests.chaos import server_faults as server
from tests.chaos.fault import Fault

FAULTS: dict[str, type[Fault]] = {
    fault.name: fault
    for fault in (
        process.Terminate, process.Kill, process.KillAll, process.Freeze, process.Nap,
        process.RollingRestart, process.WrongTime,
        server.Restart, server.Crash, server.Outage, server.Failover, server.EndSessions,
        server.Full, server.ClockAhead, server.ClockBack, server.LongTransaction,
        server.LockedTable, server.NoConnections, server.NoPrivilege,
        network.ListenCut, network.ListenDeaf, network.CutOff, network.CutOffBriefly,
        network.CutOut, network.CutIn, network.CutInBriefly, network.Reset, network.Slow,
        network.Pooler,
    )
}  # fmt: skip
MOST_AT_ONCE = 3


def mix(names: list[str], dice: random.Random) -> list[str]:
    """Some that do not disturb each other, in random order."""
    wanted = dice.randint(1, MOST_AT_ONCE)
    chosen: list[str] = []
    touched: set[str] = set()
    for name in dice.sample(names, len(names)):
        touches = FAULTS[name].touches
        if len(chosen) < wanted and not touches & touched:
            chosen.append(name)
            touched |= touches
    return chosen
