"""The application's handlers: what `@task` makes of a function, and where they are found.

A `Handler` stays callable like its function, for unit tests. Its verbs validate and encode,
then hand a `TaskRequest` to the `Scheduler` that was given at registration; nothing here
speaks to a database.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import (
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    Unpack,
    overload,
)

from delayq.arguments import ArgumentCodec
from delayq.bridge import AnyConnection
from delayq.context import Context
from delayq.errors import RegistrationError, UnknownKind
from delayq.handler_policy import HandlerPolicy, PolicyDefaults, PolicyOptions, build_policy
from delayq.instants import Delay
from delayq.model import Cancel, Reschedule, ScheduledTask, TaskRequest
from delayq.payload import MAX_BYTES
from delayq.request import (
    MISSING,
    NOW,
    Maybe,
    RequestForm,
    RequestOptions,
    Target,
    When,
    check_name,
    check_target,
    parse_when,
)
from delayq.signature import place_of, read_signature

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Scheduler(Protocol):
    """Who carries out the verbs of a handler: the client. What it is given was checked already.

    `conn` is the caller's own connection.
    """

    async def schedule(
        self, request: TaskRequest, conn: AnyConnection | None = None
    ) -> ScheduledTask:
        """Writes the task, or finds the one that holds its key; the surviving task comes back."""
        ...

    async def cancel_target(self, target: Target, conn: AnyConnection | None = None) -> Cancel:
        """Cancels a task, or asks a running one to end."""
        ...

    async def move_target(
        self, target: Target, when: When, conn: AnyConnection | None = None
    ) -> Reschedule:
        """Moves a pending task."""
        ...


class CallOptions(RequestOptions, total=False):
    """What `options()` takes: how one task is scheduled, and on whose connection."""

    conn: AnyConnection | None


class TaskOptions(PolicyOptions, total=False):
    """What `@task(...)` takes."""

    kind: str
    aliases: tuple[str, ...]


class Handler(Generic[P, R_co]):
    """A function of the application under its kind, and the verbs to schedule it.

    `P` are the function's parameters without its `Context`. Calling the handler calls the
    function, with a context of your own making if it takes one.
    """

    __name__: str

    def __init__(
        self,
        function: Callable[..., R_co],
        scheduler: Scheduler,
        policy: HandlerPolicy,
        *,
        kind: str | None = None,
        aliases: tuple[str, ...] = (),
        payload_limit: int = MAX_BYTES,
    ) -> None:
        signature = read_signature(function)
        self.place = place_of(function)
        _dress(self, function)
        self.function = function
        self.kind = check_name(_kind_of(function, self.place) if kind is None else kind, "kind")
        self.aliases = _check_aliases(aliases)
        self.policy = policy
        self.wants_context = signature.wants_context
        self.is_async = signature.is_async
        self.scheduler = scheduler
        self._codec = ArgumentCodec(signature.parameters, self.place, payload_limit)
        # Bound once: these two are used for every task.
        self.decode = self._codec.decode
        """Keyword arguments from stored JSON; ArgumentsRefused if they do not fit."""
        self.encode = self._codec.encode
        """(args, kwargs) as JSON text; InvalidArgument names the parameter."""
        self._plain: BoundHandler[P] = BoundHandler(self)

    def __repr__(self) -> str:
        return f"<Handler {self.kind!r} {self.place}>"

    def invoke(self, context: Context, arguments: dict[str, Any]) -> R_co:
        """Calls the function as a node does; an async one returns its coroutine."""
        if self.wants_context:
            return self.function(context, **arguments)
        return self.function(**arguments)

    async def after(self, delay: Delay, /, *args: P.args, **kwargs: P.kwargs) -> ScheduledTask:
        """Schedules a task after a delay (timedelta, or seconds), counted by the database."""
        return await self._plain.after(delay, *args, **kwargs)

    async def at(self, instant: datetime, /, *args: P.args, **kwargs: P.kwargs) -> ScheduledTask:
        """Schedules a task at an aware datetime; one in the past is due now."""
        return await self._plain.at(instant, *args, **kwargs)

    def options(self, **options: Unpack[CallOptions]) -> BoundHandler[P]:
        """The same verbs with a key, a priority, a connection of the caller's, …"""
        return BoundHandler(self, **options)

    async def cancel(
        self,
        id: int | None = None,
        *,
        key: str | None = None,
        conn: AnyConnection | None = None,
    ) -> Cancel:
        """Cancels a task of this kind by key, or any task by id. The answer is final."""
        return await self.scheduler.cancel_target(check_target(id, self.kind, key), conn)

    async def reschedule(
        self,
        id: int | None = None,
        *,
        key: str | None = None,
        delay: Delay | Maybe = MISSING,
        at: datetime | Maybe = MISSING,
        conn: AnyConnection | None = None,
    ) -> Reschedule:
        """Moves a pending task to `delay` from now, or to the instant `at`."""
        target = check_target(id, self.kind, key)
        return await self.scheduler.move_target(target, parse_when(delay, at), conn)

    async def run_now(
        self,
        id: int | None = None,
        *,
        key: str | None = None,
        conn: AnyConnection | None = None,
    ) -> Reschedule:
        """Makes a pending task due at once."""
        return await self.scheduler.move_target(check_target(id, self.kind, key), NOW, conn)


class PlainHandler(Handler[P, R_co]):
    """A handler whose function takes no context."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Runs the function here and now."""
        return self.function(*args, **kwargs)


class ContextHandler(Handler[P, R_co]):
    """A handler whose function takes a `Context` first."""

    def __call__(self, ctx: Context, /, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Runs the function here and now, with a context of your own making."""
        return self.function(ctx, *args, **kwargs)


class BoundHandler(Generic[P]):
    """A handler together with the options of one call, or of many: they are checked once."""

    __slots__ = ("_conn", "_form", "_handler")

    def __init__(self, handler: Handler[P, object], **options: Unpack[CallOptions]) -> None:
        self._handler = handler
        self._conn = options.pop("conn", None)
        options.setdefault("priority", handler.policy.priority)
        others: RequestOptions = options
        self._form = RequestForm(handler.kind, **others)

    async def after(self, delay: Delay, /, *args: P.args, **kwargs: P.kwargs) -> ScheduledTask:
        """Schedules a task after a delay (timedelta, or seconds), counted by the database."""
        return await self._send(self.request_after(delay, *args, **kwargs))

    async def at(self, instant: datetime, /, *args: P.args, **kwargs: P.kwargs) -> ScheduledTask:
        """Schedules a task at an aware datetime; one in the past is due now."""
        return await self._send(self.request_at(instant, *args, **kwargs))

    def request_after(self, delay: Delay, /, *args: P.args, **kwargs: P.kwargs) -> TaskRequest:
        """What `after` would send, for `schedule_many` and other transports."""
        payload = self._handler.encode(args, kwargs)
        return self._form.fill(payload, parse_when(delay, MISSING))

    def request_at(self, instant: datetime, /, *args: P.args, **kwargs: P.kwargs) -> TaskRequest:
        """What `at` would send, for `schedule_many` and other transports."""
        payload = self._handler.encode(args, kwargs)
        return self._form.fill(payload, parse_when(MISSING, instant))

    async def _send(self, request: TaskRequest) -> ScheduledTask:
        return await self._handler.scheduler.schedule(request, self._conn)


AnyHandler: TypeAlias = Handler[..., object]


class Registry:
    """The handlers of one application by kind and alias."""

    def __init__(self) -> None:
        self._by_name: dict[str, AnyHandler] = {}

    def __iter__(self) -> Iterator[AnyHandler]:
        """Each handler once, in the order of registration."""
        return iter(dict.fromkeys(self._by_name.values()))

    def __contains__(self, kind: object) -> bool:
        return kind in self._by_name

    def __getitem__(self, kind: str) -> AnyHandler:
        """The handler of a kind or alias; UnknownKind if there is none."""
        handler = self._by_name.get(kind)
        if handler is None:
            raise UnknownKind(
                f"no handler of kind {kind!r} is registered here; import the module that defines it"
            )
        return handler

    @property
    def kinds(self) -> frozenset[str]:
        """Every kind that can be run here, aliases included: what a node serves."""
        return frozenset(self._by_name)

    def get(self, kind: str) -> AnyHandler | None:
        """The handler of a kind or alias, or None."""
        return self._by_name.get(kind)

    def add(self, handler: AnyHandler) -> None:
        """Registers a handler under its kind and aliases; RegistrationError if one is taken."""
        names = (handler.kind, *handler.aliases)
        for name in names:
            other = self._by_name.get(name)
            if other is not None:
                raise RegistrationError(
                    f"kind {name!r} is taken twice: by {other.place} and by {handler.place}; "
                    "give one of them another kind="
                )
        self._by_name.update(dict.fromkeys(names, handler))


class Decorate(Protocol):
    """What `@task(...)` returns: it makes a handler of a function."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[Context, P], R], /
    ) -> ContextHandler[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> PlainHandler[P, R]: ...


class TaskDecorator(Protocol):
    """`@task` and `@task(...)`."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[Context, P], R], /
    ) -> ContextHandler[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> PlainHandler[P, R]: ...
    @overload
    def __call__(self, /, **options: Unpack[TaskOptions]) -> Decorate: ...


def make_task_decorator(
    registry: Registry,
    scheduler: Scheduler,
    defaults: PolicyDefaults,
    payload_limit: int = MAX_BYTES,
) -> TaskDecorator:
    """The decorator `task` of one application, with and without options."""

    def register(function: Callable[..., Any], given: TaskOptions) -> AnyHandler:
        options = given.copy()  # one `task(...)` may decorate several functions
        kind, aliases = options.pop("kind", None), options.pop("aliases", ())
        handler = _handler_class(function)(
            function,
            scheduler,
            build_policy(options, defaults),
            kind=kind,
            aliases=aliases,
            payload_limit=payload_limit,
        )
        registry.add(handler)
        return handler

    def task(function: Callable[..., Any] | None = None, /, **options: Unpack[TaskOptions]) -> Any:
        if function is None:
            return lambda decorated: register(decorated, options)
        return register(function, options)

    return task


def _handler_class(function: Callable[..., Any]) -> type[AnyHandler]:
    return ContextHandler if read_signature(function).wants_context else PlainHandler


def _kind_of(function: Callable[..., object], place: str) -> str:
    name = str(getattr(function, "__name__", ""))
    if not name.isidentifier():
        raise RegistrationError(f"{place}: the function has no name of its own; give it a kind=")
    return name


def _check_aliases(aliases: object) -> tuple[str, ...]:
    found = aliases if isinstance(aliases, tuple | list) else (aliases,)
    return tuple(check_name(alias, "aliases") for alias in found)


def _dress(handler: AnyHandler, function: Callable[..., object]) -> None:
    """Gives the handler its function's name, docstring and signature."""
    target: Any = handler
    functools.update_wrapper(target, function, updated=())
