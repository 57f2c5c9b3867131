"""Random histories: whatever is asked of the real statements, in whatever order, they agree with
a small model in plain dicts, row by row, and keep what they promise.

Several nodes and a client share one database whose clock the test owns, so every instant is
predicted to the microsecond. One step is one statement of somebody's; after each one every table
is compared with the model. `tests/model.py` says what the statements mean. A failure tells the
shortest history that was found; the seed of the run, which pytest tells first, makes it again.
"""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar

import asyncpg
import pytest
from hypothesis import HealthCheck, note, seed
from hypothesis import settings as profile
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from delayq.errors import KeyTaken
from delayq.instants import instant_from_us
from delayq.model import OnConflict, ScheduledTask, TaskRequest, TaskState
from delayq.statements import statement
from delayq.store import Cursors, LeaseTerms
from delayq.task_rows import Move
from tests.model import (
    DAY,
    HOUR,
    NEVER,
    SECOND,
    Model,
    Row,
    Scheduled,
    Settling,
    check_promises,
    check_tables,
)
from tests.world import NODES, World, opened

if TYPE_CHECKING:
    from delayq.database import Connection
    from delayq.settings import Settings
    from delayq.store import Settled, Store

    Work: TypeAlias = Callable[[Connection], Awaitable[object]]

T = TypeVar("T")
# Ten minutes before a day of history ends: some histories cross into the next partition.
START = 1_935_100_200 * SECOND
KINDS = ["mail", "sms"]
TTL_MS = 15_000
ERRORS_KEPT = 2
NOBODY = 10**12
LOWEST = -(1 << 63)
LONG = "x" * 5_000  # more than history keeps
INLINE = 4_096  # bytes of payload that come with a lease

Level: TypeAlias = Literal["read_committed", "repeatable_read", "serializable"]


class Mode(NamedTuple):
    """Inside which transaction of the caller's own a verb is called."""

    level: Level
    commits: bool


MODES: Sequence[Mode | None] = [
    *[None] * 6,
    Mode("read_committed", commits=True),
    Mode("read_committed", commits=False),
    Mode("repeatable_read", commits=True),
    Mode("serializable", commits=True),
    Mode("serializable", commits=False),
]
NODE_CHANGES = [
    *["register", "activate"] * 2,
    *["beat"] * 4,
    *["ask to drain", "drain", "leave in order", "leave in a hurry"],
]
OUTCOMES = ["succeeded", "missed", "dead", "retry", "retry", "snooze", "release", "unstarted"]
ERRORS = [None, '{"error": "E"}', '{"error": "F"}']
TIMES = [*["due"] * 6, "almost due", 1, SECOND, 16 * SECOND, HOUR, 2 * HOUR, 31 * DAY, -HOUR]
DELAYS = [0, 0, 0, 0, 0, 1, SECOND, HOUR]
INSTANTS = [START - DAY, START, START + 5 * SECOND, START + DAY]
PAYLOADS = ['{"n": 1}', '{"n": 2}', json.dumps({"n": LONG})]
YEAR_MS = 365 * 86_400_000  # the longest that a request may ask for
TIMEOUTS_MS = [None, None, 1, 5_000, YEAR_MS]
STEPS = [
    *["schedule"] * 4,
    *["schedule_what_is_there"] * 5,
    *["schedule_in_plain_sql"] * 2,
    "schedule_many",
    *["schedule_keyed"] * 2,
    *["insert_by_hand"] * 3,
    *["cancel"] * 2,
    "cancel_by_key",
    "cancel_by_keys",
    *["reschedule"] * 2,
    "reschedule_by_key",
    "reschedule_by_keys",
    "run_now",
    *["revive"] * 2,
    "discard",
    *["node_changes"] * 3,
    *["bury"] * 2,
    "forget",
    *["lease_what_is_due"] * 9,
    *["lease_whatever"] * 2,
    *["settle"] * 5,
    "settle_successes",
    *["effect"] * 3,
    *["adopt"] * 8,
    "set_aside",
    *["time_passes"] * 5,
    "prune_idempotency_keys",
    "look",
    "sweep",
]
# What is done more often in some histories, so that one thing has time to lead to another.
THEMES = {
    "anything": [],
    "crashes": [
        *["lease_what_is_due"] * 15,
        *["bury"] * 8,
        *["adopt"] * 15,
        *["forget"] * 5,
        *["node_changes"] * 10,
    ],
    "debounce": [
        *["schedule_what_is_there"] * 15,
        *["settle"] * 10,
        *["cancel_by_key"] * 5,
        *["time_passes", "prune_idempotency_keys"] * 6,
    ],
    "effects": [*["insert_by_hand"] * 10, *["lease_what_is_due"] * 15, *["effect"] * 15],
}


class Statements(RuleBasedStateMachine):
    """Everybody who writes: callers, nodes, judges, people. One step is one statement of theirs."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.model = Model(START)
        self.nonce = 0
        self.random = random.Random(0)
        self.numbers: Counter[int] = Counter()
        self.followers: set[int] = set()
        self.steps = STEPS
        world.begin_again(START)

    @initialize(theme=st.sampled_from(sorted(THEMES)))
    def two_nodes_are_up(self, theme: str) -> None:
        self.steps = [*STEPS, *THEMES[theme]]
        for node in NODES[:2]:
            self.change(node, "register")
            self.change(node, "activate")

    @rule(number=st.integers(0, 2**32 - 1))
    def step(self, number: int) -> None:
        # One number decides all of a step: what is drawn choice by choice comes out lopsided, and
        # steps can still be left out one by one when a failure is made small. (The same number
        # comes again and again: it means something else each time.)
        self.numbers[number] += 1
        self.random = random.Random(f"{number}/{self.numbers[number]}")
        act = self.choose([name for name in self.steps if self.makes_sense(name)])
        note(f"-- {act}")
        getattr(self, act)()

    def makes_sense(self, name: str) -> bool:
        """False for what could only ask in vain just now."""
        model = self.model
        needed: dict[str, object] = {
            "lease_what_is_due": model.due,
            "settle": model.running,
            "settle_successes": model.running,
            "effect": model.running,
            "adopt": model.orphans,
            "set_aside": model.tasks,
            "schedule_what_is_there": [t for t in model.tasks.values() if t["key"] is not None],
            "revive": model.dead,
            "discard": model.dead,
        }
        need = needed.get(name, True)
        return bool(need() if callable(need) else need)

    @invariant()
    def every_table_agrees_with_the_model(self) -> None:
        tables = self.world.tables()
        model = self.model
        assert _by_id(tables["tasks"]) == model.tasks
        assert _by_id(tables["history"]) == model.history
        assert len(tables["history"]) == len(model.history)
        assert _by_id(tables["dead"]) == model.dead
        assert _by_id(tables["nodes"]) == {n: {"id": n, **row} for n, row in model.nodes.items()}
        assert {_name(row): row for row in tables["idempotency"]} == {
            (kind, key): {"kind": kind, "idempotency_key": key, **row}
            for (kind, key), row in model.idempotency.items()
        }
        assert self.world.effects() == sorted(model.effects)
        check_tables(tables)
        check_promises(model)

    # --- time ---------------------------------------------------------------------------------

    def time_passes(self) -> None:
        """By so much, or until the next task is due (and a microsecond less)."""
        now, tasks = self.model.now, self.model.tasks.values()
        step = self.choose(TIMES)
        if isinstance(step, int):
            self.set_clock(now + step)
        else:
            waiting = [t["execute_at"] for t in tasks if t["execute_at"] > now]
            self.set_clock(min(waiting, default=now + 1) - (step == "almost due"))

    def set_clock(self, now_us: int) -> None:
        note(f"   it is {now_us}")
        self.model.now = now_us
        self.world.set_clock(now_us)

    # --- callers who schedule -----------------------------------------------------------------

    def schedule(self) -> None:
        self.ask(self.request())

    def ask(self, request: TaskRequest) -> None:
        note(f"   {request}")

        async def work(conn: Connection) -> object:
            try:
                return await self.world.client.schedule_one(conn, request)
            except KeyTaken as taken:
                return ("conflict", taken.task_id)

        def expected() -> object:
            answer = self.model.schedule(request)
            if answer.outcome == "conflict":
                return ("conflict", answer.id)
            return _as_told(answer, request.kind)

        self.verb(work, expected)

    def schedule_in_plain_sql(self) -> None:
        request = self.request()
        note(f"   {request}")

        async def work(conn: Connection) -> object:
            try:
                row = await conn.fetchrow(_SCHEDULE, *_in_sql(request))
            except asyncpg.UniqueViolationError:
                return "conflict"
            assert row is not None
            return tuple(row)

        def expected() -> object:
            answer = self.model.schedule(request)
            if answer.outcome == "conflict":
                return "conflict"
            created = answer.outcome not in ("kept", "repeated")
            return (answer.id, created, answer.state, answer.execute_at, answer.follow_up)

        self.verb(work, expected)

    def schedule_what_is_there(self) -> None:
        """The key of a live task once more; of a running one if there is any."""
        held = [task for task in self.model.tasks.values() if task["key"] is not None]
        running = [task for task in held if task["state"] == "running"]
        holder = self.choose(running or held)
        self.ask(self.request()._replace(kind=holder["kind"], key=holder["key"]))

    def schedule_many(self) -> None:
        wanted = [self.request(alone=False) for _ in range(self.choose([1, 2, 3]))]
        self.verb(
            lambda conn: self.world.client.schedule_many(conn, wanted),
            lambda: [_as_told(self.model.schedule(request), request.kind) for request in wanted],
        )

    def schedule_keyed(self) -> None:
        """Many in one statement, the same key twice among them; one that is refused undoes all."""
        wanted = [self.request() for _ in range(self.choose([2, 3, 4]))]
        note(f"   {wanted}")
        before = copy.deepcopy(self.model)

        async def work(conn: Connection) -> object:
            try:
                return await self.world.client.schedule_keyed(conn, wanted)
            except KeyTaken:
                return "conflict"

        def expected() -> object:
            answers = self.model.schedule_keyed(wanted)
            if any(answer.outcome == "conflict" for answer in answers):
                self.model.roll_back_to(before)
                return "conflict"
            return [_as_told(a, r.kind) for a, r in zip(answers, wanted, strict=True)]

        self.verb(work, expected)

    def insert_by_hand(self) -> None:
        (kind, key), at = self.a_key(), self.model.now + self.choose(DELAYS)
        named, again = self.choose([None, None, key]), self.choose([None, "x", "x", "y"])
        note(f"   {kind} {named} {again} {at}")

        async def work(conn: Connection) -> object:
            try:
                return await conn.fetchval(_INSERT, kind, named, again, at)
            except asyncpg.UniqueViolationError:
                return None

        def expected() -> object:
            answer = self.model.insert(kind, named, again, at)
            return None if answer is None else answer.id

        self.verb(work, expected)

    # --- callers who change their minds -------------------------------------------------------

    def cancel(self) -> None:
        ids, client = self.some_ids(), self.world.client
        note(f"   {ids}")

        async def shared(conn: Connection) -> object:
            answers = dict(await client.cancel_unlocked(conn, ids))
            for task_id in self.told_to_go_alone(answers):
                answers |= await client.cancel_many(conn, [task_id])
            return answers

        waits = self.choose([True, False])
        self.verb(
            (lambda conn: client.cancel_many(conn, ids)) if waits else shared,
            lambda: self.model.cancel_many(ids),
        )

    def cancel_by_key(self) -> None:
        kind, key = self.a_key()
        in_sql = "select delayq.cancel(kind => $1, key => $2)"
        plain = self.choose([True, False])
        self.verb(
            (lambda conn: conn.fetchval(in_sql, kind, key))
            if plain
            else (lambda conn: self.world.client.cancel_key(conn, kind, key)),
            lambda: self.model.cancel_key(kind, key),
        )

    def cancel_by_keys(self) -> None:
        kind, keys, wait = self.choose(KINDS), ["a", "b"], self.choose([True, False])
        self.verb(
            lambda conn: self.world.client.cancel_keys(conn, kind, keys, wait=wait),
            lambda: self.model.cancel_keys(kind, keys),
        )

    def reschedule_by_keys(self) -> None:
        kind, keys, wait = self.choose(KINDS), ["a", "b"], self.choose([True, False])
        delay_us, at_us = when = self.when()
        at = self.model.now + delay_us if delay_us is not None else at_us
        assert at is not None
        self.verb(
            lambda conn: self.world.client.reschedule_keys(conn, kind, keys, when, wait=wait),
            lambda: self.model.move_keys(kind, keys, at),
        )

    def reschedule(self) -> None:
        moves = [Move(i, *self.when()) for i in self.some_ids()]
        note(f"   {moves}")
        client = self.world.client

        async def shared(conn: Connection) -> object:
            answers = dict(await client.reschedule_unlocked(conn, moves))
            for task_id in self.told_to_go_alone(answers):
                alone = [move for move in moves if move.id == task_id]
                answers |= await client.reschedule_many(conn, alone)
            return answers

        waits = self.choose([True, False])
        self.verb(
            (lambda conn: client.reschedule_many(conn, moves)) if waits else shared,
            lambda: {i: answer for i, (answer, _) in self.model.move_many(moves).items()},
        )

    def told_to_go_alone(self, answers: Mapping[int, object]) -> list[int]:
        """Nobody holds a lock here; but what waits behind a running task is decided alone."""
        alone = [task_id for task_id, answer in answers.items() if answer is None]
        assert set(alone) <= self.followers
        return alone

    def reschedule_by_key(self) -> None:
        (kind, key), (delay_us, at_us) = self.a_key(), self.when()
        at = self.model.now + delay_us if delay_us is not None else at_us
        assert at is not None
        self.verb(
            lambda conn: self.world.client.reschedule_key(conn, (kind, key), (delay_us, at_us)),
            lambda: self.model.move_key(kind, key, at),
        )

    def run_now(self) -> None:
        task_id = self.an_id()
        self.verb(
            lambda conn: conn.fetchval("select delayq.run_now($1)", task_id),
            lambda: self.model.move(task_id, self.model.now)[0],
        )

    # --- people who look after the dead -------------------------------------------------------

    def revive(self) -> None:
        ids = self.some_ids(self.model.dead)
        note(f"   {ids}")
        self.verb(
            lambda conn: self.world.client.revive_many(conn, ids, 0),
            lambda: {i: self.model.revive(i) for i in sorted(set(ids))},
        )

    def discard(self) -> None:
        ids = self.some_ids(self.model.dead)
        note(f"   {ids}")
        self.verb(
            lambda conn: self.world.client.discard_many(conn, ids),
            lambda: {i: self.model.discard(i) for i in sorted(set(ids))},
        )

    # --- nodes --------------------------------------------------------------------------------

    def node_changes(self) -> None:
        """It comes, lives and goes; or tries to, when others think otherwise."""
        node, what = self.mostly([*self.model.nodes] or NODES, NODES), self.choose(NODE_CHANGES)
        note(f"   node {node}: {what}")
        self.change(node, what)

    def change(self, node: int, what: str) -> None:
        store, model, run = self.world.stores[node], self.model, self.world.run
        match what:
            case "register":
                run(store.register("node", "host", 1, "0", KINDS, TTL_MS))
                model.register(node, TTL_MS)
            case "activate":
                assert run(store.activate()) == model.activate(node)
            case "beat":
                self.beat(node)
            case "ask to drain":
                asked = run(self.world.client.ask_drain(self.world.conn, node))
                assert asked == model.ask_drain(node)
            case "drain":
                run(store.drain())
                model.drain(node)
            case _:
                handed_over = what == "leave in order"
                run(store.leave(handed_over))
                model.leave(node, handed_over)

    def beat(self, node: int) -> None:
        before = {n: (row["state"], row["expires_at"]) for n, row in self.model.nodes.items()}
        ((state, clock, nodes, _),) = self.world.fetch("beat", node, TTL_MS, "{}", 0)
        assert state == self.model.beat(node, TTL_MS)
        assert clock == self.model.now
        # the news are of the moment before the beat: its own row is as it was
        news = {row["id"]: (row["state"], row["expires_at_us"]) for row in json.loads(nodes)}
        assert news == before

    def bury(self) -> None:
        """A judge waited for a whole TTL; perhaps what it saw is no longer so."""
        busy = sorted({task["lease_owner"] for task in self.model.running()})
        node, seen_before = self.mostly(busy or NODES, NODES), self.choose([0, 0, 0, -SECOND])
        self.set_clock(self.model.now + TTL_MS * 1_000)
        row = self.model.nodes.get(node, {"expires_at": START})
        expires_at = row["expires_at"] + seen_before
        rows = self.world.fetch("bury", node, expires_at)
        assert bool(rows) == self.model.bury(node, expires_at)

    def forget(self) -> None:
        nodes = self.random.sample(NODES, self.choose([1, 2, 4]))
        gone = self.world.run(self.anybody.forget(sorted(nodes)))
        assert set(gone) == self.model.forget(nodes)

    # --- leases -------------------------------------------------------------------------------

    def lease_what_is_due(self) -> None:
        due = self.model.due()
        one = [self.choose(due)]
        self.lease(one if self.choose([True, False]) else due, 0)

    def lease_whatever(self) -> None:
        """Timers are a cache: what they ask for may be moved, over, or somebody else's."""
        self.lease(list(dict.fromkeys(self.some_ids())), self.choose([0, 1, SECOND]))

    def lease(self, ids: list[int], ahead_us: int) -> None:
        node, terms, model = self.a_node(), self.terms(), self.model
        note(f"   node {node}: {ids}, {ahead_us} us ahead, {terms}")
        self.nonce += 1
        wanted = model.leasable(node, ids, terms, ahead_us)
        store = self.world.stores[node]
        rows = self.world.run(store.lease(ids, self.nonce, terms, ahead_us, INLINE))
        assert {row["id"] for row in rows} == wanted
        for row in sorted(rows, key=itemgetter("id")):  # what is drawn later must not vary
            before = dict(model.tasks[row["id"]])
            _check_lease(row, before, model.lease(node, row["id"], row["lease_token"], terms))
            has_grace = before["misfire_grace_ms"] is not None or row["kind"] in terms.with_grace
            assert row["never_leased"] == (before["leased_at"] == NEVER if has_grace else None)
        held = self.world.run(store.holds(ids, self.nonce))
        assert dict(held) == {row["id"]: row["lease_token"] for row in rows}

    def settle(self) -> None:
        """One batch, as the settler sends it: live leases, and such as are over."""
        batch = [
            Settling(
                *lease,
                self.choose([None, 0, 1_500]),
                self.choose(OUTCOMES),
                self.choose([None, 0, SECOND, HOUR]),
                self.choose(ERRORS),
            )
            for lease in self.some_leases()
        ]
        note(f"   {batch}")
        rows = self.world.run(self.settled(batch))
        answers = {row.id: (row.verdict, row.execute_at_us) for row in rows}
        verdicts = {end.id: self.model.settle(end, ERRORS_KEPT) for end in batch}
        assert answers == {i: verdict for i, verdict in verdicts.items() if verdict is not None}
        self.tell_apart(batch)

    def settle_successes(self) -> None:
        """The hot path, which says how many; and for what it leaves the long way, as ever."""
        batch = [Settling(*lease, 7, "succeeded") for lease in self.some_leases()]
        note(f"   {batch}")
        ids, tokens, lateness_us, *_ = _columns(batch)
        settled = self.world.run(self.anybody.settle_succeeded(ids, tokens, lateness_us))
        rows = self.world.run(self.settled(batch))
        verdicts = [self.model.settle(end, ERRORS_KEPT) for end in batch]
        assert settled + len(rows) == len(verdicts) - verdicts.count(None)
        assert {row.verdict for row in rows} <= {"succeeded"}
        self.tell_apart(batch)

    async def settled(self, batch: list[Settling]) -> list[Settled]:
        ids, tokens, lateness_us, outcomes, delays_us, errors = _columns(batch)
        return await self.anybody.settle(
            ids, tokens, lateness_us, outcomes, delays_us, errors, ERRORS_KEPT
        )

    def effect(self) -> None:
        """An effect: its row and the completion of its task commit together, or not at all."""
        (task_id, token), *_ = self.some_leases()
        note(f"   {task_id} {token}")
        before = copy.deepcopy(self.model)
        expected = self.model.effect(task_id, token, 3)
        commits = expected == "settled" and self.choose([True, True, False])

        async def work(conn: Connection) -> object:
            await conn.execute("insert into effects values ($1, $2)", task_id, token)
            return await conn.fetchval(statement("settle_effect"), task_id, token, 3)

        mode = Mode("read_committed", commits=commits)
        assert self.world.run(self.transact(mode, work)) == expected
        if not commits:
            self.model.roll_back_to(before)

    def tell_apart(self, batch: list[Settling]) -> None:
        ids, tokens, *_ = _columns(batch)
        found = self.world.run(self.anybody.tell_apart(ids, tokens))
        assert found == {end.id: self.model.tell_apart(end.id, end.token) for end in batch}

    def adopt(self) -> None:
        ids = sorted({*(task["id"] for task in self.model.running()), *self.some_ids()})
        overdue_us = self.choose([HOUR, 8 * SECOND, 0])
        note(f"   {ids}, {overdue_us} us overdue")
        rows = self.world.run(self.anybody.adopt(ids, overdue_us))
        answers = {row.id: (row.verdict, row.execute_at_us) for row in rows}
        verdicts = {task_id: self.model.adopt(task_id, overdue_us) for task_id in ids}
        assert answers == {i: verdict for i, verdict in verdicts.items() if verdict is not None}

    def set_aside(self) -> None:
        task_id, error = self.an_id(), '{"error": "odd"}'
        done = self.world.run(self.anybody.set_aside(task_id, error))
        assert done == self.model.set_aside(task_id, error)

    # --- retention and looking ----------------------------------------------------------------

    def prune_idempotency_keys(self) -> None:
        """The whole walk, two rows a page."""
        after = ("", "")
        while (end := self.world.run(self.anybody.prune_idempotency(30, after, 2))) is not None:
            after = end
        self.model.prune(30)

    def look(self) -> None:
        model, client, conn = self.model, self.world.client, self.world.conn
        for task_id in self.some_ids():
            task, found = self.world.run(client.get(conn, task_id)), model.find(task_id)
            assert (None if task is None else (task.state, task.execute_at)) == (
                None if found is None else (found.state, instant_from_us(found.execute_at))
            )
        for kind in KINDS:
            holder = model.holder(kind, "a")
            assert self.world.run(client.key_holder(conn, kind, "a")) == (holder or {}).get("id")
        ids = [*model.tasks, NOBODY]
        rows = self.world.run(self.anybody.look(ids))
        assert {row.id: (row.state, row.execute_at_us) for row in rows} == {
            i: (task["state"], task["execute_at"]) for i, task in model.tasks.items()
        }
        flagged = {i for i, task in model.tasks.items() if task["cancel_requested"]}
        assert set(self.world.run(self.anybody.cancel_flags(ids))) == flagged

    def sweep(self) -> None:
        """What a sweep reads: the window, what is overdue, and what runs."""
        model, store, buckets = self.model, self.anybody, list(range(256))
        served = self.choose([KINDS, ["sms"]])
        until = model.now + self.choose([0, SECOND, HOUR])
        pending = {
            task["id"]: task["execute_at"]
            for task in model.tasks.values()
            if task["state"] == "pending" and task["kind"] in served and task["execute_at"] <= until
        }
        start = Cursors(buckets, [0] * 256, [""] * 256, [0] * 256, [until] * 256)
        page = self.world.run(store.window(start, served, 100, None))
        assert {row[0]: row[2] for row in page.rows} == pending
        overdue = self.world.run(store.overdue(buckets, 0, until, served, [], 1_000))
        assert {row.id: row.execute_at_us for row in overdue} == pending
        running = self.world.run(store.running((0, LOWEST), 255, until, 100))
        assert {(row.id, row.owner, row.token) for row in running} == {
            (task["id"], task["lease_owner"], task["lease_token"])
            for task in model.running()
            if task["execute_at"] <= until
        }

    # --- inside -------------------------------------------------------------------------------

    @property
    def anybody(self) -> Store:
        """A node, for statements that do not say whose they are."""
        return self.world.stores[NODES[0]]

    def verb(self, work: Work, expected: Callable[[], object]) -> None:
        """A caller's verb, in a transaction of its own or not, that commits or is rolled back."""
        mode = self.choose(MODES)
        before = copy.deepcopy(self.model)
        self.followers = {task["next"]["id"] for task in before.running() if task["next"]}
        wanted = expected()
        answer = self.world.run(self.transact(mode, work))
        note(f"   {answer} ({mode})")
        assert answer == wanted
        if mode is not None and not mode.commits:
            self.model.roll_back_to(before)
        if mode is not None and mode.level != "read_committed":
            self.model.next_id = self.world.next_id()  # to look beyond its snapshot may cost one

    async def transact(self, mode: Mode | None, work: Work) -> object:
        conn = self.world.conn
        if mode is None:
            return await work(conn)
        transaction = conn.transaction(isolation=mode.level)
        await transaction.start()
        try:
            answer = await work(conn)
        except BaseException:
            await transaction.rollback()
            raise
        await (transaction.commit() if mode.commits else transaction.rollback())
        return answer

    def choose(self, among: Sequence[T]) -> T:
        """One of these; the more often a value is named, the likelier."""
        return self.random.choice(among)

    def mostly(self, likely: Sequence[T], possible: Sequence[T]) -> T:
        """One of the likely, four times out of five."""
        return self.choose(likely if self.random.random() < 0.8 else possible)

    def request(self, *, alone: bool = True) -> TaskRequest:
        """One wish to schedule."""
        (kind, key), (delay_us, execute_at_us) = self.a_key(), self.when()
        request = TaskRequest(
            kind=kind,
            payload=self.choose(PAYLOADS),
            delay_us=delay_us,
            execute_at_us=execute_at_us,
            priority=self.choose([0, 0, 7, -100]),
            max_attempts=self.choose([None, None, 1, 2, 10_000]),
            timeout_ms=self.choose(TIMEOUTS_MS),
            misfire_grace_ms=self.choose([None, None, 0, 60_000, YEAR_MS]),
            headers=self.choose(["{}", '{"trace": "t"}']),
        )
        if not alone:
            return request
        return request._replace(
            key=self.mostly([key], [None]),
            on_conflict=self.choose([OnConflict.KEEP, OnConflict.ERROR, *[OnConflict.REPLACE] * 2]),
            idempotency_key=self.choose([*[None] * 6, *"uvwxyz"]),
        )

    def a_key(self) -> tuple[str, str]:
        """So few that they are often taken."""
        return self.choose(["mail", "mail", "sms"]), self.choose(["a", "a", "b"])

    def when(self) -> tuple[int | None, int | None]:
        """A delay, or an instant."""
        if self.choose([True, True, True, False]):
            return self.choose(DELAYS), None
        return None, self.choose(INSTANTS)

    def terms(self) -> LeaseTerms:
        """What a node knows of the kinds that it serves: code versions differ."""
        served = self.choose([*[KINDS] * 5, ["mail"], ["sms", "mail"]])
        return LeaseTerms(
            kinds=served,
            max_attempts=[self.choose([1, 2, 5, 5]) for _ in served],
            timeouts_ms=[self.choose(TIMEOUTS_MS) for _ in served],
            deadlines=[self.choose([True, False]) for _ in served],
            with_grace=self.choose([[], ["sms"]]),
        )

    def a_node(self) -> int:
        """One that may fire, most of the time."""
        states = {node: row["state"] for node, row in self.model.nodes.items()}
        firing = [node for node in NODES if states.get(node) in ("joining", "active")]
        return self.mostly(firing or NODES, NODES)

    def an_id(self) -> int:
        """Of a live task, most of the time."""
        model = self.model
        waiting: list[int] = [task["next"]["id"] for task in model.running() if task["next"]]
        known = sorted({*model.promised, NOBODY})
        return self.mostly(sorted({*model.tasks, *waiting}) or known, known)

    def some_ids(self, likely: Mapping[int, Row] | None = None) -> list[int]:
        ids = [self.an_id() for _ in range(self.choose([1, 1, 2, 3]))]
        return ids if not likely else [self.choose(sorted(likely)), *ids]

    def some_leases(self) -> list[tuple[int, int]]:
        """Live leases most of the time, else such as are over or never were; one a task."""
        model = self.model
        live = [(task["id"], task["lease_token"]) for task in model.running()]
        crossed = [(one[0], other[1]) for one in live for other in live if one != other]
        stale = [*model.leases, *crossed, (NOBODY, 1), *((task_id, 1) for task_id in model.tasks)]
        chosen = [self.mostly(live or stale, stale) for _ in range(self.choose([1, 1, 2, 4]))]
        return list(dict(reversed(chosen)).items())


def _check_lease(row: Any, before: Row, after: Row) -> None:
    """What the lease told its node."""
    text = json.dumps(before["payload"])
    assert row["payload"] == (text if len(text) <= INLINE else None)
    assert row["headers"] == (json.dumps(before["headers"]) if before["headers"] else None)
    told = "kind execute_at due_at timeout_ms misfire_grace_ms idempotency_key priority".split()
    assert [row[name] for name in told] == [before[name] for name in told]
    assert row["attempt"] == after["attempt"]


_SCHEDULE = """
    select id, created, state, delayq.micros(execute_at), follow_up
      from delayq.schedule($1, $2::text::jsonb, delay => $3, at => $4, key => $5,
                           on_conflict => $6, idempotency_key => $7, priority => $8,
                           max_attempts => $9, timeout => $10, misfire_grace => $11,
                           headers => $12::text::jsonb)
"""
_INSERT = """
    insert into delayq.tasks (kind, key, idempotency_key, execute_at) values ($1, $2, $3, $4)
    returning id
"""


def _in_sql(request: TaskRequest) -> tuple[object, ...]:
    return (
        request.kind,
        request.payload,
        None if request.delay_us is None else timedelta(microseconds=request.delay_us),
        request.execute_at_us,
        request.key,
        str(request.on_conflict),
        request.idempotency_key,
        request.priority,
        request.max_attempts,
        _interval(request.timeout_ms),
        _interval(request.misfire_grace_ms),
        request.headers,
    )


def _interval(milliseconds: int | None) -> timedelta | None:
    return None if milliseconds is None else timedelta(milliseconds=milliseconds)


def _as_told(answer: Scheduled, kind: str) -> ScheduledTask:
    return ScheduledTask(
        id=answer.id,
        kind=kind,
        created=answer.outcome not in ("kept", "repeated"),
        state=None if answer.state is None else TaskState(answer.state),
        execute_at=None if answer.execute_at is None else instant_from_us(answer.execute_at),
        follow_up=answer.follow_up,
    )


def _columns(batch: list[Settling]) -> Any:
    """The batch as the parallel arrays that the store takes."""
    return [list(column) for column in zip(*batch, strict=True)]


def _by_id(rows: list[Row]) -> dict[int, Row]:
    return {row["id"]: row for row in rows}


def _name(row: Row) -> tuple[str, str]:
    return row["kind"], row["idempotency_key"]


@pytest.mark.parametrize(
    ("histories", "steps"),
    [
        pytest.param(120, 60, marks=pytest.mark.timeout(900)),
        pytest.param(600, 100, marks=[pytest.mark.more, pytest.mark.timeout(3_600)]),
    ],
)
def test_every_statement_agrees_with_the_model(
    settings: Settings, histories: int, steps: int
) -> None:
    chosen = random.randrange(2**32)
    with opened(settings, START) as world:

        def begin() -> Statements:
            note(f"hypothesis seed {chosen}")
            return Statements(world)

        run_state_machine_as_test(
            seed(chosen)(begin),  # type: ignore[arg-type]  # whatever makes one will do
            settings=profile(
                max_examples=histories,
                stateful_step_count=steps,
                deadline=None,
                database=None,
                print_blob=True,
                suppress_health_check=list(HealthCheck),
            ),
        )
