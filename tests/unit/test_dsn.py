"""A PostgreSQL URL is read as libpq reads it; what is wrong is told without quoting it."""

from __future__ import annotations

import traceback
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayq.dsn import Dsn, parse_dsn
from delayq.errors import InvalidArgument


@pytest.mark.parametrize(
    ("text", "hosts", "database", "user", "password"),
    [
        ("postgresql://h/db", (("h", None),), "db", None, None),
        ("postgres://u:p@h:5433/db", (("h", 5433),), "db", "u", "p"),
        ("postgresql://", (), None, None, None),
        ("postgresql:///db", (), "db", None, None),
        ("  postgresql://h/db\n", (("h", None),), "db", None, None),
        ("postgresql://a:1,b:2,c/db", (("a", 1), ("b", 2), ("c", None)), "db", None, None),
        ("postgresql://[2001:db8::1]:5433/db", (("2001:db8::1", 5433),), "db", None, None),
        ("postgresql://[::1]/", (("::1", None),), None, None, None),
        ("postgresql://%2Frun%2Fpg:5433/db", (("/run/pg", 5433),), "db", None, None),
        ("postgresql:///db?host=/run/pg&port=5433", (("/run/pg", 5433),), "db", None, None),
        ("postgresql:///db?host=a,b&port=1,2", (("a", 1), ("b", 2)), "db", None, None),
        ("postgresql:///db?host=a,b&port=7", (("a", 7), ("b", 7)), "db", None, None),
        ("postgresql:///?port=7", (("localhost", 7),), None, None, None),
        ("postgresql:///?hostaddr=10.0.0.1", (("10.0.0.1", None),), None, None, None),
        ("postgresql://:5433/db", (("localhost", 5433),), "db", None, None),
        ("postgresql://u%40x:S3cr%2Ft!@h/d%20b", (("h", None),), "d b", "u@x", "S3cr/t!"),
        ("postgresql://u:p@ss@h/db", (("h", None),), "db", "u", "p@ss"),
        ("postgresql://u:a:b@h/db", (("h", None),), "db", "u", "a:b"),
        ("postgresql://u:a+b@h/db", (("h", None),), "db", "u", "a+b"),
        ("postgresql://u:a#b@h/db", (("h", None),), "db", "u", "a#b"),
        ("postgresql://h/a?user=u&password=a%26b&dbname=c", (("h", None),), "c", "u", "a&b"),
    ],
)
def test_the_parts_of_a_url_are_those_that_libpq_sees(
    text: str,
    hosts: tuple[tuple[str, int | None], ...],
    database: str | None,
    user: str | None,
    password: str | None,
) -> None:
    dsn = parse_dsn(text)
    assert (dsn.hosts, dsn.database, dsn.user, dsn.password) == (hosts, database, user, password)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("", "is empty"),
        (" ", "is empty"),
        ("host=h dbname=db password=marker", "starts with postgresql://"),
        ("mysql://u:marker@h/db", "starts with postgresql://"),
        ("postgresql+asyncpg://u:marker@h/db", "without a driver name"),
        ("postgresql://u:ma/rker@h/db", "%2F"),
        ("postgresql://u:1/marker@h/db", "%2F"),
        ("postgresql://u:ma?marker@h/db", "percent-encode"),
        ("postgresql://u:ma?x=marker@h/db", "unknown"),
        ("postgresql://u:marker@h:port/db", "port must be a number"),
        ("postgresql://u:marker@h:0/db", "port must be a number"),
        ("postgresql://u:marker@h:65536/db", "port must be a number"),
        ("postgresql://u:marker@h:٣/db", "port must be a number"),
        ("postgresql://u:marker@::1/db", "port must be a number"),
        ("postgresql://u:marker@[::1/db", "brackets"),
        ("postgresql://u:marker%@h/db", "%25"),
        ("postgresql://u:marker%zz@h/db", "%25"),
        ("postgresql://u:marker%00@h/db", "NUL"),
        ("postgresql://u:marker%ff@h/db", "UTF-8"),
        ("postgresql://u:marker@h/db?sslmode", "name=value"),
        ("postgresql://u:marker@h/db?sslmod=require", "did you mean sslmode"),
        ("postgresql://u:marker@h/db?search_path=x", "options=-c"),
        ("postgresql://u:marker@h/db?sslmode=on", "must be one of disable"),
        ("postgresql://u:marker@h/db?connect_timeout=x", "whole number"),
        ("postgresql://u:marker@h/db?options=search_path", "-c name=value"),
        ("postgresql://u:marker@h/db?target_session_attrs=standby", "delayq writes"),
        ("postgresql://u:marker@h/db?require_auth=scram-sha-256", "cannot be honoured"),
        ("postgresql://u:marker@h/db?sslrootcert=system&sslmode=require", "verify-full"),
        ("postgresql://u:marker@a,b/db?port=1,2,3", "one for each"),
    ],
)
def test_a_malformed_url_is_refused_with_a_remedy_and_without_the_password(
    text: str, remedy: str
) -> None:
    with pytest.raises(InvalidArgument, match=r"^dsn: ") as refusal:
        parse_dsn(text)
    assert refusal.value.field == "dsn"
    assert remedy in str(refusal.value)
    assert "marker" not in "".join(traceback.format_exception(refusal.value))


@pytest.mark.parametrize("nothing", [None, 5, b"postgresql://h/db"])
def test_what_is_no_text_is_refused_like_an_empty_one(nothing: object) -> None:
    with pytest.raises(InvalidArgument, match="is empty"):
        parse_dsn(nothing)  # type: ignore[arg-type]  # on purpose


def test_no_text_form_shows_the_password() -> None:
    dsn = parse_dsn("postgresql://app:S3cr%2Ft!@db.example:5433/shop?sslpassword=keymarker")
    assert dsn.describe() == "db.example:5433/shop as app"
    assert f"{dsn} {dsn!r}" == "Dsn(db.example:5433/shop as app) Dsn(db.example:5433/shop as app)"


@pytest.mark.parametrize(
    ("dsn", "described"),
    [
        (Dsn(), "the default host/"),
        (Dsn(hosts=(("a", 1), ("b", None)), database="d"), "a:1,b:5432/d"),
        (Dsn(hosts=(("::1", None),), user="u"), "[::1]:5432/ as u"),
    ],
)
def test_a_database_is_described_by_host_port_name_and_user(dsn: Dsn, described: str) -> None:
    assert dsn.describe() == described


def test_what_only_libpq_knows_is_left_out_and_remembered() -> None:
    dsn = parse_dsn(
        "postgresql://h/db?keepalives=1&keepalives_idle=30&channel_binding=require"
        "&gssencmode=disable&application_name=x&fallback_application_name=y&tcp_user_timeout=5"
    )
    assert dsn.dropped == (
        "application_name",
        "channel_binding",
        "fallback_application_name",
        "gssencmode",
        "keepalives",
        "keepalives_idle",
        "tcp_user_timeout",
    )
    assert dsn.driver_parameters == {}
    assert "server_settings" not in dsn.connect_arguments()


@pytest.mark.parametrize(
    ("value", "seconds"), [("7", 7.0), ("0", None), ("-1", None), ("99999", 3600.0)]
)
def test_the_time_limit_of_connecting_is_taken_over_within_bounds(
    value: str, seconds: float | None
) -> None:
    assert parse_dsn(f"postgresql://h/?connect_timeout={value}").connect_timeout_s == seconds


def test_server_settings_are_taken_from_options() -> None:
    dsn = parse_dsn(
        "postgresql://h/?options=-c%20search_path%3Dapp%2Cpublic%20-cwork_mem=1MB"
        "%20--lock-timeout=5s%20-c%20my.text=a%5C%20b"
    )
    assert dsn.server_settings == {
        "search_path": "app,public",
        "work_mem": "1MB",
        "lock_timeout": "5s",
        "my.text": "a b",
    }


@pytest.mark.parametrize(
    ("text", "attrs"),
    [
        ("postgresql://a/", None),
        ("postgresql://a,b/", "read-write"),
        ("postgresql:///?host=a,b", "read-write"),
        ("postgresql://a,b/?target_session_attrs=any", "any"),
        ("postgresql://a/?target_session_attrs=primary", "primary"),
    ],
)
def test_among_several_hosts_the_one_that_accepts_writes_is_chosen(
    text: str, attrs: str | None
) -> None:
    assert parse_dsn(text).target_session_attrs == attrs


def test_tls_parameters_go_to_the_driver_and_the_password_not_into_its_url() -> None:
    dsn = parse_dsn("postgresql://u:marker@h/db?sslmode=verify-full&sslrootcert=/a%20b/ca.pem")
    arguments = dsn.connect_arguments()
    assert arguments["dsn"] == "postgresql://?sslmode=verify-full&sslrootcert=%2Fa+b%2Fca.pem"
    assert arguments["password"] == "marker"


def test_the_systems_roots_mean_a_fully_verified_connection() -> None:
    arguments = parse_dsn("postgresql://h/?sslmode=verify-full&sslrootcert=system")
    assert arguments.connect_arguments()["ssl"] is True


@given(st.text(min_size=1, max_size=60))
def test_any_text_is_read_or_refused_and_nothing_else(rest: str) -> None:
    with suppress(InvalidArgument):
        assert parse_dsn(f"postgresql://{rest}").describe()
