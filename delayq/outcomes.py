"""Judges how an attempt ended, once its handler is over: what is to be settled, and what is logged.

Whoever interrupted the handler, the errors it may raise to choose its end, the handler's policy
and an effect that was committed meanwhile all have a say; here is the order in which they are
heard.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from delayq.attempt_errors import describe
from delayq.errors import (
    ArgumentsRefused,
    Dead,
    DelayQError,
    EffectAlreadyApplied,
    HandlerOutcome,
    LeaseLost,
    Retry,
    Snooze,
)
from delayq.failures import blames_the_row, stems_from_conflict
from delayq.instants import delay_to_us
from delayq.lease import Interruption, Lease, Outcome, Settlement
from delayq.log import log
from delayq.policy import backoff_us

if TYPE_CHECKING:
    from delayq.commons import Commons
    from delayq.settler import Settler

_CONFLICT_US: Final = (50_000, 250_000)
_UNREAD_US: Final = (2_000_000, 4_000_000)
"""When an attempt that was given back for a conflict, or for want of its payload, fires again."""
_SLOW: Final = (None, Interruption.TIMEOUT)


class Outcomes:
    """Hands every attempt that is over to the settler, or to `on_over` if nothing is to be written.

    Nothing here waits.
    """

    def __init__(
        self, commons: Commons, settler: Settler, on_over: Callable[[Lease], None]
    ) -> None:
        self._node = commons.node
        self._clock = commons.database_clock
        self._counters = commons.counters
        self._error_max_bytes = commons.settings.error_max_bytes
        self._settler = settler
        self._on_over = on_over

    def ended(self, lease: Lease, result: object, failure: BaseException | None) -> None:
        """The handler returned `result`, or raised `failure`."""
        if failure is not None:
            self._failed(lease, failure)
        elif isinstance(result, HandlerOutcome):
            self._failed(lease, result)
        elif lease.effect_committed:
            self._committed(lease)
        elif lease.interruption is Interruption.LOST:
            self._lost(lease)
        else:
            self._settler.succeeded(lease)

    def _failed(self, lease: Lease, failure: BaseException) -> None:
        fields = log.bind(task_id=lease.id, kind=lease.kind, attempt=lease.attempt, node=self._node)
        if lease.effect_committed:
            fields.bind(error=type(failure).__name__).warning("task.failed_after_its_effect")
            self._committed(lease)
        elif isinstance(failure, EffectAlreadyApplied):
            fields.info("task.effect_already_applied")
            self._settler.succeeded(lease)
        elif isinstance(failure, LeaseLost) or lease.interruption is Interruption.LOST:
            self._lost(lease)
        elif (given_back := _given_back(lease, failure)) is not None:
            fields.bind(
                error=type(failure).__name__,
                why=None if lease.interruption is None else lease.interruption.value,
            ).info("task.interrupted")
            self._settler.settle(given_back)
        else:
            settlement = self._outcome(lease, failure)
            fields.bind(
                outcome=settlement.outcome.value,
                error=type(failure).__name__,
                retry_in_s=None if settlement.delay_us is None else settlement.delay_us / 1e6,
            ).info("task.attempt_failed")
            self._settler.settle(settlement)

    def _committed(self, lease: Lease) -> None:
        """The effect's transaction settled the task: nothing is left to write."""
        self._counters.succeeded += 1
        self._on_over(lease)

    def _lost(self, lease: Lease) -> None:
        self._counters.leases_lost += 1
        log.bind(task_id=lease.id, kind=lease.kind, attempt=lease.attempt, node=self._node).warning(
            "lease.lost"
        )
        self._on_over(lease)

    def _outcome(self, lease: Lease, failure: BaseException) -> Settlement:
        policy = lease.handler.policy
        wait_us = backoff_us(
            lease.attempt, policy.backoff_base_us, policy.backoff_max_us, random.random()
        )
        error = self._describe(lease, failure)
        match failure:
            case Snooze():
                return _after(lease, Outcome.SNOOZE, failure.after, None, error)
            case Retry():
                return _after(lease, Outcome.RETRY, failure.after, wait_us, error)
            case Dead():
                return Settlement(lease, Outcome.DEAD, error=error)
            case _ if isinstance(failure, ArgumentsRefused) or lease.payload is None:
                # a newer node may understand them; no class of errors is meant by what the
                # handler never saw
                return Settlement(lease, Outcome.RETRY, wait_us, error)
            case Exception() if lease.interruption is not Interruption.TIMEOUT and (
                isinstance(failure, policy.give_up_on) or not isinstance(failure, policy.retry_on)
            ):
                return Settlement(lease, Outcome.DEAD, error=error)
            case _:
                return Settlement(lease, Outcome.RETRY, wait_us, error)

    def _describe(self, lease: Lease, failure: BaseException) -> str | None:
        if isinstance(failure, Snooze):
            return None
        error = failure
        if lease.interruption is Interruption.TIMEOUT or (
            lease.interruption is not None and isinstance(error, asyncio.CancelledError)
        ):
            error = _interrupted(lease)
        return describe(
            error,
            attempt=lease.attempt,
            at_us=self._clock.now_us(),
            payload=lease.payload,
            limit_bytes=self._error_max_bytes,
        )


def _given_back(lease: Lease, failure: BaseException) -> Settlement | None:
    """The settlement that gives the attempt back; None if the attempt failed by itself."""
    if lease.payload is None and not blames_the_row(failure):
        lease.lateness_us = None  # the handler was never called
        delay_us = random.randint(*_UNREAD_US) if lease.interruption in _SLOW else None
        return Settlement(lease, Outcome.UNSTARTED, delay_us)
    if lease.interruption in (Interruption.SHUTDOWN, Interruption.FENCED):
        return Settlement(lease, Outcome.RELEASE)
    chosen = isinstance(failure, HandlerOutcome)
    if lease.effect_conflicted and not chosen and stems_from_conflict(failure):
        return Settlement(lease, Outcome.RELEASE, random.randint(*_CONFLICT_US))
    return None


def _after(
    lease: Lease, outcome: Outcome, after: Any, default_us: int | None, error: str | None
) -> Settlement:
    """A settlement that goes back after what the handler asked for; nonsense fails the attempt."""
    if after is None and default_us is not None:
        return Settlement(lease, outcome, default_us, error)
    try:
        return Settlement(lease, outcome, delay_to_us(after, "after"), error)
    except DelayQError as refused:
        reason = json.dumps(
            {"attempt": lease.attempt, "error": outcome.value, "message": str(refused)}
        )
        return Settlement(lease, Outcome.RETRY, default_us or 1_000_000, reason)


def _interrupted(lease: Lease) -> BaseException:
    if lease.interruption is Interruption.TIMEOUT:
        return TimeoutError(f"the attempt took longer than its timeout of {lease.timeout_ms} ms")
    return asyncio.CancelledError("cancelled on request")
