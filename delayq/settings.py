"""What can be set: `DELAYQ_…` variables, `.env`, or keyword arguments, checked before use.

Every duration carries its unit in its name. `load_settings` is the way in: it turns a refusal
into one line that names the variable and the remedy, and never shows a value.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from delayq.errors import InvalidSettings
from delayq.loops import EventLoop

PREFIX = "DELAYQ_"

LogLevel = Literal["TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
LogFormat = Literal["auto", "human", "json"]

_Minutes = Annotated[float, Field(gt=0, le=3_600, allow_inf_nan=False)]
_Days = Annotated[int, Field(ge=1, le=3_650)]
_Connections = Annotated[int, Field(ge=1, le=1_000)]


class Settings(BaseSettings):
    """All settings of delayq, immutable. Use `load_settings` to make one."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_file=".env",
        env_ignore_empty=True,
        frozen=True,
        extra="ignore",
        # A refusal must not carry the refused value: it may be a password.
        hide_input_in_errors=True,
    )

    # --- where the database is ---------------------------------------------------------------
    dsn: Annotated[
        SecretStr | None, Field(description="PostgreSQL URL: postgresql://user:password@host/db")
    ] = None
    embedded: Annotated[
        bool | None,
        Field(description="start a PostgreSQL of our own if there is no DSN; unset: if installed"),
    ] = None
    embedded_dir: Annotated[Path, Field(description="folder of the embedded PostgreSQL")] = Path(
        ".delayq"
    )
    pg_bin: Annotated[
        Path | None, Field(description="folder of initdb and postgres for the embedded PostgreSQL")
    ] = None
    node_name: Annotated[
        str,
        Field(
            default_factory=socket.gethostname,
            min_length=1,
            max_length=255,
            description="what people call this node; unset: the host name",
        ),
    ]

    # --- workers and connections -------------------------------------------------------------
    min_workers: Annotated[int, Field(ge=0, le=10_000, description="workers kept waiting")] = 2
    max_workers: Annotated[int, Field(ge=1, le=10_000, description="tasks run at once")] = 100
    threads: Annotated[
        int, Field(ge=1, le=1_000, description="threads for handlers that are plain functions")
    ] = 20
    worker_idle_s: Annotated[
        _Minutes, Field(description="an idle worker above min_workers retires after this")
    ] = 10.0
    effect_connections: Annotated[
        _Connections, Field(description="most connections for ctx.effect()")
    ] = 10
    client_connections: Annotated[
        _Connections, Field(description="most connections for scheduling and reading")
    ] = 10

    # --- timers ------------------------------------------------------------------------------
    sweep_interval_s: Annotated[
        float, Field(gt=0, le=60, allow_inf_nan=False, description="how often timers are loaded")
    ] = 5.0
    horizon_s: Annotated[
        _Minutes, Field(description="how far ahead timers are held; at least three sweeps")
    ] = 15.0
    max_timers: Annotated[
        int, Field(ge=100, le=10_000_000, description="most timers held in memory")
    ] = 100_000
    understudy_delay_ms: Annotated[
        int, Field(ge=10, le=60_000, description="how long the second node waits for the first")
    ] = 500

    # --- being alive -------------------------------------------------------------------------
    beat_interval_s: Annotated[_Minutes, Field(description="how often a node says it is alive")] = (
        4.0
    )
    lease_ttl_s: Annotated[
        _Minutes, Field(description="a node that was silent this long is declared dead")
    ] = 15.0
    loop_stall_limit_s: Annotated[
        _Minutes, Field(description="a node whose event loop stands still this long exits")
    ] = 60.0
    drain_timeout_s: Annotated[
        float,
        Field(ge=0, le=86_400, allow_inf_nan=False, description="how long shutdown lets tasks run"),
    ] = 30.0

    # --- limits on the database --------------------------------------------------------------
    connect_timeout_s: Annotated[_Minutes, Field(description="longest wait to connect")] = 10.0
    statement_timeout_s: Annotated[_Minutes, Field(description="longest statement")] = 30.0
    lock_timeout_s: Annotated[_Minutes, Field(description="longest wait for a row lock")] = 5.0
    idle_in_transaction_timeout_s: Annotated[
        _Minutes, Field(description="a transaction idle this long is ended by the server")
    ] = 60.0

    # --- retries (a handler's own policy goes first) -------------------------------------------
    max_attempts: Annotated[int, Field(ge=1, le=10_000, description="attempts before dead")] = 5
    backoff_base_s: Annotated[
        float,
        Field(ge=0.01, le=86_400, allow_inf_nan=False, description="wait after the first failure"),
    ] = 1.0
    backoff_max_s: Annotated[
        float,
        Field(ge=0.01, le=31_536_000, allow_inf_nan=False, description="longest wait, by doubling"),
    ] = 3600.0

    # --- sizes and ages ----------------------------------------------------------------------
    payload_max_bytes: Annotated[
        int, Field(ge=2, le=64 * 1_048_576, description="largest payload accepted")
    ] = 1_048_576
    error_max_bytes: Annotated[
        int, Field(ge=64, le=65_536, description="an error text is cut to this")
    ] = 4096
    errors_kept: Annotated[int, Field(ge=1, le=100, description="last errors kept per task")] = 5
    history_days: Annotated[_Days, Field(description="finished tasks are kept this long")] = 7
    idempotency_days: Annotated[
        _Days, Field(description="idempotency keys are kept this long after the end")
    ] = 30

    # --- the process -------------------------------------------------------------------------
    event_loop: Annotated[
        EventLoop, Field(description="of `delayq run`; auto: uvloop if it is installed")
    ] = "auto"

    # --- logs --------------------------------------------------------------------------------
    log_level: Annotated[LogLevel, Field(description="lowest level that the CLI writes")] = "INFO"
    log_format: Annotated[LogFormat, Field(description="auto: human on a terminal, else json")] = (
        "auto"
    )

    @property
    def horizon_effective_s(self) -> float:
        """How far ahead timers are held: the horizon or three sweeps, whichever is longer."""
        return max(self.horizon_s, 3 * self.sweep_interval_s)

    @field_validator("log_level", mode="before")
    @classmethod
    def _upper(cls, value: object) -> object:
        return value.upper() if isinstance(value, str) else value

    @field_validator("log_format", "event_loop", mode="before")
    @classmethod
    def _lower(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value

    @field_validator("node_name")
    @classmethod
    def _printable(cls, value: str) -> str:
        if not value.isprintable():
            raise ValueError("must be printable characters")
        return value

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        for holds, message in self._cross_checks():
            if not holds:
                raise ValueError(message)
        return self

    def _cross_checks(self) -> list[tuple[bool, str]]:
        return [
            (
                3 * self.beat_interval_s <= self.lease_ttl_s,
                "DELAYQ_LEASE_TTL_S must be at least three times DELAYQ_BEAT_INTERVAL_S",
            ),
            (
                self.understudy_delay_ms <= 1000 * self.sweep_interval_s,
                "DELAYQ_UNDERSTUDY_DELAY_MS must not be longer than DELAYQ_SWEEP_INTERVAL_S",
            ),
            (
                self.min_workers <= self.max_workers,
                "DELAYQ_MIN_WORKERS must not be above DELAYQ_MAX_WORKERS",
            ),
            (
                self.backoff_base_s <= self.backoff_max_s,
                "DELAYQ_BACKOFF_BASE_S must not be above DELAYQ_BACKOFF_MAX_S",
            ),
            (
                self.lock_timeout_s <= self.statement_timeout_s,
                "DELAYQ_LOCK_TIMEOUT_S must not be above DELAYQ_STATEMENT_TIMEOUT_S",
            ),
        ]


def load_settings(**overrides: object) -> Settings:
    """Read the settings; keyword arguments win over the environment, that over `.env`.

    None as an override means "not given". Raises `InvalidSettings` with one line that names the
    variable and what it must be, never with a value.
    """
    given = {name: value for name, value in overrides.items() if value is not None}
    unknown = sorted(given.keys() - Settings.model_fields.keys())
    if unknown:
        raise InvalidSettings(f"{unknown[0]}: there is no such setting")
    try:
        return Settings(**given)  # type: ignore[arg-type]  # pydantic checks what mypy cannot
    except ValidationError as error:
        refusal = _one_line(error)
    except UnicodeDecodeError:
        refusal = ".env is not UTF-8 text; save it as UTF-8"
    except OSError as error:
        refusal = f".env cannot be read: {error.strerror}"
    # Outside the handler, so that the refused value does not travel along as __context__.
    raise InvalidSettings(refusal)


def _one_line(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return message
    return f"{PREFIX}{str(first['loc'][0]).upper()}: {message}"
