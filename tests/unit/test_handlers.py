"""What `@task` makes of a function, what its verbs send, and what is refused at registration."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from delayq.bridge import AnyConnection
from delayq.context import Context
from delayq.errors import ArgumentsRefused, InvalidArgument, RegistrationError, UnknownKind
from delayq.handler_policy import HandlerPolicy, PolicyDefaults
from delayq.handlers import (
    ContextHandler,
    PlainHandler,
    Registry,
    TaskDecorator,
    make_task_decorator,
)
from delayq.model import Cancel, OnConflict, Reschedule, ScheduledTask, TaskRequest, TaskState
from delayq.request import Target, When

if TYPE_CHECKING:
    import asyncpg

AT = datetime(2026, 5, 1, 9, tzinfo=UTC)
AT_US = 1_777_626_000_000_000
CONN: Any = object()
CTX: Any = Context(SimpleNamespace(id=1))
DEFAULTS = PolicyDefaults(max_attempts=7, backoff_base_us=2_000_000, backoff_max_us=60_000_000)


class Recorder:
    """A scheduler that remembers what it was asked."""

    def __init__(self) -> None:
        self.requests: list[TaskRequest] = []
        self.calls: list[tuple[Any, ...]] = []
        self.conns: list[AnyConnection | None] = []

    async def schedule(
        self, request: TaskRequest, conn: AnyConnection | None = None
    ) -> ScheduledTask:
        self.requests.append(request)
        self.conns.append(conn)
        return ScheduledTask(1, request.kind, True, TaskState.PENDING, None)

    async def cancel_target(self, target: Target, conn: AnyConnection | None = None) -> Cancel:
        self.calls.append((target, conn))
        return Cancel.CANCELLED

    async def move_target(
        self, target: Target, when: When, conn: AnyConnection | None = None
    ) -> Reschedule:
        self.calls.append((target, when, conn))
        return Reschedule.MOVED


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def scheduler() -> Recorder:
    return Recorder()


@pytest.fixture
def task(registry: Registry, scheduler: Recorder) -> TaskDecorator:
    return make_task_decorator(registry, scheduler, DEFAULTS)


# --- registration ---------------------------------------------------------------------------


def test_a_bare_decorator_names_the_kind_after_the_function(
    task: TaskDecorator, registry: Registry
) -> None:
    @task
    async def expire_order(ctx: Context, order_id: int) -> None:
        """Expires."""

    assert registry["expire_order"] is expire_order
    assert expire_order.__name__ == "expire_order"
    assert expire_order.__doc__ == "Expires."
    assert (expire_order.is_async, expire_order.wants_context) == (True, True)
    assert expire_order.policy == HandlerPolicy(7, 2_000_000, 60_000_000)


def test_every_option_of_the_decorator_reaches_the_policy(
    task: TaskDecorator, registry: Registry
) -> None:
    @task(
        kind="orders.expire",
        aliases=("expire", "old"),
        max_attempts=5,
        timeout=timedelta(seconds=20),
        misfire_grace=60,
        retry_on=OSError,
        give_up_on=(ValueError, KeyError),
        max_concurrency=4,
        backoff_base=0.5,
        backoff_max=timedelta(minutes=1),
        priority=9,
    )
    def expire(order_id: int) -> None: ...

    assert expire.policy == HandlerPolicy(
        max_attempts=5,
        backoff_base_us=500_000,
        backoff_max_us=60_000_000,
        timeout_ms=20_000,
        misfire_grace_ms=60_000,
        retry_on=(OSError,),
        give_up_on=(ValueError, KeyError),
        max_concurrency=4,
        priority=9,
    )
    assert registry.kinds == {"orders.expire", "expire", "old"}
    assert registry.get("old") is expire
    assert list(registry) == [expire]


def test_one_set_of_options_may_decorate_several_functions(
    task: TaskDecorator, registry: Registry
) -> None:
    patient = task(max_attempts=100)

    @patient
    def one() -> None: ...

    @patient
    def two() -> None: ...

    assert [handler.policy.max_attempts for handler in registry] == [100, 100]


def test_two_handlers_of_one_kind_are_refused_and_both_places_named(task: TaskDecorator) -> None:
    @task(kind="pay")
    def pay_first() -> None: ...

    with pytest.raises(RegistrationError) as caught:

        @task(kind="pay")
        def pay_second() -> None: ...

    assert "'pay'" in str(caught.value)
    assert "pay_first" in str(caught.value)
    assert "pay_second" in str(caught.value)
    assert "test_handlers.py:" in str(caught.value)


def test_an_alias_that_is_a_kind_already_is_refused_and_nothing_is_registered(
    task: TaskDecorator, registry: Registry
) -> None:
    @task(kind="pay")
    def pay() -> None: ...

    with pytest.raises(RegistrationError, match="'pay'"):
        task(kind="new", aliases=("pay",))(lambda: None)
    assert registry.kinds == {"pay"}


def test_an_unknown_kind_says_what_to_do(registry: Registry) -> None:
    assert registry.get("gone") is None
    assert "gone" not in registry
    with pytest.raises(UnknownKind, match=r"'gone'.*import"):
        registry["gone"]


def starred(*numbers: int) -> None: ...


def double_starred(**numbers: int) -> None: ...


def positional_only(number: int, /) -> None: ...


def generator() -> Iterator[int]:
    yield 1


async def async_generator() -> AsyncIterator[int]:
    yield 1


def late_context(number: int, ctx: Context) -> None: ...


def keyword_context(*, ctx: Context) -> None: ...


def method(self, number: int) -> None: ...  # type: ignore[no-untyped-def]  # refused on purpose


def unresolvable(number: Missing) -> None: ...  # type: ignore[name-defined] # noqa: F821 - refused on purpose


def unstorable(number: int, conn: Recorder) -> None: ...


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (starred, "'numbers' takes any number"),
        (double_starred, r"takes any number"),
        (positional_only, "'number' is positional-only"),
        (generator, "generator"),
        (async_generator, "generator"),
        (late_context, "Context must be the first"),
        (keyword_context, "Context must be the first"),
        (method, "not a method"),
        (unresolvable, "annotation of 'number' cannot be resolved"),
        (unstorable, "annotation of 'conn'"),
        (Recorder, "a handler is a function"),
        (lambda: None, "give it a kind="),
        (functools.partial(starred), "takes any number"),
        (functools.partial(late_context, 1), "Context must be the first|give it a kind="),
        (5, "a handler is a function"),
    ],
)
def test_a_function_that_cannot_be_called_from_stored_arguments_is_refused(
    task: TaskDecorator, function: Callable[..., object], said: str
) -> None:
    with pytest.raises(RegistrationError, match=said):
        task(function)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_attempts", 0),
        ("max_attempts", True),
        ("timeout", -1),
        ("timeout", float("nan")),
        ("misfire_grace", "5s"),
        ("backoff_base", 0),
        ("backoff_base", timedelta(hours=2)),
        ("backoff_max", float("inf")),
        ("retry_on", "ValueError"),
        ("retry_on", (ValueError, 5)),
        ("give_up_on", BaseException),
        ("max_concurrency", 0),
        ("max_concurrency", 1.5),
        ("priority", 101),
        ("kind", ""),
        ("kind", "a\0b"),
        ("aliases", ("",)),
        ("aliases", (5,)),
    ],
)
def test_a_wrong_option_names_itself(task: TaskDecorator, field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        task(**{field: value})(generatorless)
    assert caught.value.field == field


def generatorless() -> None: ...


def test_an_unknown_option_is_a_type_error(task: TaskDecorator) -> None:
    with pytest.raises(TypeError, match="max_atempts"):
        task(max_atempts=3)(generatorless)  # type: ignore[call-overload]  # refused on purpose


def test_a_context_without_an_annotation_is_known_by_its_name(task: TaskDecorator) -> None:
    @task
    def untyped(ctx, order_id):  # type: ignore[no-untyped-def]  # refused on purpose
        return order_id

    assert untyped.wants_context
    assert untyped.decode('{"order_id": [1]}') == {"order_id": [1]}


def test_annotations_of_no_concern_need_not_resolve(task: TaskDecorator) -> None:
    @task
    def handler(order_id: int) -> asyncpg.Record: ...  # type: ignore[empty-body]  # never called

    assert handler.decode('{"order_id": 1}') == {"order_id": 1}


def test_an_object_whose_call_is_async_is_an_async_handler(task: TaskDecorator) -> None:
    class Expire:
        async def __call__(self, order_id: int) -> None: ...

    made = task(kind="expire")(Expire())
    assert made.is_async
    assert made.decode('{"order_id": 1}') == {"order_id": 1}


def test_a_wrapped_function_keeps_its_own_signature(task: TaskDecorator) -> None:
    def logged(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return wrapper

    @task
    @logged
    def expire(ctx: Context, order_id: int) -> int:
        return order_id

    assert expire.wants_context
    assert expire.invoke(CTX, {"order_id": 5}) == 5


# --- calling --------------------------------------------------------------------------------


async def test_a_handler_stays_the_function_it_was(task: TaskDecorator) -> None:
    @task
    async def with_context(ctx: Context, order_id: int) -> tuple[int, int]:
        return ctx.id, order_id

    @task
    def without(order_id: int, note: str = "n") -> str:
        return f"{note}{order_id}"

    assert isinstance(with_context, ContextHandler)
    assert isinstance(without, PlainHandler)
    assert await with_context(CTX, 42) == (1, 42)
    assert without(order_id=42) == "n42"
    assert await with_context.invoke(CTX, {"order_id": 42}) == (1, 42)
    assert without.invoke(CTX, without.decode('{"order_id": 42}')) == "n42"


def test_a_default_is_taken_when_the_task_runs(task: TaskDecorator) -> None:
    @task
    def handler(order_id: int, note: str = "later") -> str:
        return note

    payload = handler.encode((1,), {})
    assert payload == '{"order_id":1}'
    assert handler.invoke(CTX, handler.decode(payload)) == "later"


def test_arguments_of_another_version_are_refused(task: TaskDecorator) -> None:
    @task
    def handler(order_id: int) -> None: ...

    with pytest.raises(ArgumentsRefused, match=r"order_id: missing; order: extra_forbidden"):
        handler.decode('{"order": 1}')


# --- verbs ----------------------------------------------------------------------------------


async def test_after_and_at_send_a_request(task: TaskDecorator, scheduler: Recorder) -> None:
    @task(priority=3)
    async def expire(ctx: Context, order_id: int, delay: int = 0) -> None: ...

    await expire.after(timedelta(minutes=5), 42)
    await expire.at(AT, order_id=42, delay=7)
    assert scheduler.requests == [
        TaskRequest("expire", '{"order_id":42}', delay_us=300_000_000, priority=3),
        TaskRequest("expire", '{"order_id":42,"delay":7}', execute_at_us=AT_US, priority=3),
    ]
    assert scheduler.conns == [None, None]


async def test_options_apply_to_one_task_and_may_be_used_again(
    task: TaskDecorator, scheduler: Recorder
) -> None:
    @task(priority=3)
    async def expire(order_id: int) -> None: ...

    bound = expire.options(key="order:42", on_conflict="replace", priority=-1, conn=CONN)
    expected = TaskRequest(
        "expire",
        '{"order_id":42}',
        delay_us=0,
        key="order:42",
        on_conflict=OnConflict.REPLACE,
        priority=-1,
    )
    await bound.after(0, 42)
    await bound.after(0, 42)
    assert scheduler.requests == [expected, expected]
    assert scheduler.conns == [CONN, CONN]
    assert bound.request_after(0, 42) == expected
    assert bound.request_at(AT, 42).execute_at_us == AT_US


@pytest.mark.parametrize("arguments", [{"order_id": "x"}, {}, {"order": 1}])
async def test_wrong_arguments_are_refused_before_anything_is_sent(
    task: TaskDecorator, scheduler: Recorder, arguments: dict[str, Any]
) -> None:
    @task
    async def expire(order_id: int) -> None: ...

    with pytest.raises(InvalidArgument):
        await expire.after(5, **arguments)
    assert not scheduler.requests


@pytest.mark.parametrize("delay", [-1, float("nan"), None, "5", True])
async def test_a_wrong_delay_is_refused_before_anything_is_sent(
    task: TaskDecorator, scheduler: Recorder, delay: Any
) -> None:
    @task
    async def expire() -> None: ...

    with pytest.raises(InvalidArgument, match=r"^delay: "):
        await expire.after(delay)
    with pytest.raises(InvalidArgument, match=r"^at: "):
        await expire.at(delay)
    assert not scheduler.requests


async def test_a_payload_over_the_limit_of_the_application_is_refused(registry: Registry) -> None:
    @make_task_decorator(registry, Recorder(), DEFAULTS, payload_limit=30)
    async def note(text: str) -> None: ...

    await note.after(0, "x" * 19)
    with pytest.raises(InvalidArgument, match="at most 30 bytes"):
        await note.after(0, "x" * 20)


async def test_tasks_are_cancelled_moved_and_run_by_key_or_id(
    task: TaskDecorator, scheduler: Recorder
) -> None:
    @task
    async def expire() -> None: ...

    assert await expire.cancel(key="k", conn=CONN) is Cancel.CANCELLED
    assert await expire.cancel(7) is Cancel.CANCELLED
    assert await expire.reschedule(key="k", delay=5) is Reschedule.MOVED
    assert await expire.reschedule(id=7, at=AT, conn=CONN) is Reschedule.MOVED
    assert await expire.run_now(7) is Reschedule.MOVED
    assert scheduler.calls == [
        (("expire", "k"), CONN),
        (7, None),
        (("expire", "k"), (5_000_000, None), None),
        (7, (None, AT_US), CONN),
        (7, (0, None), None),
    ]


async def test_verbs_without_a_target_or_a_time_are_refused(
    task: TaskDecorator, scheduler: Recorder
) -> None:
    @task
    async def expire() -> None: ...

    with pytest.raises(InvalidArgument, match=r"^id: "):
        await expire.cancel()
    with pytest.raises(InvalidArgument, match=r"^id: "):
        await expire.run_now(7, key="k")
    with pytest.raises(InvalidArgument, match=r"^delay: "):
        await expire.reschedule(7)
    assert not scheduler.calls
