"""Reads a PostgreSQL URL the way libpq does, and never says what the password was.

The driver's own reader quotes what it cannot understand, takes `+` for a blank, cuts a password
at its first `@`, and turns what it does not know into server settings that then fail far away.
So the URL is read here, once, and the driver is given the parts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlencode

from delayq import tls
from delayq.errors import InvalidArgument

_WRITABLE: Final = ("any", "primary", "read-write")

# Handed to the driver, which understands them.
_DRIVER: Final = frozenset(
    "gsslib krbsrvname passfile service sslcert sslcrl sslkey sslmode sslnegotiation sslpassword "
    "sslrootcert ssl_max_protocol_version ssl_min_protocol_version".split()
)
# Understood here.
_OURS: Final = frozenset(
    "connect_timeout database dbname host hostaddr options password port target_session_attrs "
    "user".split()
)
# libpq's own business, without a counterpart in the driver and without harm when left out.
# application_name is among them since delayq sets it: peers end a dead node's sessions by it.
_DROPPED: Final = frozenset(
    "application_name channel_binding client_encoding fallback_application_name gssdelegation "
    "gssencmode keepalives keepalives_count keepalives_idle keepalives_interval "
    "load_balance_hosts max_protocol_version min_protocol_version sslcertmode sslcompression "
    "sslsni tcp_user_timeout".split()
)
# They ask for a protection that the driver cannot give; leaving them out would be a lie.
_IMPOSSIBLE: Final = frozenset("require_auth requirepeer requiressl sslcrldir".split())

_BAD_PERCENT: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")
_OPTION: Final = re.compile(r"\s*(?:-c\s*|--)([A-Za-z_][\w.-]*)=((?:\\.|\S)*)\s*")
_ENCODE: Final = "percent-encode special characters of user and password (@ is %40, / is %2F)"


@dataclass(frozen=True, slots=True, repr=False)
class Dsn:
    """A PostgreSQL URL in parts. Its text forms never show the password.

    `hosts` is empty if the URL names none (the driver then looks at `PGHOST` and the usual
    sockets). `server_settings` are those of `options=-c name=value`. `dropped` names the
    parameters that were left out because only libpq knows them.
    """

    hosts: tuple[tuple[str, int | None], ...] = ()
    database: str | None = None
    user: str | None = None
    password: str | None = None
    connect_timeout_s: float | None = None
    target_session_attrs: str | None = None
    server_settings: dict[str, str] = field(default_factory=dict)
    driver_parameters: dict[str, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()

    def describe(self) -> str:
        """Host, port, database and user, for messages: `db.example:5432/shop as app`."""
        hosts = ",".join(_host_and_port(host, port) for host, port in self.hosts)
        user = f" as {self.user}" if self.user else ""
        return f"{hosts or 'the default host'}/{self.database or ''}{user}"

    def __repr__(self) -> str:
        return f"Dsn({self.describe()})"

    __str__ = __repr__

    def connect_arguments(self) -> dict[str, Any]:
        """The keyword arguments for `asyncpg.connect`, all but timeouts and server settings."""
        arguments: dict[str, Any] = {
            "user": self.user,
            "password": self.password,
            "database": self.database,
            "target_session_attrs": self.target_session_attrs,
            **self._tls_arguments(),
        }
        if self.hosts:
            arguments["host"] = [host for host, _ in self.hosts]
            arguments["port"] = [port or 5432 for _, port in self.hosts]
        return {name: value for name, value in arguments.items() if value is not None}

    def check_files(self) -> None:
        """Raise `InvalidArgument` if a file that the URL names is not there or cannot be used.

        So it is with TLS files that the environment or `~/.postgresql` adds. Later the same
        mistake would look like an outage that may pass.
        """
        passfile = self.driver_parameters.get("passfile")
        if passfile and not Path(passfile).is_file():
            raise _bad(f"passfile: there is no file {passfile}")
        tls.check_files(self.driver_parameters, over_tcp=self._is_over_tcp())

    def shows_certificate(self) -> bool:
        """True if the client has a certificate to show, by whatever names it."""
        return tls.shows_certificate(self.driver_parameters)

    def _is_over_tcp(self) -> bool:
        hosts = [host for host, _ in self.hosts] or os.environ.get("PGHOST", "").split(",")
        return any(not host.startswith("/") for host in hosts)

    def _tls_arguments(self) -> dict[str, Any]:
        if tls.trusts_system(self.driver_parameters):
            # To the driver, True means verify-full against the system's roots.
            rest = {n: value for n, value in self.driver_parameters.items() if n not in tls.TRUST}
            return {"ssl": True, "dsn": _driver_url(rest)}
        # asyncpg takes certificates only from a URL; this one holds nothing but them.
        return {"dsn": _driver_url(self.driver_parameters)}


def _driver_url(parameters: dict[str, str]) -> str | None:
    return f"postgresql://?{urlencode(parameters)}" if parameters else None


def parse_dsn(text: str) -> Dsn:
    """Read `postgresql://user:password@host:port/database?parameters`.

    Several hosts, IPv6 in brackets and socket folders (`?host=/path` or percent-encoded) are
    understood. Raises `InvalidArgument` with the remedy; what was wrong is described, not quoted.
    """
    authority, path, query = _split(text)
    parameters = dict(_query(query))
    userinfo, _, hostspec = authority.rpartition("@")
    user, _, password = userinfo.partition(":")
    return Dsn(
        hosts=_hosts(hostspec, parameters),
        database=_first(parameters, "dbname", "database") or _decode(path, "database") or None,
        user=parameters.get("user") or _decode(user, "user") or None,
        password=parameters.get("password") or _decode(password, "password") or None,
        connect_timeout_s=_connect_timeout(parameters.get("connect_timeout")),
        target_session_attrs=_session_attrs(parameters, hostspec),
        server_settings=dict(_options(parameters.get("options", ""))),
        driver_parameters=_tls(
            {name: value for name, value in parameters.items() if name in _DRIVER}
        ),
        dropped=tuple(sorted(parameters.keys() & _DROPPED)),
    )


def _bad(message: str) -> InvalidArgument:
    return InvalidArgument("dsn", message)


def _split(text: object) -> tuple[str, str, str]:
    if not isinstance(text, str) or not text.strip():
        raise _bad("is empty; give postgresql://user:password@host:port/database")
    scheme, separator, rest = text.strip().partition("://")
    if scheme.partition("+")[0] in ("postgresql", "postgres") and "+" in scheme:
        raise _bad("write postgresql:// without a driver name")
    if not separator or scheme not in ("postgresql", "postgres"):
        raise _bad("must be a URL that starts with postgresql://")
    rest, _, query = rest.partition("?")
    authority, _, path = rest.partition("/")
    if "@" in path or "@" in query.partition("=")[0]:
        raise _bad(f"an @ stands after the host: {_ENCODE}")
    return authority, path, query


def _decode(text: str, what: str) -> str:
    if _BAD_PERCENT.search(text):
        raise _bad(f"{what}: a % must be followed by two hex digits; a lone % is written %25")
    try:
        decoded = unquote(text, errors="strict")
    except UnicodeDecodeError:
        decoded = "\0"
    if "\0" in decoded:
        raise _bad(f"{what}: is not UTF-8 text without NUL") from None
    return decoded


# --- hosts ----------------------------------------------------------------------------------


def _hosts(hostspec: str, parameters: dict[str, str]) -> tuple[tuple[str, int | None], ...]:
    if override := _first(parameters, "host", "hostaddr"):
        hosts: list[tuple[str, int | None]] = [(host, None) for host in override.split(",")]
    elif hostspec:
        hosts = [_host(part) for part in hostspec.split(",")]
    else:
        hosts = []
    if ports := parameters.get("port"):
        hosts = _with_ports(hosts or [("localhost", None)], ports.split(","))
    # An empty host would be resolved to who knows what.
    return tuple((host or "localhost", port) for host, port in hosts)


def _host(part: str) -> tuple[str, int | None]:
    if part.startswith("["):
        host, bracket, rest = part[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise _bad(f"the host is no IPv6 address in brackets; {_ENCODE}")
        return host, _port(rest[1:])
    host, _, port = part.partition(":")
    return _decode(host, "host"), _port(port)


def _port(text: str) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= 65_535):
        raise _bad(f"the port must be a number from 1 to 65535; {_ENCODE}")
    return int(text)


def _with_ports(
    hosts: list[tuple[str, int | None]], ports: list[str]
) -> list[tuple[str, int | None]]:
    if len(ports) == 1:
        ports *= len(hosts)
    if len(ports) != len(hosts):
        raise _bad("port: give one for all hosts, or one for each")
    return [(host, _port(port)) for (host, _), port in zip(hosts, ports, strict=True)]


def _host_and_port(host: str, port: int | None) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"{shown}:{port or 5432}"


# --- parameters -----------------------------------------------------------------------------


def _query(query: str) -> Iterator[tuple[str, str]]:
    for position, part in enumerate(filter(None, query.split("&")), start=1):
        name, equals, value = part.partition("=")
        if not equals:
            raise _bad(f"parameter {position} after the ? is not name=value; {_ENCODE}")
        _check_name(name, position)
        yield name, _decode(value, name)


def _check_name(name: str, position: int) -> None:
    if name in _IMPOSSIBLE:
        raise _bad(f"{name}: cannot be honoured by this driver; use sslmode=verify-full instead")
    known = _DRIVER | _OURS | _DROPPED
    if name not in known:
        # Not quoted: after an unescaped ? it may be a piece of the password.
        close = get_close_matches(name, known, n=1, cutoff=0.8)
        meant = f" (did you mean {close[0]}?)" if close else ""
        raise _bad(
            f"parameter {position} after the ? is unknown{meant}; "
            "server settings are given as options=-c%20name=value"
        )


def _first(parameters: dict[str, str], *names: str) -> str | None:
    return next((parameters[name] for name in names if parameters.get(name)), None)


def _connect_timeout(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = int(text)
    except ValueError:
        raise _bad("connect_timeout: must be a whole number of seconds") from None
    # libpq's "wait for ever" is not on offer: every wait here has a limit.
    return float(min(max(seconds, 1), 3_600)) if seconds > 0 else None


def _session_attrs(parameters: dict[str, str], hostspec: str) -> str | None:
    attrs = parameters.get("target_session_attrs")
    if attrs is None:
        several = "," in (parameters.get("host") or hostspec)
        return "read-write" if several else None
    if attrs not in _WRITABLE:
        raise _bad(f"target_session_attrs: delayq writes, so one of {', '.join(_WRITABLE)}")
    return attrs


def _options(text: str) -> Iterator[tuple[str, str]]:
    position = 0
    while position < len(text.rstrip()):
        match = _OPTION.match(text, position)
        if match is None:
            raise _bad("options: must be -c name=value, once or more; blanks are written %20")
        yield match[1].replace("-", "_"), re.sub(r"\\(.)", r"\1", match[2])
        position = match.end()


def _tls(parameters: dict[str, str]) -> dict[str, str]:
    mode = parameters.get("sslmode")
    if mode is not None and mode not in tls.MODES:
        raise _bad(f"sslmode: must be one of {', '.join(tls.MODES)}")
    tls.trusts_system(parameters, environment={})
    return parameters
