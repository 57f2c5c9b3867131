"""What delayq's statements mean, in plain dicts: the reference that the real ones are held to.

No SQL, no waiting, no clock of its own: whoever drives it says what time it is. Rows are dicts with
the column names of the schema; instants are microseconds since 1970. `Model` answers every
statement as the real one should, and afterwards holds what every table should hold.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from delayq.model import TaskRequest
    from delayq.store import LeaseTerms

Row: TypeAlias = dict[str, Any]

SECOND = 1_000_000
HOUR = 3_600 * SECOND
DAY = 24 * HOUR
NEVER = -62_135_596_800_000_000  # how minus infinity and infinity are told
FOR_EVER = 253_402_214_400_000_000
HISTORY_KEEPS = 4_096  # bytes of payload

TOLD = (
    "id kind payload headers key idempotency_key priority due_at execute_at created_at attempt"
    " interruptions errors"
).split()
DEAD_ALSO = "misfire_grace_ms timeout_ms max_attempts".split()
ASKED = "payload headers priority misfire_grace_ms timeout_ms max_attempts".split()
FINAL = frozenset({"succeeded", "cancelled", "missed", "dead"})
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Scheduled(NamedTuple):
    """The answer to one request."""

    outcome: str
    id: int
    state: str | None
    execute_at: int | None
    follow_up: int | None = None


class Found(NamedTuple):
    """Where a task is."""

    place: str
    state: str
    execute_at: int


class Settling(NamedTuple):
    """How somebody wants a lease to end."""

    id: int
    token: int
    lateness_us: int | None
    outcome: str
    delay_us: int | None = None
    error: str | None = None


class Model:
    """Every table as it should be."""

    def __init__(self, now: int) -> None:
        self.now = now
        self.next_id = 1
        self.tasks: dict[int, Row] = {}
        self.history: dict[int, Row] = {}
        self.dead: dict[int, Row] = {}
        self.idempotency: dict[tuple[str, str], Row] = {}
        self.nodes: dict[int, Row] = {}
        self.effects: list[tuple[int, int]] = []
        # what was promised and done, which no table has to remember
        self.promised: set[int] = set()
        self.discarded: set[int] = set()
        self.leases: list[tuple[int, int]] = []  # (id, token), every one that there ever was

    def roll_back_to(self, before: Model) -> None:
        """Everything as it was, but an id that was drawn is gone."""
        next_id = self.next_id
        self.__dict__.update(deepcopy(before.__dict__))
        self.next_id = next_id

    # --- scheduling ---------------------------------------------------------------------------

    def schedule(self, request: TaskRequest) -> Scheduled:
        """One request, with a key or without."""
        if (known := self._claimed(request)) is not None:
            found = self.find(known) or Found("", "", 0)
            return Scheduled(
                "repeated", known, found.state or None, found.execute_at if found.place else None
            )
        holder = self.holder(request.kind, request.key)
        if holder is None:
            return self._create(request)
        seen = holder["id"], holder["state"], holder["execute_at"]
        if request.on_conflict == "error":
            return Scheduled("conflict", *seen)
        if request.on_conflict == "keep":
            self._claim(request, holder["id"])
            return Scheduled("kept", *seen, _next_id(holder))
        if holder["state"] == "pending":
            return self._replace(holder, request)
        return self._queue_behind(holder, request)

    def schedule_keyed(self, requests: Sequence[TaskRequest]) -> list[Scheduled]:
        """Many at once: those that look new first, then the others in the order of their locks."""
        new = [nr for nr, r in enumerate(requests) if self._looks_new(r)]
        drawn = {nr: self._draw() for nr in new}
        claims = {nr for nr in new if self._claim(requests[nr], drawn[nr])}
        answers: dict[int, Scheduled] = {}
        for nr in new:
            request = requests[nr]
            nameless = request.idempotency_key is None
            if (nameless or nr in claims) and self.holder(request.kind, request.key) is None:
                answers[nr] = self._write(request, drawn[nr])
        for nr in sorted(set(range(len(requests))) - set(answers), key=_turn(requests)):
            if nr in claims:  # for a task that never came to be
                del self.idempotency[requests[nr].kind, requests[nr].idempotency_key or ""]
            answers[nr] = self.schedule(requests[nr])
        return [answers[nr] for nr in range(len(requests))]

    def _looks_new(self, request: TaskRequest) -> bool:
        unclaimed = self._claimed(request) is None
        return unclaimed and self.holder(request.kind, request.key) is None

    def insert(
        self, kind: str, key: str | None, again: str | None, execute_at: int
    ) -> Scheduled | None:
        """A plain INSERT; None if the key is taken. Either way an id is drawn.

        `again`: an idempotency key, which administrators may write, and nobody claims.
        """
        task_id = self._draw()
        if self.holder(kind, key) is not None:
            return None
        named = {"kind": kind, "key": key, "idempotency_key": again}
        self._add(task_id, named | {"execute_at": execute_at})
        return Scheduled("created", task_id, "pending", execute_at)

    def _create(self, request: TaskRequest) -> Scheduled:
        task_id = self._draw()
        self._claim(request, task_id)
        return self._write(request, task_id)

    def _write(self, request: TaskRequest, task_id: int) -> Scheduled:
        at = self._when(request)
        named = {
            "kind": request.kind, "key": request.key, "idempotency_key": request.idempotency_key
        }  # fmt: skip
        self._add(task_id, named | _asked(request) | {"execute_at": at})
        return Scheduled("created", task_id, "pending", at)

    def _replace(self, holder: Row, request: TaskRequest) -> Scheduled:
        """The debounce: the same id, a new life."""
        at = self._when(request)
        self._claim(request, holder["id"])
        holder.update(_asked(request))
        holder.update(
            execute_at=at,
            due_at=at,
            attempt=0,
            interruptions=0,
            errors=[],
            leased_at=NEVER,
            attempt_limit=0,
            idempotency_key=request.idempotency_key or holder["idempotency_key"],
        )
        return Scheduled("replaced", holder["id"], "pending", at)

    def _queue_behind(self, holder: Row, request: TaskRequest) -> Scheduled:
        """It runs just now: the new request waits under an id of its own."""
        before = holder["next"]
        task_id = before["id"] if before else self._draw()
        self.promised.add(task_id)
        self._claim(request, task_id)
        waited_for = before["idempotency_key"] if before else None
        holder["next"] = _asked(request) | {
            "id": task_id,
            "execute_at_us": self._when(request),
            "created_at_us": self.now,
            "idempotency_key": request.idempotency_key or waited_for,
        }
        return Scheduled("waiting", holder["id"], "running", holder["execute_at"], task_id)

    def _claimed(self, request: TaskRequest) -> int | None:
        row = self.idempotency.get((request.kind, request.idempotency_key or ""))
        return None if row is None else int(row["task_id"])

    def _claim(self, request: TaskRequest, task_id: int) -> bool:
        name = request.kind, request.idempotency_key or ""
        if request.idempotency_key is None or name in self.idempotency:
            return False
        self.idempotency[name] = {
            "task_id": task_id, "scheduled_at": self.now, "applied_at": None, "ended_at": None
        }  # fmt: skip
        return True

    def _when(self, request: TaskRequest) -> int:
        return self._instant(request.delay_us, request.execute_at_us)

    def _instant(self, delay_us: int | None, execute_at_us: int | None) -> int:
        if delay_us is not None:
            return self.now + delay_us
        assert execute_at_us is not None
        return execute_at_us

    def _draw(self) -> int:
        self.next_id += 1
        return self.next_id - 1

    def _add(self, task_id: int, columns: Row) -> None:
        self.promised.add(task_id)
        self.tasks[task_id] = {
            "id": task_id,
            "payload": {},
            "headers": {},
            "key": None,
            "idempotency_key": None,
            "priority": 0,
            "due_at": None,
            "misfire_grace_ms": None,
            "timeout_ms": None,
            "max_attempts": None,
            "attempt": 0,
            "interruptions": 0,
            "state": "pending",
            "lease_owner": 0,
            "lease_token": 0,
            "leased_at": NEVER,
            "deadline_at": FOR_EVER,
            "attempt_limit": 0,
            "cancel_requested": False,
            "next": None,
            "errors": [],
            "created_at": self.now,
            **columns,
        }

    # --- looking ------------------------------------------------------------------------------

    def holder(self, kind: str, key: str | None) -> Row | None:
        """The live task that holds a key."""
        if key is None:
            return None
        held = (t for t in self.tasks.values() if (t["kind"], t["key"]) == (kind, key))
        return next(held, None)

    def in_front_of(self, task_id: int) -> Row | None:
        """The running task behind which this one waits."""
        return next((t for t in self.tasks.values() if _next_id(t) == task_id), None)

    def find(self, task_id: int) -> Found | None:
        """Where a task is now."""
        if (task := self.tasks.get(task_id)) is not None:
            return Found("tasks", task["state"], task["execute_at"])
        if (front := self.in_front_of(task_id)) is not None:
            return Found("follow_up", "pending", front["next"]["execute_at_us"])
        if (task := self.dead.get(task_id)) is not None:
            return Found("dead_tasks", "dead", task["execute_at"])
        if (task := self.history.get(task_id)) is not None:
            return Found("task_history", task["state"], task["execute_at"])
        return None

    def due(self) -> list[int]:
        """Pending tasks whose time has come."""
        return [
            task["id"]
            for task in self.tasks.values()
            if task["state"] == "pending" and task["execute_at"] <= self.now
        ]

    def running(self) -> list[Row]:
        """Live leases."""
        return [task for task in self.tasks.values() if task["state"] == "running"]

    def orphans(self) -> list[Row]:
        """What dead nodes run, and such as are gone, and what runs beyond its deadline."""
        return [
            task
            for task in self.running()
            if not self.alive(task["lease_owner"]) or task["deadline_at"] < self.now
        ]

    def alive(self, node: int) -> bool:
        """False for a node that was buried, has left, or never came."""
        return node in self.nodes and self.nodes[node]["state"] != "dead"

    def tell_apart(self, task_id: int, token: int) -> str:
        """What became of a lease."""
        task = self.tasks.get(task_id)
        if task is not None and task["lease_token"] == token:
            return "running"
        for place in (self.dead, self.history):
            if task_id in place and place[task_id]["lease_token"] == token:
                return str(place[task_id].get("state", "dead"))
        return "lost"

    # --- changing one's mind ------------------------------------------------------------------

    def cancel(self, task_id: int) -> str:
        """By id."""
        task, front = self.tasks.get(task_id), self.in_front_of(task_id)
        if task is not None and task["state"] == "running":
            task["cancel_requested"] = True
            return "cancel_requested"
        if task is not None:
            self._file(self.tasks.pop(task_id), "cancelled")
            return "cancelled"
        if front is not None:
            self._withdraw(front)
            return "cancelled"
        return "not_found" if self.find(task_id) is None else "already_finished"

    def cancel_many(self, ids: Iterable[int]) -> dict[int, str]:
        """By ids, each answered once."""
        return {task_id: self.cancel(task_id) for task_id in sorted(set(ids))}

    def cancel_key(self, kind: str, key: str) -> str:
        """By kind and key: what waits behind a running holder goes, too."""
        holder = self.holder(kind, key)
        if holder is None:
            return "not_found"
        if holder["next"]:
            self._withdraw(holder)
        return self.cancel(holder["id"])

    def cancel_keys(self, kind: str, keys: Iterable[str]) -> dict[str, tuple[int | None, str]]:
        """The same for several keys: who held each, and the answer."""
        holders = {key: (self.holder(kind, key) or {}).get("id") for key in keys}
        return {key: (holder, self.cancel_key(kind, key)) for key, holder in holders.items()}

    def _withdraw(self, front: Row) -> None:
        waiting, front["next"] = front["next"], None
        at = waiting["execute_at_us"]
        self._file(
            {
                **waiting,
                "kind": front["kind"],
                "key": front["key"],
                "due_at": at,
                "execute_at": at,
                "created_at": waiting["created_at_us"],
                "attempt": 0,
                "interruptions": 0,
                "errors": [],
            },
            "cancelled",
        )

    def move(self, task_id: int, at: int) -> tuple[str, int | None]:
        """To another instant: the answer, and when it fires."""
        task, front = self.tasks.get(task_id), self.in_front_of(task_id)
        if task is not None and task["state"] == "pending":
            task.update(execute_at=at, due_at=at)
            return ("retry_moved" if task["attempt"] else "moved"), at
        if front is not None:
            front["next"]["execute_at_us"] = at
            return "moved", at
        found = self.find(task_id)
        if found is None:
            return "not_found", None
        names = {"tasks": "running", "dead_tasks": "dead", "task_history": "already_finished"}
        return names[found.place], found.execute_at

    def move_many(
        self, moves: Iterable[tuple[int, int | None, int | None]]
    ) -> dict[int, tuple[str, int | None]]:
        """Several; of two moves of one task the later counts."""
        wanted = {task_id: self._instant(delay, at) for task_id, delay, at in moves}
        return {task_id: self.move(task_id, at) for task_id, at in wanted.items()}

    def move_key(self, kind: str, key: str, at: int) -> str:
        """The holder of a key."""
        holder = self.holder(kind, key)
        return "not_found" if holder is None else self.move(holder["id"], at)[0]

    def move_keys(
        self, kind: str, keys: Iterable[str], at: int
    ) -> dict[str, tuple[int | None, str]]:
        """The holders of several keys: who held each, and the answer."""
        holders = {key: (self.holder(kind, key) or {}).get("id") for key in keys}
        return {key: (holder, self.move_key(kind, key, at)) for key, holder in holders.items()}

    def revive(self, task_id: int) -> str:
        """Back under its id with all its attempts."""
        task = self.dead.get(task_id)
        if task is None:
            return self._not_dead(task_id)
        if self.holder(task["kind"], task["key"]) is not None:
            return "key_taken"
        del self.dead[task_id]
        kept = ("kind", "key", "idempotency_key", "errors", "created_at", *ASKED)
        again = {name: task[name] for name in kept}
        self._add(task_id, again | {"due_at": self.now, "execute_at": self.now})
        return "revived"

    def discard(self, task_id: int) -> str:
        """Removed for good."""
        if task_id not in self.dead:
            return self._not_dead(task_id)
        del self.dead[task_id]
        self.discarded.add(task_id)
        return "discarded"

    def _not_dead(self, task_id: int) -> str:
        found = self.find(task_id)
        if found is None:
            return "not_found"
        return "already_finished" if found.place == "task_history" else "live"

    # --- leases -------------------------------------------------------------------------------

    def leasable(self, node: int, ids: Iterable[int], terms: LeaseTerms, ahead_us: int) -> set[int]:
        """Which of these a node may have now."""
        if node not in self.nodes or self.nodes[node]["state"] not in ("joining", "active"):
            return set()
        return {
            task_id
            for task_id in ids
            if (task := self.tasks.get(task_id)) is not None
            and task["state"] == "pending"
            and task["kind"] in terms.kinds
            and task["execute_at"] <= self.now + ahead_us
        }

    def lease(self, node: int, task_id: int, token: int, terms: LeaseTerms) -> Row:
        """The node has it; the row afterwards."""
        task = self.tasks[task_id]
        nr = terms.kinds.index(task["kind"])
        timeout_ms = task["timeout_ms"] or terms.timeouts_ms[nr]
        bounded = terms.deadlines[nr] and timeout_ms is not None
        task.update(
            state="running",
            lease_owner=node,
            lease_token=token,
            leased_at=self.now,
            deadline_at=self.now + (timeout_ms or 0) * 1_000 if bounded else FOR_EVER,
            attempt=task["attempt"] + 1,
            attempt_limit=task["max_attempts"] or terms.max_attempts[nr],
        )
        self.leases.append((task_id, token))
        return task

    def settle(self, end: Settling, errors_kept: int) -> tuple[str, int | None] | None:
        """The verdict and when it fires again; None: that lease is over."""
        task = self.tasks.get(end.id)
        if task is None or task["state"] != "running" or task["lease_token"] != end.token:
            return None
        verdict = _verdict(task, end.outcome)
        if end.error is not None:
            task["errors"] = [*task["errors"], json.loads(end.error)][-errors_kept:]
        if verdict in FINAL:
            self._end(self.tasks.pop(end.id), verdict, end.lateness_us)
            return verdict, None
        return verdict, self._put_back(task, end)

    def _put_back(self, task: Row, end: Settling) -> int:
        if end.outcome in ("snooze", "release", "unstarted"):
            task["attempt"] -= 1
        if end.outcome == "release":
            task["interruptions"] += 1
        if end.outcome in ("retry", "snooze", "adopt") and task["due_at"] is None:
            task["due_at"] = task["execute_at"]  # when it was asked for, whenever it fires
        if end.outcome in ("retry", "snooze") or end.delay_us:
            task["execute_at"] = self.now + (end.delay_us or 0)
        task.update(state="pending", lease_owner=0, lease_token=0, deadline_at=FOR_EVER)
        return int(task["execute_at"])

    def _end(self, task: Row, verdict: str, lateness_us: int | None) -> None:
        """Out of the live tasks; whatever waited behind it starts in its place."""
        told = {
            "node": task["lease_owner"],
            "lease_token": task["lease_token"],
            "lateness_us": lateness_us,
            "started_at": None if lateness_us is None else task["execute_at"] + lateness_us,
            "successor": _next_id(task),
        }
        if verdict == "dead":
            self.dead[task["id"]] = _told(task) | {n: task[n] for n in DEAD_ALSO} | told
            self.dead[task["id"]]["finished_at"] = self.now
        else:
            self._file(task, verdict, **told)
        waiting = task["next"]
        if waiting:
            at = waiting["execute_at_us"]
            columns = {name: waiting[name] for name in (*ASKED, "idempotency_key")}
            named = {"kind": task["kind"], "key": task["key"]}
            times = {"due_at": at, "execute_at": at, "created_at": waiting["created_at_us"]}
            self._add(waiting["id"], columns | named | times)

    def _file(self, task: Row, state: str, **told: object) -> None:
        never_ran: Row = {
            "node": None, "lease_token": 0, "lateness_us": None, "started_at": None,
            "successor": None,
        }  # fmt: skip
        row = _told(task) | {"state": state, "finished_at": self.now} | never_ran | told
        if len(json.dumps(task["payload"])) > HISTORY_KEEPS:
            row["payload"] = None
        assert task["id"] not in self.history, "a task ends once"
        self.history[task["id"]] = row

    def effect(self, task_id: int, token: int, lateness_us: int) -> str:
        """Settle inside the transaction of an effect. Only `settled` may be committed."""
        task = self.tasks.get(task_id)
        if task is None or task["state"] != "running" or task["lease_token"] != token:
            filed = task_id in self.history and self.history[task_id]["lease_token"] == token
            return "already_settled" if filed else "lost"
        if (name := task["idempotency_key"]) is not None:
            fresh = {"task_id": task_id, "scheduled_at": self.now, "ended_at": None}
            row = self.idempotency.setdefault((task["kind"], name), fresh | {"applied_at": None})
            if row["applied_at"] is not None:
                return "already_applied"
            row["applied_at"] = self.now
        self.settle(Settling(task_id, token, lateness_us, "succeeded"), 1)
        self.effects.append((task_id, token))
        return "settled"

    def adopt(self, task_id: int, overdue_us: int) -> tuple[str, int | None] | None:
        """Take over what a dead or missing node ran, or a live one long past the deadline."""
        task = self.tasks.get(task_id)
        if task is None or task["state"] != "running":
            return None
        alive = self.alive(task["lease_owner"])
        if alive and task["deadline_at"] >= self.now - overdue_us:
            return None
        attempt = task["attempt"]
        wait_s = 0 if attempt <= 1 else min(3_600, 2 ** min(attempt - 1, 12))
        why = "its node did not end it at its deadline" if alive else "its node died"
        error = {"attempt": attempt, "at": self._text(), "error": "NodeLost", "message": why}
        token = task["lease_token"]
        end = Settling(task_id, token, None, "adopt", wait_s * SECOND, json.dumps(error))
        return self.settle(end, 5)

    def set_aside(self, task_id: int, error: str) -> bool:
        """A pending row that fails every lease becomes a dead task."""
        task = self.tasks.get(task_id)
        if task is None or task["state"] != "pending":
            return False
        task["errors"] = [*task["errors"], json.loads(error)][-5:]
        del self.tasks[task_id]
        never_ran = {"node": None, "lease_token": 0, "lateness_us": None, "started_at": None}
        also = {name: task[name] for name in DEAD_ALSO}
        over = {"successor": None, "finished_at": self.now}
        self.dead[task_id] = _told(task) | also | never_ran | over
        return True

    # --- nodes --------------------------------------------------------------------------------

    def register(self, node: int, ttl_ms: int) -> None:
        """A node comes; sent again it finds its row."""
        row = {"state": "joining", "expires_at": self.now + ttl_ms * 1_000}
        self.nodes.setdefault(node, row)

    def activate(self, node: int) -> bool:
        """It holds its window now."""
        return self._become(node, "active", ("joining",))

    def ask_drain(self, node: int) -> bool:
        """From afar."""
        return self._become(node, "draining", ("joining", "active"))

    def drain(self, node: int) -> bool:
        """It stops firing."""
        return self._become(node, "draining", ("joining", "active", "draining"))

    def _become(self, node: int, state: str, before: Sequence[str]) -> bool:
        if node not in self.nodes or self.nodes[node]["state"] not in before:
            return False
        self.nodes[node]["state"] = state
        return True

    def leave(self, node: int, handed_over: bool) -> None:
        """It is gone; dead if something is left behind."""
        if self.alive(node) and handed_over:
            del self.nodes[node]
        elif self.alive(node):
            self.nodes[node]["state"] = "dead"

    def beat(self, node: int, ttl_ms: int) -> str | None:
        """Every lease of the node lives on; None: it was buried."""
        if not self.alive(node):
            return None
        self.nodes[node]["expires_at"] = self.now + ttl_ms * 1_000
        return str(self.nodes[node]["state"])

    def bury(self, node: int, expires_at: int) -> bool:
        """Declared dead, if its row is still as the judge saw it."""
        if not self.alive(node) or self.nodes[node]["expires_at"] != expires_at:
            return False
        self.nodes[node]["state"] = "dead"
        return True

    def forget(self, nodes: Iterable[int]) -> set[int]:
        """Rows of dead nodes go."""
        gone = {n for n in nodes if n in self.nodes and self.nodes[n]["state"] == "dead"}
        for node in gone:
            del self.nodes[node]
        return gone

    # --- retention ----------------------------------------------------------------------------

    def prune(self, days: int) -> None:
        """Idempotency rows: the end of their task is noted; some time later they go."""
        for name, row in list(self.idempotency.items()):
            found = self.find(row["task_id"])
            if found is not None and found.place != "task_history":
                continue
            if row["ended_at"] is not None and row["ended_at"] < self.now - days * DAY:
                del self.idempotency[name]
            elif row["ended_at"] is None and row["scheduled_at"] < self.now - HOUR:
                row["ended_at"] = self.now

    def _text(self) -> str:
        instant = EPOCH + timedelta(microseconds=self.now)
        return instant.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


# --- what must hold whatever happened -------------------------------------------------------------


def check_tables(tables: Mapping[str, Sequence[Row]]) -> None:
    """The invariants of the tables themselves, whoever wrote them; `tables` as rows by name."""
    tasks = tables["tasks"]
    waiting = [task["next"]["id"] for task in tasks if task["next"]]
    everywhere = [row["id"] for name in ("tasks", "history", "dead") for row in tables[name]]
    assert _all_differ([*everywhere, *waiting]), "a task is in two places"
    keys = [(task["kind"], task["key"]) for task in tasks if task["key"] is not None]
    assert _all_differ(keys), "a key has two live holders"
    for task in tasks:
        running = task["state"] == "running"
        assert running == (task["lease_owner"] != 0) == (task["lease_token"] != 0)
        assert running or not task["cancel_requested"], "a cancel that nobody will read"
        assert running or not task["next"], "a successor that nobody will start"
        assert running or task["deadline_at"] == FOR_EVER
        assert task["attempt"] >= (1 if running else 0)
    tokens = [task["lease_token"] for task in tasks if task["state"] == "running"]
    ended = [row for name in ("history", "dead") for row in tables[name] if row["lease_token"]]
    assert _all_differ([*tokens, *(row["lease_token"] for row in ended)]), "a token twice"


def check_promises(model: Model) -> None:
    """Nothing that was promised is lost, and every lease but the last of a task is over."""
    for task_id in model.promised:
        found = model.find(task_id)
        assert (found is None) == (task_id in model.discarded), f"task {task_id} is lost"
    assert _all_differ(model.leases), "a fencing token was issued twice"
    current = {(task["id"], task["lease_token"]) for task in model.running()}
    assert current <= set(model.leases)
    for row in (*model.history.values(), *model.dead.values()):
        assert row["lease_token"] == 0 or (row["id"], row["lease_token"]) in model.leases
        successor = row["successor"]
        assert successor is None or successor in model.promised, "a successor that never was"


def _all_differ(values: Sequence[object]) -> bool:
    return len(values) == len(set(values))


def _verdict(task: Row, outcome: str) -> str:
    """What becomes of a task whose attempt ended so, given what was asked of it meanwhile."""
    if outcome == "succeeded":
        return outcome  # it did what was asked, cancelled or not
    if task["cancel_requested"]:
        return "cancelled"
    if outcome in FINAL:
        return outcome
    if task["next"]:
        return "cancelled"  # its successor takes the place of the next attempt
    spent = task["attempt"] >= task["attempt_limit"]
    return "dead" if spent and outcome in ("retry", "adopt") else outcome


def _turn(requests: Sequence[TaskRequest]) -> Callable[[int], tuple[str, str, bool, str, int]]:
    """In which order many requests look for the holders of their keys."""

    def turn(nr: int) -> tuple[str, str, bool, str, int]:
        request, again = requests[nr], requests[nr].idempotency_key
        return request.kind, request.key or "", again is None, again or "", nr

    return turn


def _asked(request: TaskRequest) -> Row:
    texts = {"payload": json.loads(request.payload), "headers": json.loads(request.headers)}
    return {name: getattr(request, name) for name in ASKED} | texts


def _told(task: Row) -> Row:
    due_at = task["execute_at"] if task["due_at"] is None else task["due_at"]
    return {name: task[name] for name in TOLD} | {"due_at": due_at}


def _next_id(task: Row) -> int | None:
    return task["next"]["id"] if task["next"] else None
