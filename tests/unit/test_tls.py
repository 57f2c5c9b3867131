"""TLS files that cannot be used are named before anything is tried, and failures say what to do."""

from __future__ import annotations

import os
import ssl
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncpg
import pytest

from delayq import tls
from delayq.database import Database
from delayq.dsn import parse_dsn
from delayq.errors import AuthenticationFailed, DatabaseUnavailable, InvalidArgument
from delayq.failures import is_transient, translate
from delayq.settings import load_settings
from tests.certificates import Authority, encrypted

KEY_PASSWORD = "planted-marker-of-the-key"
NOBODY = 65534


class Files:
    """Good files and bad ones, in one folder."""

    def __init__(self, folder: Path) -> None:
        authority = Authority(folder, "ca")
        self.ca = authority.cert
        self.client = authority.issue("client", "shop")
        self.other = authority.issue("other", "somebody else")
        self.locked = encrypted(self.client, KEY_PASSWORD)
        self.nonsense = folder / "nonsense.pem"
        self.nonsense.write_text(f"-----BEGIN\n{KEY_PASSWORD}\n")
        self.damaged = folder / "damaged.key"
        self.damaged.write_text(self.client.key.read_text().replace("M", "N", 3))
        self.folder = folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls"))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home of its own, so that nobody's ~/.postgresql is in the way."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def _check(**parameters: object) -> None:
    query = "&".join(f"{name}={value}" for name, value in parameters.items())
    Database(parse_dsn(f"postgresql://shop@db.example/shop?{query}"), load_settings())


def _refused(**parameters: object) -> str:
    with pytest.raises(InvalidArgument, match=r"^dsn: ") as refused:
        _check(**parameters)
    assert KEY_PASSWORD not in "".join(traceback.format_exception(refused.value))
    return str(refused.value).removeprefix("dsn: ")


def test_files_that_fit_are_taken(files: Files) -> None:
    _check(sslmode="verify-full", sslrootcert=files.ca)
    _check(sslmode="verify-full", sslrootcert=files.ca, sslcert=files.client.cert,
           sslkey=files.client.key)  # fmt: skip
    _check(sslcert=files.client.cert, sslkey=files.locked, sslpassword=KEY_PASSWORD)


def test_a_certificate_and_its_key_may_be_one_file(files: Files, tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_text(files.client.cert.read_text() + files.client.key.read_text())
    _check(sslcert=both)


@pytest.mark.parametrize("name", ["sslrootcert", "sslcert", "sslkey", "sslcrl"])
def test_a_file_that_is_not_there_or_no_file_is_named(files: Files, name: str) -> None:
    assert _refused(**{name: "/nonesuch/file"}) == f"{name}: there is no file /nonesuch/file"
    assert _refused(**{name: files.ca / "x"}) == f"{name}: there is no file {files.ca}/x"
    assert _refused(**{name: files.folder}) == f"{name}: there is no file {files.folder}"


@pytest.mark.parametrize("name", ["sslrootcert", "sslcert"])
def test_a_file_that_holds_no_certificate_is_named(files: Files, name: str) -> None:
    for wrong in (files.nonsense, files.client.key):
        said = _refused(**{name: wrong, "sslkey": files.client.key})
        assert said == f"{name}: {wrong} holds no certificate in PEM form"


def test_a_file_that_holds_no_revocation_list_is_named(files: Files) -> None:
    said = _refused(sslcrl=files.nonsense)
    assert said == f"sslcrl: {files.nonsense} holds no revocation list in PEM form"


@pytest.mark.parametrize(
    ("key", "password", "why"),
    [
        ("nonsense", "", "holds no private key in PEM form"),
        ("ca", "", "holds no private key in PEM form"),
        ("damaged", "", "cannot be used as a private key"),
        ("locked", "", "is encrypted, so sslpassword must be given"),
        ("locked", "wrong", "is encrypted, and sslpassword does not open it"),
    ],
)
def test_a_key_that_cannot_be_used_is_named_with_the_reason(
    files: Files, key: str, password: str, why: str
) -> None:
    path = getattr(files, key)
    more = {"sslpassword": f"{password}-{KEY_PASSWORD}"} if password else {}
    assert _refused(sslcert=files.client.cert, sslkey=path, **more) == f"sslkey: {path} {why}"


def test_a_key_of_another_certificate_is_named(files: Files) -> None:
    said = _refused(sslcert=files.client.cert, sslkey=files.other.key)
    assert said == f"sslkey: {files.other.key} does not belong to the certificate of sslcert"


def test_a_certificate_without_its_key_is_told(files: Files) -> None:
    said = _refused(sslcert=files.client.cert)
    assert said == f"sslkey: {files.client.cert} holds no private key in PEM form"


@contextmanager
def _without_rights() -> Iterator[None]:
    """Not even the superuser's right to read everything."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.fixture
def unreadable(files: Files) -> Iterator[Path]:
    path = files.folder / "unreadable.pem"
    path.write_text(files.ca.read_text())
    path.chmod(0)
    yield path
    path.chmod(0o600)


@pytest.mark.parametrize("name", ["sslrootcert", "sslcert", "sslkey", "sslcrl"])
def test_a_file_that_may_not_be_read_is_named(
    monkeypatch: pytest.MonkeyPatch, unreadable: Path, name: str
) -> None:
    monkeypatch.setenv("HOME", "/nonesuch")
    with _without_rights():
        said = _refused(**{name: unreadable})
    assert said == f"{name}: {unreadable} cannot be read: Permission denied"


# --- what stands in for the URL -------------------------------------------------------------


@pytest.mark.parametrize("mode", ["verify-ca", "verify-full"])
def test_verifying_without_a_root_is_refused_with_the_ways_out(
    monkeypatch: pytest.MonkeyPatch, home: Path, mode: str
) -> None:
    said = _refused(sslmode=mode)
    assert said.startswith(
        f"sslrootcert: is not given, and there is no {home}/.postgresql/root.crt"
    )
    assert f"sslmode={mode} needs the certificate of the CA (or the word system" in said
    monkeypatch.setenv("PGSSLMODE", mode)
    assert _refused() == said


def test_the_root_may_be_where_libpq_looks(files: Files, home: Path) -> None:
    (home / ".postgresql").mkdir()
    root = home / ".postgresql" / "root.crt"
    root.write_text(files.ca.read_text())
    _check(sslmode="verify-full")
    root.write_text("")
    assert _refused(sslmode="verify-full") == (
        f"sslrootcert: {root} holds no certificate in PEM form"
    )
    _check(sslmode="prefer")  # not read then


def test_a_home_that_may_not_be_entered_is_told_since_the_driver_stumbles_over_it(
    monkeypatch: pytest.MonkeyPatch, files: Files
) -> None:
    closed = files.folder / "closed"
    (closed / ".postgresql").mkdir(parents=True)
    closed.chmod(0)
    monkeypatch.setenv("HOME", str(closed))
    with _without_rights():
        said = _refused()
    closed.chmod(0o700)
    assert said == f"sslcert: {closed}/.postgresql/postgresql.crt cannot be read: Permission denied"


@pytest.mark.parametrize(
    ("variable", "mode"),
    [
        ("PGSSLROOTCERT", "require"),
        ("PGSSLCRL", "require"),
        ("PGSSLCERT", "prefer"),
    ],
)
def test_files_of_the_environment_are_named_by_their_variable(
    monkeypatch: pytest.MonkeyPatch, files: Files, variable: str, mode: str
) -> None:
    monkeypatch.setenv(variable, "/nonesuch/file")
    assert _refused(sslmode=mode) == f"{variable}: there is no file /nonesuch/file"
    _check(sslmode="disable")  # not read then
    Database(parse_dsn("postgresql:///shop?host=/run/postgresql"), load_settings())
    good = files.client.cert if variable == "PGSSLCERT" else files.ca
    named = {variable.removeprefix("PG").lower(): good, "sslkey": files.client.key}
    _check(sslmode=mode, **named)  # the URL's goes first


def test_a_mode_of_the_environment_that_does_not_exist_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PGSSLMODE", "on")
    assert _refused().startswith("PGSSLMODE: must be one of disable, allow, prefer")
    _check(sslmode="prefer")


def test_the_systems_roots_may_be_asked_for_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, files: Files
) -> None:
    monkeypatch.setenv("PGSSLROOTCERT", "system")
    assert parse_dsn("postgresql://db.example/").connect_arguments()["ssl"] is True
    assert _refused(sslmode="require") == "PGSSLROOTCERT=system: goes with sslmode=verify-full"
    assert _refused(sslcert=files.client.cert) == "PGSSLROOTCERT=system: goes without sslcert"
    monkeypatch.setenv("PGSSLCRL", "somewhere")
    assert _refused() == "PGSSLROOTCERT=system: goes without PGSSLCRL"
    monkeypatch.delenv("PGSSLCRL")
    kept = parse_dsn("postgresql://db.example/?passfile=/etc/shop/pgpass").connect_arguments()
    assert kept["dsn"] == "postgresql://?passfile=%2Fetc%2Fshop%2Fpgpass"
    _check(sslmode="verify-full", sslrootcert=files.ca)


def test_with_a_service_file_only_what_the_url_names_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PGSSLROOTCERT", "/nonesuch/file")
    _check(service="shop", sslmode="verify-full")
    assert _refused(service="shop", sslcert="/nonesuch/cert").startswith("sslcert: there is no")


# --- what a failed connection means -----------------------------------------------------------


def _distrusted(code: int, message: str) -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, "[SSL: CERTIFICATE_VERIFY_FAILED] (_ssl.c:1006)")
    error.verify_code, error.verify_message = code, message
    return error


def _alert(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, f"[SSL: {reason}]")
    error.reason = reason
    return error


def _closed(cause: BaseException) -> asyncpg.PostgresError:
    error = asyncpg.ConnectionDoesNotExistError("connection was closed in the middle")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (_distrusted(19, "self-signed certificate in certificate chain"), "sslrootcert must name"),
        (_distrusted(20, "unable to get local issuer certificate"), "sslrootcert must name"),
        (_distrusted(10, "certificate has expired"), "has expired; give the server a new one"),
        (_distrusted(23, "certificate revoked"), "revoked; give the server a new one"),
        (_distrusted(3, "unable to get certificate CRL"), "sslcrl must hold"),
        (_distrusted(62, "Hostname mismatch, … not valid for 'db'."), "sslmode=verify-ca"),
        (_distrusted(64, "IP address mismatch, … not valid for '::1'."), "sslmode=verify-ca"),
        (_closed(_alert("TLSV1_ALERT_UNKNOWN_CA")), "(tlsv1 alert unknown ca); see sslcert"),
        (_closed(_alert("SSLV3_ALERT_CERTIFICATE_EXPIRED")), "expired); see sslcert"),
        (_alert("TLSV13_ALERT_CERTIFICATE_REQUIRED"), "certificate required); see sslcert"),
        (ConnectionError('server at "db:5432" rejected SSL upgrade'), "switch `ssl` on"),
    ],
)
def test_who_is_not_trusted_is_told_with_the_remedy_and_not_asked_again_and_again(
    error: Exception, words: str
) -> None:
    told = translate(error, at="beat connection to db:5432/shop")
    assert type(told) is AuthenticationFailed
    assert str(told).startswith("beat connection to db:5432/shop: the server")
    assert words in str(told)
    assert "_ssl.c" not in str(told)
    assert not is_transient(error)


@pytest.mark.parametrize(
    "error",
    [
        _alert("WRONG_VERSION_NUMBER"),
        _alert("TLSV1_ALERT_PROTOCOL_VERSION"),
        _closed(_alert("UNEXPECTED_EOF_WHILE_READING")),
        ssl.SSLError("no reason at all"),
    ],
)
def test_other_failures_of_tls_are_outages_that_may_pass(error: Exception) -> None:
    told = translate(error)
    assert type(told) is DatabaseUnavailable
    assert str(told).startswith("the TLS connection failed: ")
    assert is_transient(error)


def test_what_has_nothing_to_do_with_tls_is_told_as_before() -> None:
    assert tls.explain(ConnectionRefusedError(111, "refused")) is None
    assert tls.explain(_closed(OSError("gone"))) is None
