"""Settings are read from where they should be, checked together, and refused in one safe line."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

from delayq.errors import InvalidSettings
from delayq.settings import PREFIX, Settings, load_settings

SECRET = "S3cr%2Ft!-marker"


def test_the_defaults_are_valid_and_no_database_is_named() -> None:
    settings = load_settings()
    assert settings.dsn is None
    assert settings.node_name


def test_an_environment_variable_sets_the_field_of_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DELAYQ_MAX_WORKERS", "7")
    assert load_settings().max_workers == 7


def test_a_keyword_wins_over_the_environment_and_none_means_not_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DELAYQ_MAX_WORKERS", "7")
    assert load_settings(max_workers=9).max_workers == 9
    assert load_settings(max_workers=None).max_workers == 7


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELAYQ_DSN", "")
    assert load_settings().dsn is None


@pytest.fixture
def dot_env(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(Settings.model_config, "env_file", ".env")
    return tmp_path / ".env"


def test_the_file_dot_env_is_read_and_the_environment_wins_over_it(
    dot_env: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dot_env.write_text("DELAYQ_MAX_WORKERS=11\nDELAYQ_THREADS=3\nOTHER=1\n")
    monkeypatch.setenv("DELAYQ_THREADS", "4")
    settings = load_settings()
    assert (settings.max_workers, settings.threads) == (11, 4)


def test_a_dot_env_that_is_no_text_is_refused_in_one_line(dot_env: Path) -> None:
    dot_env.write_bytes(b"DELAYQ_DSN=\xff\xfe\n")
    with pytest.raises(InvalidSettings, match=r"^\.env is not UTF-8 text"):
        load_settings()


def test_the_short_intervals_of_the_tests_are_allowed() -> None:
    settings = load_settings(beat_interval_s=0.75, lease_ttl_s=3, sweep_interval_s=0.5)
    assert settings.understudy_delay_ms == 500


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        setattr(load_settings(), "max_workers", 3)  # noqa: B010 -- mypy knows that it cannot be set


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"beat_interval_s": 6.0, "lease_ttl_s": 15.0}, "DELAYQ_LEASE_TTL_S"),
        ({"understudy_delay_ms": 501, "sweep_interval_s": 0.5}, "DELAYQ_UNDERSTUDY_DELAY_MS"),
        ({"min_workers": 5, "max_workers": 4}, "DELAYQ_MIN_WORKERS"),
        ({"backoff_base_s": 9.0, "backoff_max_s": 8.0}, "DELAYQ_BACKOFF_BASE_S"),
        ({"lock_timeout_s": 31.0}, "DELAYQ_LOCK_TIMEOUT_S"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    given: dict[str, object], named: str
) -> None:
    with pytest.raises(InvalidSettings, match=named):
        load_settings(**given)


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ({"beat_interval_s": 5.0, "lease_ttl_s": 15.0}, True),
        ({"beat_interval_s": 5.001, "lease_ttl_s": 15.0}, False),
        ({"sweep_interval_s": 60.0}, True),
        ({"sweep_interval_s": 60.1}, False),
        ({"drain_timeout_s": 0}, True),
        ({"connect_timeout_s": 0}, False),
        ({"connect_timeout_s": float("nan")}, False),
        ({"connect_timeout_s": float("inf")}, False),
        ({"max_attempts": 0}, False),
        ({"node_name": ""}, False),
        ({"node_name": "a\x1b[31m"}, False),
        ({"log_level": "debug"}, True),
        ({"log_level": "loud"}, False),
        ({"log_format": "JSON"}, True),
        ({"log_format": "xml"}, False),
        ({"event_loop": "UVLOOP"}, True),
        ({"event_loop": "trio"}, False),
    ],
)
def test_the_bounds_hold(given: dict[str, object], allowed: bool) -> None:
    if allowed:
        load_settings(**given)
    else:
        with pytest.raises(InvalidSettings) as refusal:
            load_settings(**given)
        assert PREFIX + next(iter(given)).upper() in str(refusal.value)
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("sweep", "horizon"), [(1.0, 15.0), (5.0, 15.0), (10.0, 30.0)])
def test_timers_are_held_for_three_sweeps_at_least(sweep: float, horizon: float) -> None:
    assert load_settings(sweep_interval_s=sweep).horizon_effective_s == horizon


def test_a_misspelt_keyword_is_named() -> None:
    with pytest.raises(InvalidSettings, match=r"^max_worker: there is no such setting"):
        load_settings(max_worker=3)


def test_a_dsn_is_never_shown() -> None:
    settings = load_settings(dsn=f"postgresql://u:{SECRET}@h/db")
    assert "marker" not in f"{settings!r} {settings} {settings.model_dump_json()}"


@pytest.mark.parametrize("name", sorted(Settings.model_fields))
def test_no_refusal_shows_the_refused_value(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for given in ({name: [SECRET]}, {name: {"x": SECRET}}, {name: SECRET, "threads": SECRET}):
        with pytest.raises(InvalidSettings) as refusal:
            load_settings(**given)
        assert "marker" not in "".join(traceback.format_exception(refusal.value))
        assert refusal.value.__context__ is None


def test_every_setting_says_what_it_is_and_in_which_unit() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name
        if field.annotation is float:
            assert name.endswith(("_s", "_ms", "_days")), name
