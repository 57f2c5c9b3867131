"""The figures of `stats`: right when small, bounded when big, and never failed by an odd row."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from delayq.cli import collect as collecting
from delayq.cli.collect import Stats, collect
from delayq.cli.figures import Count, Percentiles
from delayq.cli.output import sound
from delayq.cli.stats_json import document
from delayq.cli.stats_text import show
from delayq.errors import SchemaMissing
from delayq.report_store import ReportStore
from tests.helpers import advance_clock, connected

if TYPE_CHECKING:
    from delayq.database import Connection

HISTORY = """
    insert into delayq.task_history (
        id, kind, state, headers, priority, due_at, execute_at, created_at, attempt,
        interruptions, errors, node, lease_token, started_at, finished_at, lateness_us)
    select i, $1, $2, '{}', 0, at, at, at, $3, 0, '[]', 7, 1, at, at + interval '2 ms', i * 1000
      from generate_series(1, $4::int) as i,
           lateral (select delayq.clock() - $5::interval as at) as f
"""
RUNNING = """
    insert into delayq.tasks (kind, execute_at, state, lease_owner, lease_token, attempt,
                              leased_at, deadline_at)
    select $1, delayq.clock() - $2::interval, 'running', $3, 1, 1,
           delayq.clock() - $2::interval, delayq.clock() + $4::interval
"""
NODE = """
    insert into delayq.nodes (id, name, host, pid, version, kinds, state, expires_at, counters)
    values ($1, 'n', 'h', 1, '1', $2, $3, delayq.clock() + $4::interval, $5)
"""


async def pending(conn: Connection, kind: str, seconds: float, count: int = 1) -> None:
    await conn.execute(
        "insert into delayq.tasks (kind, execute_at)"
        " select $1, delayq.clock() + $2::interval from generate_series(1, $3::int)",
        kind,
        timedelta(seconds=seconds),
        count,
    )


async def finished(
    conn: Connection,
    kind: str,
    count: int,
    state: str = "succeeded",
    ago_s: float = 60,
    attempt: int = 1,
) -> None:
    await conn.execute(HISTORY, kind, state, attempt, count, timedelta(seconds=ago_s))


async def node(
    conn: Connection, id: int, kinds: list[str], state: str = "active", ttl_s: float = 15,
    counters: str = "{}",
) -> None:  # fmt: skip
    await conn.execute(NODE, id, kinds, state, timedelta(seconds=ttl_s), counters)


@pytest.fixture
def store(conn: Connection) -> ReportStore:
    return ReportStore(conn)


def both_forms(stats: Stats, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    """The report as a program and as a person read it."""
    show(stats)
    text = json.dumps(sound(document(stats)), allow_nan=False)
    return json.loads(text), capsys.readouterr().out


async def test_an_empty_database_has_figures(
    store: ReportStore, capsys: pytest.CaptureFixture[str]
) -> None:
    told, shown = both_forms(await collect(store), capsys)
    assert told["pending"] == {"count": 0, "precision": "exact"}
    assert told["oldest_due_at"] is None
    assert told["longest_running"] is None
    assert told["unavailable"] == []
    assert "no tasks of any kind" in shown


async def test_live_tasks_are_counted_by_what_they_wait_for(
    conn: Connection, store: ReportStore
) -> None:
    await pending(conn, "a", -90, 3)
    await pending(conn, "a", 30, 2)
    await pending(conn, "b", 3_600, 4)
    await conn.execute(RUNNING, "b", timedelta(minutes=5), 7, timedelta(seconds=-1))
    stats = await collect(store)
    assert stats.live is not None
    assert stats.due is not None
    assert stats.soon is not None
    assert stats.live.pending == Count(9)
    assert stats.live.by_kind == {"a": Count(5), "b": Count(4)}
    assert stats.due.count_waiting() == Count(3)
    assert stats.soon.count_waiting() == Count(2)
    assert stats.due.count_running() == Count(1)
    assert stats.due.past_deadline == 1
    assert stats.due.longest is not None
    assert stats.due.longest[1:] == ("b", 7)


async def test_the_oldest_due_task_is_found(conn: Connection, store: ReportStore) -> None:
    for seconds in (-3, -4_000, -50):
        await pending(conn, "a", seconds)
    told = document(await collect(store))
    oldest = await conn.fetchval(
        """select to_char(min(execute_at) at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')
             from delayq.tasks"""
    )
    assert told["oldest_due_at"] == oldest


async def test_kinds_without_a_live_node_are_named(
    conn: Connection, store: ReportStore, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in ("served", "lonely", "orphaned"):
        await pending(conn, kind, 600)
    await node(conn, 1, ["served"])
    await node(conn, 2, ["orphaned"], state="dead")
    await node(conn, 3, ["orphaned"], ttl_s=-1)
    told, shown = both_forms(await collect(store), capsys)
    assert told["unserved_kinds"] == ["lonely", "orphaned"]
    assert "no live node serves kind lonely" in shown
    assert "active, silent" in shown


async def test_counters_of_the_nodes_are_summed(conn: Connection, store: ReportStore) -> None:
    await node(conn, 1, ["a"], counters='{"leases_lost": 2, "adopted": 1, "retried": 5}')
    await node(conn, 2, ["a"], state="draining", counters='{"leases_lost": 1, "missed": 4}')
    told = document(await collect(store))
    since_start = told["since_start"]
    assert isinstance(since_start, dict)
    assert {name: total for name, total in since_start.items() if total} == {
        "leases_lost": 3, "adopted": 1, "retried": 5, "missed": 4,
    }  # fmt: skip


async def test_lateness_and_run_time_of_the_last_hour(conn: Connection, store: ReportStore) -> None:
    await finished(conn, "a", 100, attempt=2)
    await finished(conn, "b", 10, state="missed")
    await finished(conn, "old", 5, ago_s=4_000)
    stats = await collect(store)
    assert stats.paces is not None
    assert stats.finished == {"succeeded": Count(100), "missed": Count(10)}
    assert stats.paces.by_kind["a"].lateness == Percentiles(50_000, 95_000, 99_000, 100_000)
    assert stats.paces.by_kind["a"].run == Percentiles(2_000, 2_000, 2_000, 2_000)
    assert stats.paces.by_kind["a"].retried == 100
    assert set(stats.paces.by_kind) == {"a", "b"}
    assert stats.paces.by_node[7].tasks == stats.paces.all.tasks == 110
    assert not stats.paces.cut


async def test_the_hour_may_reach_over_midnight(conn: Connection, store: ReportStore) -> None:
    to_midnight = await conn.fetchval(
        """select extract(epoch from date_trunc('day', delayq.clock() at time zone 'UTC')
                  + interval '1 day' - (delayq.clock() at time zone 'UTC'))::float8"""
    )
    await advance_clock(conn, to_midnight + 600)
    await finished(conn, "a", 3, ago_s=1_200)
    await finished(conn, "a", 4, ago_s=60)
    await finished(conn, "old", 5, ago_s=4_000)
    stats = await collect(store)
    assert stats.finished == {"succeeded": Count(7)}
    assert stats.paces is not None
    assert stats.paces.all.tasks == 7


async def test_what_lies_in_the_default_partition_counts(
    conn: Connection, store: ReportStore
) -> None:
    await advance_clock(conn, 30 * 86_400)
    await finished(conn, "a", 3)
    stats = await collect(store)
    assert stats.finished == {"succeeded": Count(3)}


async def test_only_the_newest_pages_of_a_long_history_are_read(
    conn: Connection, store: ReportStore, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(collecting, "_COUNT_PAGES", 4)
    monkeypatch.setattr(collecting, "_PACE_PAGES", 2)
    for ago_s in range(40, 0, -1):
        await finished(conn, "a", 20, ago_s=ago_s)
    told, shown = both_forms(await collect(store), capsys)
    counted = told["finished_last_hour"]["succeeded"]
    assert counted["precision"] == "at_least"
    assert told["recent"]["tasks"] < counted["count"] < 800
    assert told["recent"]["whole_hour"] is False
    assert "the newest" in shown


async def test_a_quiet_hour_behind_a_long_history_is_exact(
    conn: Connection, store: ReportStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "_COUNT_PAGES", 2)
    at = await conn.fetchval("select extract(hour from delayq.clock() at time zone 'UTC')::int")
    await advance_clock(conn, (12 - at) * 3_600)
    await finished(conn, "old", 800, ago_s=7_200)
    await finished(conn, "a", 3)
    stats = await collect(store)
    assert stats.finished is not None
    assert stats.finished["succeeded"] == Count(3)


async def test_counting_stops(conn: Connection, store: ReportStore) -> None:
    await conn.execute("set delayq.hints = off")
    await pending(conn, "a", -60, 12_000)
    await pending(conn, "b", 3_600, 12_000)
    await conn.execute("analyze delayq.tasks")
    stats = await collect(store)
    assert stats.live is not None
    assert stats.due is not None
    assert stats.due.count_waiting() == Count(10_000, "at_least")
    assert stats.live.pending.precision == "estimate"
    assert 16_000 < stats.live.pending.value < 36_000


async def test_dead_tasks_are_counted_by_kind(conn: Connection, store: ReportStore) -> None:
    await dead(conn, "a", 3)
    await dead(conn, "b", 1)
    assert (await collect(store)).dead == {"a": 3, "b": 1}


async def dead(conn: Connection, kind: str, count: int, at: str = "now()") -> None:
    await conn.execute(
        f"""insert into delayq.dead_tasks (
                id, kind, payload, headers, priority, due_at, execute_at, created_at, attempt,
                interruptions, errors, lease_token, finished_at)
            select (select coalesce(max(id), 0) from delayq.dead_tasks) + i, $1, '{{}}', '{{}}',
                   0, {at}, {at}, {at}, 1, 0, '[]', 1, {at}
              from generate_series(1, $2::int) as i""",
        kind,
        count,
    )


async def test_odd_rows_spoil_nothing(
    conn: Connection, store: ReportStore, capsys: pytest.CaptureFixture[str]
) -> None:
    await pending(conn, "\x1b[2Jevil\nkind", -10)
    await pending(conn, "a", -10)
    await conn.execute(
        """update delayq.tasks set payload = 'null', errors = '7', key = e'new\\nline'
            where kind = 'a'"""
    )
    await conn.execute(RUNNING, "a", timedelta(minutes=5), 9, timedelta(seconds=5))
    await conn.execute(
        """update delayq.tasks set leased_at = '-infinity', deadline_at = '-infinity'
            where state = 'running'"""
    )
    await dead(conn, "a", 2, "'infinity'::timestamptz")
    await dead(conn, "a", 2, "'12000-01-01'::timestamptz")
    await finished(conn, "a", 2)
    await conn.execute(
        """update delayq.task_history
              set started_at = '-infinity', lateness_us = -9223372036854775808"""
    )
    await finished(conn, "b", 2)
    await conn.execute("update delayq.task_history set finished_at = 'infinity' where kind = 'b'")
    await node(conn, 1, ["a"], counters='["odd"]')
    await conn.execute(
        """update delayq.nodes set started_at = '-infinity', expires_at = 'infinity',
                                   kinds = '{NULL,a}', name = e'\\u009b31m', version = ''"""
    )
    await node(conn, 2, ["a"])
    await conn.execute("update delayq.nodes set expires_at = '12000-01-01' where id = 2")
    told, shown = both_forms(await collect(store), capsys)
    assert told["unavailable"] == []
    assert told["overdue"]["count"] == 2
    assert told["dead"]["count"] == 4
    assert told["finished_last_hour"]["succeeded"]["count"] == 2
    assert "\x1b" not in shown
    assert "\x9b" not in shown


async def test_a_figure_that_takes_too_long_is_left_out_and_named(
    dsn: str, conn: Connection, store: ReportStore, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """C123."""
    monkeypatch.setattr(collecting, "_LIMIT_MS", 50)
    await pending(conn, "a", 10)
    async with connected(dsn) as stranger, stranger.transaction():
        await stranger.execute("lock table delayq.dead_tasks in access exclusive mode")
        told, shown = both_forms(await collect(store), capsys)
    assert told["dead"] is None
    assert told["pending"]["count"] == 1
    assert len(told["unavailable"]) == 1
    assert "! not known: dead tasks:" in shown


async def test_a_database_without_the_schema_is_an_error(empty_dsn: str) -> None:
    async with connected(empty_dsn) as conn:
        with pytest.raises(SchemaMissing):
            await collect(ReportStore(conn))


async def test_the_report_leaves_no_settings_behind(conn: Connection, store: ReportStore) -> None:
    await collect(store)
    assert await conn.fetchval("show enable_bitmapscan") == "on"
    assert await conn.fetchval("show statement_timeout") == "0"


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_a_million_pending_tasks_are_told_in_half_a_second(
    conn: Connection, store: ReportStore
) -> None:
    """C123."""
    await conn.execute("set delayq.hints = off")
    await conn.execute(
        """insert into delayq.tasks (kind, execute_at)
           select 'kind' || i % 7, delayq.clock() + (i - 50000) * interval '1 s'
             from generate_series(1, 1000000) as i""",
        timeout=180,
    )
    await finished(conn, "a", 200_000)
    took = []
    stats = await collect(store)
    for _ in range(3):
        started = time.monotonic()
        stats = await collect(store)
        took.append(time.monotonic() - started)
    assert stats.live is not None
    assert 800_000 < stats.live.pending.value < 1_200_000
    assert stats.unavailable == []
    assert min(took) < 0.5, took
