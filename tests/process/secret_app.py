"""An application whose handlers do with a secret what handlers do: `delayq run` serves it.

No secret stands in this file: they come with the tasks.
"""

from __future__ import annotations

import asyncio
import gc
import traceback
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, NoReturn

from pydantic import BaseModel

from delayq import Context, Dead, DelayQ, Retry, Snooze

dq = DelayQ()
LONG = timedelta(hours=1)


class Card(BaseModel):
    """What the payload is not."""

    number: int
    owners: dict[str, int] = {}


async def _fails(secret: str) -> NoReturn:
    raise ValueError(secret)


def _blows_up(secret: str) -> NoReturn:
    raise ValueError(f"refused {secret}")


def _raised(error: BaseException) -> NoReturn:
    raise error


def _chained(secret: str) -> NoReturn:
    try:
        _blows_up(secret)
    except ValueError as error:
        error.add_note(secret)
        raise RuntimeError("chained") from error


async def _forgets(_ctx: Context, secret: str) -> None:
    """A task of its own that fails and that nobody awaits; then a callback that fails."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(_fails(secret), name=secret)
    await asyncio.wait([task])
    del task
    gc.collect()
    loop.call_soon(_blows_up, secret)
    await asyncio.sleep(0.01)


async def _effect(ctx: Context, sql: str, *arguments: object) -> None:
    async with ctx.effect() as conn:
        await conn.execute(sql, *arguments)


async def _after_effect(ctx: Context, secret: str) -> None:
    async with ctx.effect() as conn:
        await conn.execute("select 1")
    _blows_up(secret)


async def _twice(ctx: Context, _secret: str) -> None:
    for _ in range(2):
        await _effect(ctx, "select 1")


async def _waits(_ctx: Context, secret: str) -> None:
    local = secret
    await asyncio.sleep(3600 + len(local))


def _at_once(call: Callable[[str], Any]) -> Callable[[Context, str], Awaitable[Any]]:
    async def run(_ctx: Context, secret: str) -> Any:
        return call(secret)

    return run


DOES: dict[str, Callable[[Context, str], Awaitable[Any]]] = {
    "returns": _at_once(str),
    "raises": _at_once(_blows_up),
    "validates": _at_once(lambda secret: Card.model_validate({"number": secret})),
    "validates keys": _at_once(
        lambda secret: Card.model_validate({"number": 1, "owners": {secret: secret}})
    ),
    "counts": _at_once(int),
    "chained": _at_once(_chained),
    "group": _at_once(lambda secret: _raised(ExceptionGroup(secret, [ValueError(secret)]))),
    "key": _at_once(lambda secret: _raised(KeyError(secret))),
    "traceback": _at_once(lambda secret: _raised(ValueError(_told(secret)))),
    "exits": _at_once(lambda secret: _raised(SystemExit(secret))),
    "dead": _at_once(lambda secret: _raised(Dead(f"because of {secret}"))),
    "dead returned": _at_once(Dead),
    "retries": _at_once(lambda _secret: _raised(Retry(0.01))),
    "snoozes": _at_once(lambda _secret: _raised(Snooze(LONG))),
    "wrong snooze": _at_once(lambda secret: _raised(Snooze(secret))),  # type: ignore[arg-type]  # on purpose
    "forgets": _forgets,
    "wrong type": lambda ctx, secret: _effect(ctx, "select $1::int", secret),
    "wrong text": lambda ctx, secret: _effect(ctx, "select $1::text::int", secret),
    "not unique": lambda ctx, secret: _effect(ctx, "insert into things values ($1), ($1)", secret),
    "shouts": lambda ctx, secret: _effect(ctx, "select shout($1)", secret),
    "after effect": _after_effect,
    "twice": _twice,
    "waits": _waits,
}


def _told(secret: str) -> str:
    try:
        _blows_up(secret)
    except ValueError:
        return traceback.format_exc()


@dq.task(max_attempts=2)
async def does(
    ctx: Context, what: str, secret: str, nested: dict[str, list[str]], number: int
) -> Any:
    """Does what it is told with the secret; some say the other arguments too."""
    if what == "says all":
        raise ValueError(f"{secret} {nested} {number} {nested!r}")
    return await DOES[what](ctx, secret)


@dq.task(max_attempts=2)
def plain(ctx: Context, what: str, secret: str) -> None:
    """The same in a thread."""
    if what == "exits":
        raise SystemExit(secret)
    if what == "sql":
        with ctx.effect() as conn:
            conn.execute("select $1::text::int", secret)
    raise ValueError(f"refused {secret}")
