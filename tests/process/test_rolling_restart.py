"""`scripts/rolling-restart`: node by node, by commands and by units, as long as all is well.

It runs without site-packages, since it must not need any. Nodes are real where it matters what
they do; where it matters what is seen of them, a program in place of `delayq` says it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers import wait_for
from tests.nodes import no_live_tasks
from tests.process.crew import REPOSITORY, Crew, Process, crew, spread

if TYPE_CHECKING:
    from delayq.database import Connection

SCRIPT = REPOSITORY / "scripts" / "rolling-restart"
DELAYQ = shlex.join([sys.executable, "-m", "delayq"])
TERMINATE = "kill -TERM {pid}"
NAMES = ["n1", "n2", "n3"]
STEP = re.compile(
    r"^(\d/\d)  (\S+)  pid (\d+) → (\d+)  left after [\d.]+ s  active after [\d.]+ s$", re.MULTILINE
)
LIMIT_S = 20
patient = pytest.mark.timeout(180)
"""Each look at the nodes is a process of its own: on a busy machine that takes its time."""
SYSTEMCTL = """\
#!{python}
import fnmatch, json, os, pathlib, signal, sys, time

def of(unit):
    path = pathlib.Path({folder!r}, unit.removesuffix(".service") + ".unit")
    return json.loads(path.read_text()) if path.exists() else None

verb, unit = sys.argv[1], sys.argv[-1]
if verb == "list-units":
    for path in pathlib.Path({folder!r}).glob("*.unit"):
        if fnmatch.fnmatch(path.stem + ".service", unit):
            print(path.stem + ".service loaded active running a node")
elif verb == "show":
    found = of(unit) or {{"LoadState": "not-found", "ActiveState": "inactive", "MainPID": 0}}
    for name, value in found.items():
        print(f"{{name}}={{value}}")
elif verb == "restart":
    old = of(unit)["MainPID"]
    os.kill(old, signal.SIGTERM)
    while of(unit)["MainPID"] == old:
        time.sleep(0.02)
else:
    sys.exit(64)
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the script said, and its exit status."""

    status: int
    output: str
    errors: str

    @property
    def steps(self) -> list[tuple[str, str, str, str]]:
        """The nodes that were restarted: number, name, process before, process after."""
        return STEP.findall(self.output)


class Script:
    """Starts the script in a folder."""

    def __init__(self, folder: Path, delayq: str, dsn: str = "") -> None:
        self.folder = folder
        self._delayq = delayq
        self._dsn = dsn

    async def start(self, *arguments: str) -> asyncio.subprocess.Process:
        """Start it, and let it run."""
        given = ["--delayq", self._delayq, "--timeout", f"{LIMIT_S}", *arguments]
        return await asyncio.create_subprocess_exec(
            sys.executable, "-S", f"{SCRIPT}", *given, cwd=self.folder,
            env={"PATH": f"{self.folder}:{os.environ['PATH']}", "PYTHONPATH": f"{REPOSITORY}",
                 "PYTHONDONTWRITEBYTECODE": "1", "DELAYQ_DSN": self._dsn, "DELAYQ_EMBEDDED": "0"},
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    async def __call__(self, *arguments: str) -> Answer:
        """Run it to its end."""
        return await ended(await self.start(*arguments))


async def ended(process: asyncio.subprocess.Process) -> Answer:
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:  # the test was given up
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return Answer(process.returncode, output.decode(), errors.decode())


# --- nodes that somebody starts again -----------------------------------------------------------


class Keeper:
    """Nodes with names; one that ends is started again, as supervisors do.

    It tells what systemd would tell of units with these names.
    """

    def __init__(self, them: Crew, folder: Path) -> None:
        self._them = them
        self._folder = folder
        self.processes: dict[str, Process] = {}
        self.broken: set[str] = set()
        """those whose new version cannot start"""

    async def start(self, names: Sequence[str]) -> None:
        for name in names:
            self._launch(name)
        for process in self.processes.values():
            await self._them.active(process)

    async def keep(self) -> None:
        while True:
            for name, process in self.processes.items():
                if process.popen.poll() is not None:
                    await self._replace(name)
            await asyncio.sleep(0.02)

    async def _replace(self, name: str) -> None:
        if name not in self.broken:
            self._launch(name)
        elif self._told(name)["ActiveState"] == "active":
            process = self._launch(name, max_workers=0)
            assert await process.exit_status() != 0
            self._tell(name, "failed", 0)

    def _launch(self, name: str, **changes: Any) -> Process:
        process = self._them.launch(node_name=name, **changes)
        self.processes[name] = process
        self._tell(name, "active", process.popen.pid)
        return process

    def _told(self, name: str) -> dict[str, Any]:
        told: dict[str, Any] = json.loads((self._folder / f"{name}.unit").read_text())
        return told

    def _tell(self, name: str, state: str, pid: int) -> None:
        unit = {"LoadState": "loaded", "ActiveState": state, "MainPID": pid}
        draft = self._folder / "draft"
        draft.write_text(json.dumps(unit))
        draft.rename(self._folder / f"{name}.unit")

    def pids(self) -> dict[str, int]:
        return {name: process.popen.pid for name, process in self.processes.items()}


@asynccontextmanager
async def kept(
    conn: Connection, dsn: str, folder: Path, names: Sequence[str], **settings: Any
) -> AsyncIterator[tuple[Keeper, Crew, Script]]:
    """Nodes of these names, whoever starts them again, and the script."""
    systemctl = folder / "systemctl"
    systemctl.write_text(SYSTEMCTL.format(python=sys.executable, folder=f"{folder}"))
    systemctl.chmod(0o755)
    async with crew(conn, dsn, folder, **settings) as them:
        keeper = Keeper(them, folder)
        await keeper.start(names)
        keeping = asyncio.create_task(keeper.keep())
        try:
            yield keeper, them, Script(folder, DELAYQ, dsn)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)


async def incarnations(conn: Connection) -> dict[str, tuple[int, str]]:
    """Every node by name: its incarnation, and its state."""
    rows = await conn.fetch("select name, id, state from delayq.nodes order by started_at")
    return {row["name"]: (row["id"], row["state"]) for row in rows}


@patient
async def test_three_nodes_are_restarted_one_by_one_while_every_task_runs_once(
    conn: Connection, dsn: str, tmp_path: Path
) -> None:
    async with kept(conn, dsn, tmp_path, NAMES) as (keeper, them, script):
        before, pids = await incarnations(conn), keeper.pids()
        ids = await spread(conn, "brief", 400, first_s=0.5, every_ms=20, payload='{"ms": 50}')
        said = await script("--restart", TERMINATE, *NAMES)
        await no_live_tasks(conn, 20)
        assert said.status == 0, said.errors
        after = await incarnations(conn)
        assert {name: state for name, (_, state) in after.items()} == dict.fromkeys(NAMES, "active")
        assert not {id for id, _ in before.values()} & {id for id, _ in after.values()}
        assert said.steps == [
            (f"{number}/3", name, f"{pids[name]}", f"{keeper.pids()[name]}")
            for number, name in enumerate(NAMES, start=1)
        ]
        assert re.search(
            r"^restarted 3 in [\d.]+ s; 3 nodes are active$", said.output, re.MULTILINE
        )
        assert await them.effects() == dict.fromkeys(ids, 1)
        assert sorted(line.task_id for line in them.starts()) == sorted(ids)
        assert min((await them.lateness_us(ids)).values()) >= 0


@patient
async def test_units_that_match_are_restarted_and_found_by_their_main_process(
    conn: Connection, dsn: str, tmp_path: Path
) -> None:
    units = ["delayq@shop:dq", "other@shop:dq"]
    async with kept(conn, dsn, tmp_path, units) as (keeper, _, script):
        before = keeper.pids()
        said = await script("delayq*@*")
        assert said.status == 0, said.errors
        assert [step[1] for step in said.steps] == ["delayq@shop:dq.service"]
        assert [before[unit] == keeper.pids()[unit] for unit in units] == [False, True]
        assert {name: state for name, (_, state) in (await incarnations(conn)).items()} == (
            dict.fromkeys(units, "active")
        )


@patient
async def test_a_unit_that_fails_to_start_stops_it_and_the_others_are_left_alone(
    conn: Connection, dsn: str, tmp_path: Path
) -> None:
    units = ["delayq@1", "delayq@2", "delayq@3"]
    async with kept(conn, dsn, tmp_path, units) as (keeper, _, script):
        before = await incarnations(conn)
        keeper.broken.add("delayq@2")
        said = await script(*units)
        after = await incarnations(conn)
    assert said.status == 1
    assert said.errors == (
        "rolling-restart: stopped at delayq@2: no successor has come: the unit is failed. "
        "See `journalctl -u delayq@2`; restarted: delayq@1; not touched: delayq@3\n"
    )
    assert [step[1] for step in said.steps] == ["delayq@1"]
    assert after["delayq@3"] == before["delayq@3"]
    assert after["delayq@1"] != before["delayq@1"]
    assert "delayq@2" not in after


@patient
@pytest.mark.slow
async def test_a_node_whose_tasks_take_longer_than_the_time_limit_stops_it(
    conn: Connection, dsn: str, tmp_path: Path
) -> None:
    async with kept(conn, dsn, tmp_path, NAMES[:2]) as (keeper, them, script):
        before, pids = await incarnations(conn), keeper.pids()
        ids = await spread(conn, "once_long", 40, first_s=0, every_ms=0, payload='{"ms": 60000}')
        await them.saw("start", ids)  # on both: each owns some
        said = await script("--restart", TERMINATE, "--timeout", "5", "n1", "n2")
        after = await incarnations(conn)
        assert keeper.pids() == pids
    assert said.status == 1
    drains = f"node {before['n1'][0]} is still draining"
    assert said.errors.startswith(f"rolling-restart: stopped at n1: after 5 s {drains}. ")
    assert said.errors.endswith("; not touched: n2\n")
    assert after == {"n1": (before["n1"][0], "draining"), "n2": before["n2"]}


@patient
async def test_a_node_that_is_killed_instead_of_drained_stops_it(
    conn: Connection, dsn: str, tmp_path: Path
) -> None:
    async with kept(conn, dsn, tmp_path, NAMES[:2], lease_ttl_s=10) as (_, _, script):
        before = await incarnations(conn)
        said = await script("--restart", "kill -KILL {pid}", "n1", "n2")
        after = await incarnations(conn)
    assert said.status == 1
    assert f"at n1: node {before['n1'][0]} ended without leaving: was it killed" in said.errors
    assert after["n2"] == before["n2"]


@patient
async def test_a_signal_lets_it_finish_the_node_at_hand_and_no_other(
    conn: Connection, dsn: str, tmp_path: Path
) -> None:
    async with kept(conn, dsn, tmp_path, NAMES[:2]) as (keeper, _, script):
        before = keeper.pids()
        begun = tmp_path / "begun"
        process = await script.start(
            "--restart", f"touch {begun}; sleep 1; {TERMINATE}", "n1", "n2"
        )
        said = asyncio.create_task(ended(process))
        await wait_for(begun.exists, "it has begun", LIMIT_S)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        answer = await said
        after = keeper.pids()
    assert answer.status == 128 + signal.SIGINT
    assert [step[1] for step in answer.steps] == ["n1"]
    assert before["n2"] == after["n2"]
    assert before["n1"] != after["n1"]
    assert answer.errors == (
        "rolling-restart: finishing n1; once more to stop at once\n"
        "rolling-restart: stopped after n1: interrupted. Restarted: n1; not touched: n2\n"
    )


# --- what is seen, and what it makes of it ------------------------------------------------------

ACTS = """\
#!{python} -S
import json, pathlib, sys
folder = pathlib.Path({folder!r})
if sys.argv[1:] == ["stats", "--json"]:
    print((folder / "stats").read_text())
    sys.exit()
assert sys.argv[1:] == ["nodes", "--json"]
phase = "after" if (folder / "touched").exists() else "before"
with (folder / "past").open("a+") as past:
    past.write(phase + "\\n")
    past.seek(0)
    looks = past.read().split()
acts = json.loads((folder / phase).read_text())
rows = acts[min(looks.count(phase), len(acts)) - 1]
for row in rows:
    row["expires_at"] = row["expires_at"] or f"2030-01-01T00:00:00.{{len(looks):06}}Z"
print(json.dumps({{"nodes": rows}}))
"""
"""Plays `delayq`: what it shows before anything was touched, then one act after another. A node
without an `expires_at` beats at each look."""
Look = list[dict[str, object]]


def node(id: int, name: str, **changes: object) -> dict[str, object]:
    row: dict[str, object] = {
        "id": f"{id}", "name": name, "host": socket.gethostname(), "pid": 1000 + id,
        "state": "active", "live": True, "kinds": ["a"], "expires_at": None,
    }  # fmt: skip
    return row | changes


def play(folder: Path, before: Look, *after: Look, at: str = "") -> Script:
    """The script among nodes that only seem to be."""
    (folder / "before").write_text(json.dumps([before]))
    (folder / "after").write_text(json.dumps(after))
    (folder / "stats").write_text(json.dumps({"at": at}))
    actor = folder / "delayq"
    actor.write_text(ACTS.format(python=sys.executable, folder=f"{folder}"))
    actor.chmod(0o755)
    return Script(folder, "delayq")


TOUCH = "echo {name} >>touched"


def touched(folder: Path) -> list[str]:
    path = folder / "touched"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize(
    ("at", "status"),
    [
        ("2031-01-01T00:00:09Z", 1),
        pytest.param("2030-12-31T00:00:00Z", 0, marks=pytest.mark.slow),
    ],
)
async def test_a_silent_node_whose_row_goes_when_its_time_is_up_has_not_left(
    tmp_path: Path, at: str, status: int
) -> None:
    """Peers remove the row of a node that they declared dead: perhaps between two looks."""
    old, other = node(1, "n1"), node(2, "n2")
    silent = node(1, "n1", expires_at="2031-01-01T00:00:00Z")
    acts: list[Look] = [[silent, other]] * 11 + [[other], [node(3, "n1"), other]]
    said = await play(tmp_path, [old, other], *acts, at=at)("--restart", TOUCH, "n1")
    assert said.status == status, said.errors
    assert ("node 1 ended without leaving, and was declared dead" in said.errors) == (status == 1)


async def test_a_successor_that_does_not_come_stops_it(tmp_path: Path) -> None:
    one, two = node(1, "n1"), node(2, "n2")
    said = await play(tmp_path, [one, two], [two])("--restart", TOUCH, "--timeout", "1", "n1", "n2")
    assert (said.status, touched(tmp_path)) == (1, ["n1"])
    assert said.errors == (
        "rolling-restart: stopped at n1: after 1 s no successor has come. Look at what the command "
        "and the node said; restarted: none; not touched: n2\n"
    )


async def test_a_node_that_does_not_leave_in_time_stops_it(tmp_path: Path) -> None:
    one, two = node(1, "n1"), node(2, "n2")
    script = play(tmp_path, [one, two], [node(1, "n1", state="draining"), two])
    said = await script("--restart", TOUCH, "--timeout", "1", "n1", "n2")
    assert (said.status, touched(tmp_path)) == (1, ["n1"])
    assert "stopped at n1: after 1 s node 1 is still draining. " in said.errors


async def test_a_node_that_leaves_something_behind_stops_it(tmp_path: Path) -> None:
    one, two = node(1, "n1"), node(2, "n2")
    script = play(tmp_path, [one, two], [node(1, "n1", state="dead", live=False), two])
    said = await script("--restart", TOUCH, "n1", "n2")
    assert (said.status, touched(tmp_path)) == (1, ["n1"])
    assert "stopped at n1: node 1 is dead: it did not hand over all that it ran" in said.errors


async def test_a_command_has_to_return(tmp_path: Path) -> None:
    script = play(tmp_path, [node(1, "n1")], [], [node(2, "n1")])
    said = await script("--restart", f"{TOUCH}; exec sleep 2", "--timeout", "1", "n1")
    assert said.status == 1
    assert "the successor is active, but the command has not ended" in said.errors


async def test_it_goes_on_only_if_as_many_nodes_are_active_as_before(tmp_path: Path) -> None:
    one, two, three = node(1, "n1"), node(2, "n2"), node(3, "n3")
    gone, new = [two, three], [node(4, "n1"), two]
    script = play(tmp_path, [one, two, three], gone, new)
    said = await script("--restart", TOUCH, "--timeout", "2", "n1", "n2")
    assert said.status == 1
    assert said.errors == (
        "rolling-restart: stopped after n1: after 2 s 2 nodes are active, 3 were at first. "
        "Restarted: n1; not touched: n2\n"
    )
    assert touched(tmp_path) == ["n1"]


async def test_a_node_that_crashed_just_now_is_not_taken_for_a_live_one(tmp_path: Path) -> None:
    ghost = node(9, "n2", expires_at="2030-01-01T00:00:00Z")
    script = play(tmp_path, [node(1, "n1"), ghost])
    said = await script("--restart", TOUCH, "--timeout", "2", "n1")
    assert (said.status, touched(tmp_path)) == (2, [])
    assert said.errors == "rolling-restart: nothing was done: after 2 s n2 has not been heard\n"


async def test_a_name_that_two_nodes_have_is_refused(tmp_path: Path) -> None:
    script = play(tmp_path, [node(1, "n1"), node(2, "n1")])
    said = await script("--restart", TOUCH, "--timeout", "1", "n1")
    assert (said.status, touched(tmp_path)) == (2, [])
    assert "2 live nodes have the name n1" in said.errors


async def test_a_node_that_is_not_active_yet_is_not_touched(tmp_path: Path) -> None:
    script = play(tmp_path, [node(1, "n1", state="joining"), node(2, "n2")])
    said = await script("--restart", TOUCH, "--timeout", "1", "n2", "n1")
    assert (said.status, touched(tmp_path)) == (2, [])
    assert "n1 is joining" in said.errors


async def test_a_successor_under_another_name_is_named(tmp_path: Path) -> None:
    script = play(tmp_path, [node(1, "a1")], [], [node(2, "b2")])
    said = await script("--restart", TOUCH, "--timeout", "1", "*")
    assert said.status == 1
    assert "no successor has come, but b2: is that its name now?" in said.errors


async def test_a_signal_between_nodes_ends_it_at_once(tmp_path: Path) -> None:
    one, two = node(1, "n1"), node(2, "n2")
    mute = node(2, "n2", expires_at="2031-01-01T00:00:00Z")
    script = play(tmp_path, [one, two], [two], [node(3, "n1"), mute])
    process = await script.start("--restart", TOUCH, "n1", "n2")
    assert process.stdout is not None
    lines = [await process.stdout.readline() for _ in range(2)]
    assert lines[1].startswith(b"1/2  n1  ")
    looks = (tmp_path / "past").stat().st_size
    await wait_for(lambda: (tmp_path / "past").stat().st_size > looks, "it looks again", LIMIT_S)
    process.send_signal(signal.SIGTERM)
    said = await ended(process)
    assert (said.status, touched(tmp_path)) == (128 + signal.SIGTERM, ["n1"])
    assert said.errors == (
        "rolling-restart: stopped after n1: interrupted. Restarted: n1; not touched: n2\n"
    )


async def test_a_second_signal_ends_it_in_the_middle_of_a_node(tmp_path: Path) -> None:
    one, two = node(1, "n1"), node(2, "n2")
    process = await play(tmp_path, [one, two], [one, two]).start("--restart", TOUCH, "n1", "n2")
    await wait_for((tmp_path / "touched").exists, "it has begun", LIMIT_S)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert await process.stderr.readline() == (
        b"rolling-restart: finishing n1; once more to stop at once\n"
    )
    process.send_signal(signal.SIGINT)
    said = await ended(process)
    assert (said.status, touched(tmp_path)) == (128 + signal.SIGINT, ["n1"])
    assert said.errors == (
        "rolling-restart: stopped at n1: interrupted. Look at what the command and the node said; "
        "restarted: none; not touched: n2\n"
    )


async def test_it_says_which_kinds_nobody_else_serves(tmp_path: Path) -> None:
    one, two = node(1, "n1", kinds=["a", "mail"]), node(2, "n2")
    new = node(3, "n1")
    said = await play(tmp_path, [one, two], [two], [new, two])("--restart", TOUCH, "n1")
    assert said.status == 0, said.errors
    assert "while n1 restarts, the tasks of mail wait\n" in said.output


async def test_a_command_that_fails_stops_it(tmp_path: Path) -> None:
    script = play(tmp_path, [node(1, "n1"), node(2, "n2")], [node(1, "n1"), node(2, "n2")])
    said = await script("--restart", f"{TOUCH}; exit 7", "n1", "n2")
    assert (said.status, touched(tmp_path)) == (1, ["n1"])
    assert "stopped at n1: the command that restarts it ended with status 7" in said.errors


async def test_the_command_is_told_whom_it_restarts(tmp_path: Path) -> None:
    script = play(tmp_path, [node(1, "web-1")], [], [node(2, "web-1")])
    said = await script("--restart", "echo {id} {pid} {x} '{name}' >>touched", "web*")
    assert said.status == 0, said.errors
    assert touched(tmp_path) == ["1 1001 {x} web-1"]


@pytest.mark.parametrize("name", ["a b", "-oProxyCommand=touch x", "$(touch x)", "'; touch x; '"])
async def test_a_name_that_means_something_to_a_shell_is_refused(name: str, tmp_path: Path) -> None:
    """Whoever may write the row of a node may call it anything."""
    script = play(tmp_path, [node(1, "n1"), node(2, name)])
    said = await script("--restart", TOUCH, "*")
    assert (said.status, touched(tmp_path)) == (2, [])
    assert "must not stand in a command" in said.errors
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (["--restart", TOUCH, "n1", "n7"], "no node is called n7; there are n1, n2"),
        (["--restart", "true", "n1", "n2"], "the command is the same for all nodes"),
        (["delayq@1", "--systemctl", "{folder}/absent"], "there is no program {folder}/absent"),
        (["n1", "--timeout", "nan"], "no number of seconds"),
        (["--restart", TOUCH], "name the nodes"),
    ],
)
async def test_it_does_nothing_if_it_cannot_do_all(
    arguments: list[str], refusal: str, tmp_path: Path
) -> None:
    script = play(tmp_path, [node(1, "n1"), node(2, "n2"), node(3, "n7", state="dead")])
    said = await script(*(text.replace("{folder}", f"{tmp_path}") for text in arguments))
    assert (said.status, touched(tmp_path)) == (2, [])
    assert said.errors.startswith("rolling-restart: nothing was done: ")
    assert refusal.replace("{folder}", f"{tmp_path}") in said.errors


@pytest.mark.parametrize(
    ("unit", "refusal"),
    [
        ("delayq@7", "there is no unit delayq@7: not-found"),
        ("delayq@1", "delayq@1 does not run: failed"),
        ("nothing@*", "no unit matches nothing@*"),
    ],
)
async def test_a_unit_that_does_not_run_is_refused(unit: str, refusal: str, tmp_path: Path) -> None:
    told = {"LoadState": "loaded", "ActiveState": "failed", "MainPID": 0}
    (tmp_path / "delayq@1.unit").write_text(json.dumps(told))
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(SYSTEMCTL.format(python=sys.executable, folder=f"{tmp_path}"))
    systemctl.chmod(0o755)
    said = await play(tmp_path, [node(1, "n1")])(unit)
    assert (said.status, said.errors) == (2, f"rolling-restart: nothing was done: {refusal}\n")


async def test_it_does_nothing_without_a_database(tmp_path: Path) -> None:
    script = Script(tmp_path, DELAYQ, "postgresql://nobody:secret@127.0.0.1:1/nowhere")
    said = await script("--restart", TOUCH, "n1")
    assert said.status == 2
    assert "nothing was done: delayq: " in said.errors
    assert "secret" not in said.errors


async def test_help_is_the_text_at_its_top(tmp_path: Path) -> None:
    said = await Script(tmp_path, DELAYQ)("--help")
    assert said.status == 0
    assert said.output.strip() in SCRIPT.read_text()
