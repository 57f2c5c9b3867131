"""TLS to the server: the files that the driver will read, and what a failed handshake means.

The driver takes from the environment (`PGSSLMODE`, `PGSSLROOTCERT` …) and from `~/.postgresql`
what the URL leaves out, as libpq does. Of a file that it cannot use it says neither which one nor
why, and to the caller that looks like an outage that may pass. So the files are looked at here.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from delayq.errors import AuthenticationFailed, DatabaseError, DatabaseUnavailable, InvalidArgument

SYSTEM: Final = "system"
"""As `sslrootcert`: the roots that the operating system trusts."""

MODES: Final = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")

TRUST: Final = ("sslmode", "sslrootcert")
"""Whom to trust, in the URL."""

_NOT_WITH_SYSTEM: Final = (
    "sslcert", "sslcrl", "ssl_min_protocol_version", "ssl_max_protocol_version",
)  # fmt: skip
_UNVERIFIED: Final = ("allow", "prefer")
_DEMANDING: Final = ("verify-ca", "verify-full")
_OUR_OWN: Final = ("sslcert", "sslkey")
_DEFAULTS: Final = {
    "sslrootcert": "root.crt",
    "sslcrl": "root.crl",
    "sslcert": "postgresql.crt",
    "sslkey": "postgresql.key",
}

_NO_TLS: Final = "rejected SSL upgrade"
_HOST_DIFFERS: Final = (62, 64)  # X509_V_ERR_HOSTNAME_MISMATCH, …_IP_ADDRESS_MISMATCH
_REMEDIES: Final = {
    3: "sslcrl must hold the revocation list of its CA",
    10: "give the server a new one",
    23: "give the server a new one",
}
_ANOTHER_CA: Final = "sslrootcert must name the certificate of the CA that signed it"

CUT_OFF: Final = (
    "the server closes the connection at once; it may not accept the client's certificate, "
    "see sslcert"
)


class _Given(NamedTuple):
    told: str
    """the parameter, or the variable that stands in for it"""
    value: str


class _File(NamedTuple):
    told: str
    path: Path


def check_files(parameters: Mapping[str, str], *, over_tcp: bool) -> None:
    """Raise `InvalidArgument` that names the parameter whose file cannot be used, and why.

    Those that the URL names must always be good; those of the environment and of `~/.postgresql`
    only if the driver reads them in this mode. `over_tcp`: sockets need no TLS.
    """
    given = _given(parameters, os.environ)
    mode = _mode(given, over_tcp=over_tcp)
    read = _read_by_driver(mode) | parameters.keys()
    found = {name: file for name in _DEFAULTS if name in read and (file := _find(name, given))}
    for file in found.values():
        _check_readable(file)
    if not trusts_system(parameters) and mode in _DEMANDING and "service" not in parameters:
        _check_roots(mode, found)
    for name, what in (("sslrootcert", "certificate"), ("sslcrl", "revocation list")):
        if name in found:
            _check_trust(found[name], what)
    if "sslcert" in found:
        _check_pair(found["sslcert"], found.get("sslkey"), parameters.get("sslpassword", ""))


def trusts_system(
    parameters: Mapping[str, str], environment: Mapping[str, str] = os.environ
) -> bool:
    """True if the server is verified by the operating system's roots.

    The driver takes the word `system` for the name of a file. As in libpq it means that
    everything is verified; `InvalidArgument` if the mode is a weaker one, or if there is a
    client's certificate (which the driver cannot send then).
    """
    given = _given(parameters, environment)
    roots = given.get("sslrootcert")
    if roots is None or roots.value != SYSTEM:
        return False
    if _mode(given, over_tcp=False) not in ("", "verify-full"):
        raise _bad(f"{roots.told}=system: goes with sslmode=verify-full")
    for name in _NOT_WITH_SYSTEM:
        if name in given:
            raise _bad(f"{roots.told}=system: goes without {given[name].told}")
    return True


def shows_certificate(parameters: Mapping[str, str]) -> bool:
    """True if the driver finds a certificate of the client."""
    return _find("sslcert", _given(parameters, os.environ)) is not None


def explain(error: BaseException) -> tuple[type[DatabaseError], str] | None:
    """What a connection that failed for its TLS means and what to do; None if it is not that."""
    # a server that does not like the client's certificate says so after the driver's handshake
    for one in (error, error.__cause__):
        if isinstance(one, ssl.SSLCertVerificationError):
            return AuthenticationFailed, _distrust(one)
        if isinstance(one, ssl.SSLError):
            return _failure(str(getattr(one, "reason", None) or "no reason given"))
    if isinstance(error, ConnectionError) and _NO_TLS in str(error):
        return AuthenticationFailed, (
            "the server offers no TLS, and sslmode asks for it: switch `ssl` on there"
        )
    return None


# --- what the driver will read ----------------------------------------------------------------


def _given(parameters: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, _Given]:
    """What the URL says, and the environment where that is silent."""
    given = {name: _Given(name, value) for name, value in parameters.items() if value}
    if "service" in parameters:
        return given  # its file goes before the environment, and only the driver reads that
    for name in ("sslmode", *_DEFAULTS):
        variable = f"PG{name.upper()}"
        if value := environment.get(variable):
            given.setdefault(name, _Given(variable, value))
    return given


def _mode(given: Mapping[str, _Given], *, over_tcp: bool) -> str:
    told, mode = given.get("sslmode", ("", "prefer" if over_tcp else ""))
    if mode and mode not in MODES:
        raise _bad(f"{told}: must be one of {', '.join(MODES)}")
    return mode


def _read_by_driver(mode: str) -> set[str]:
    if mode in ("", "disable"):
        return set()
    return set(_OUR_OWN if mode in _UNVERIFIED else _DEFAULTS)


def _find(name: str, given: Mapping[str, _Given]) -> _File | None:
    if name in given:
        told, value = given[name]
        return None if value == SYSTEM else _File(told, Path(value))
    default = _default(name)
    if default is None or "service" in given:
        return None
    try:
        default.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        pass  # it is in the driver's way all the same
    return _File(name, default)


def _default(name: str) -> Path | None:
    with suppress(RuntimeError):  # there is no home
        return Path.home() / ".postgresql" / _DEFAULTS[name]
    return None


# --- whether it is any good ---------------------------------------------------------------------


def _check_readable(file: _File) -> None:
    try:
        if file.path.is_file():
            with file.path.open("rb"):
                return
    except OSError as error:
        raise _bad(f"{file.told}: {file.path} cannot be read: {error.strerror}") from None
    raise _bad(f"{file.told}: there is no file {file.path}")


def _check_roots(mode: str, found: Mapping[str, _File]) -> None:
    if "sslrootcert" in found:
        return
    default = _default("sslrootcert")
    instead = f", and there is no {default}" if default else ""
    raise _bad(
        f"sslrootcert: is not given{instead}; sslmode={mode} needs the certificate of the CA "
        "(or the word system, for those that this computer trusts)"
    )


def _check_trust(file: _File, what: str) -> None:
    try:
        _context().load_verify_locations(cafile=file.path)
    except ssl.SSLError:
        raise _bad(f"{file.told}: {file.path} holds no {what} in PEM form") from None


def _check_pair(cert: _File, key: _File | None, password: str) -> None:
    _check_trust(cert, "certificate")
    try:
        _context().load_cert_chain(cert.path, key.path if key else None, lambda: password)
    except ssl.SSLError as error:
        reason = error.reason
    else:
        return
    holder = key or _File("sslkey", cert.path)
    raise _bad(f"{holder.told}: {_why_no_key(holder.path, password, reason)}")


def _why_no_key(path: Path, password: str, reason: str | None) -> str:
    if reason == "KEY_VALUES_MISMATCH":
        return f"{path} does not belong to the certificate of sslcert"
    text = path.read_bytes()
    if b"PRIVATE KEY" not in text:
        return f"{path} holds no private key in PEM form"
    if b"ENCRYPTED" in text:
        wrong = "and sslpassword does not open it" if password else "so sslpassword must be given"
        return f"{path} is encrypted, {wrong}"
    return f"{path} cannot be used as a private key"


def _context() -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


# --- what is said -------------------------------------------------------------------------------


def _distrust(error: ssl.SSLCertVerificationError) -> str:
    why = str(getattr(error, "verify_message", "no reason given")).rstrip(".")
    code = getattr(error, "verify_code", None)
    if code in _HOST_DIFFERS:
        return (
            f"the server's certificate is for another host: {why}; connect by a name that it "
            "holds, or check the CA alone (sslmode=verify-ca)"
        )
    remedy = _ANOTHER_CA if code is None else _REMEDIES.get(code, _ANOTHER_CA)
    return f"the server's certificate is not trusted: {why}; {remedy}"


def _failure(symbol: str) -> tuple[type[DatabaseError], str]:
    reason = symbol.replace("_", " ").lower()
    if "alert" in reason and ("unknown ca" in reason or "certificate" in reason):
        return AuthenticationFailed, (
            f"the server does not accept the client's certificate ({reason}); see sslcert"
        )
    return DatabaseUnavailable, f"the TLS connection failed: {reason}"


def _bad(message: str) -> InvalidArgument:
    return InvalidArgument("dsn", message)
