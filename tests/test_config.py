"""Settings: what is taken, from where, and that a bad one is refused by name at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ringcomm import Config, ConfigError, RingcommError


def test_defaults_are_valid_and_frozen() -> None:
    config = Config()
    assert config.lanes == 1
    assert config.interfaces == ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.lanes = 2  # type: ignore[misc]


def test_sequences_become_tuples() -> None:
    config = Config(interfaces=["eth0", "eth1"], congestion=["reno"])  # type: ignore[arg-type]
    assert config.interfaces == ("eth0", "eth1")
    assert config.congestion == ("reno",)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"lanes": 0}, "lanes=0: give a whole number from 1 to 16"),
        ({"lanes": 17}, "lanes=17"),
        ({"lanes": 1.5}, "lanes=1.5: give a whole number"),
        ({"lanes": True}, "lanes=True"),
        ({"lanes": "2"}, "lanes='2'"),
        ({"segment_bytes": 4095}, "segment_bytes=4095"),
        ({"segment_bytes": 5000}, "segment_bytes=5000: give a multiple of 4096"),
        ({"segment_bytes": 8 << 20}, "segment_bytes=8388608"),
        ({"timeout": 0}, "timeout=0"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"timeout": None}, "timeout=None"),
        ({"connect_timeout": -1}, "connect_timeout=-1"),
        ({"heartbeat": 0.001}, "heartbeat=0.001"),
        ({"peer_timeout": 0.01}, "peer_timeout=0.01"),
        ({"heartbeat": 6}, "peer_timeout=10.0 must be at least twice heartbeat=6"),
        ({"interfaces": "eth0,eth1"}, "interfaces='eth0,eth1': give a tuple of names"),
        ({"interfaces": (1,)}, "interfaces="),
        ({"interfaces": 7}, "interfaces=7"),
        ({"congestion": "reno"}, "congestion='reno'"),
        ({"algorithm": "tree"}, "algorithm='tree': give one of auto, ring, direct, one_shot, d"),
        ({"spin_us": -2}, "spin_us=-2: give a whole number from -1"),
        ({"threads": 3}, "threads=3: give a whole number from 0 to 2"),
        ({"insecure": "no"}, "insecure='no': give True or False"),
    ],
)
def test_a_bad_value_is_named(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        Config(**values)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, RingcommError)


ENVIRONMENT: dict[str, tuple[str, Any]] = {
    "interfaces": ("eth0, eth1,", ("eth0", "eth1")),
    "lanes": ("3", 3),
    "probe": ("0", False),
    "segment_bytes": ("65536", 65536),
    "timeout": ("12.5", 12.5),
    "connect_timeout": ("7", 7.0),
    "heartbeat": ("0.5", 0.5),
    "peer_timeout": ("5", 5.0),
    "algorithm": ("direct", "direct"),
    "shared_memory": ("0", False),
    "tune_table": ("/var/lib/tuned.json", "/var/lib/tuned.json"),
    "spin_us": ("0", 0),
    "timeline": ("/tmp/trace-{rank}.json", "/tmp/trace-{rank}.json"),
    "threads": ("2", 2),
    "kernel_set": ("scalar", "scalar"),
    "congestion": ("", ()),
    "insecure": ("yes", True),
    "secret_file": ("/run/secret", "/run/secret"),
    "secret_fd": ("7", 7),
}


def test_every_field_has_a_variable() -> None:
    assert set(ENVIRONMENT) == {field.name for field in dataclasses.fields(Config)}
    env = {"RINGCOMM_" + name.upper(): text for name, (text, _) in ENVIRONMENT.items()}
    config = Config.from_env(env)
    assert dataclasses.asdict(config) == {name: value for name, (_, value) in ENVIRONMENT.items()}


@pytest.mark.parametrize("name", list(ENVIRONMENT))
def test_one_variable_changes_one_field(name: str) -> None:
    text, value = ENVIRONMENT[name]
    config = Config.from_env({"RINGCOMM_" + name.upper(): text})
    assert config == dataclasses.replace(Config(), **{name: value})


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("true", True), ("YES ", True), ("0", False), ("no", False), ("", False)],
)
def test_switches(text: str, value: bool) -> None:
    assert Config.from_env({"RINGCOMM_INSECURE": text}).insecure is value


def test_arguments_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGCOMM_LANES", "3")
    assert Config.from_env().lanes == 3
    assert Config.from_env(lanes=2).lanes == 2
    assert Config.from_env(lanes=None).lanes == 3
    assert Config().lanes == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("LANES", "two"), ("LANES", ""), ("LANES", "99"), ("SEGMENT_BYTES", "64K"),
        ("SEGMENT_BYTES", "5000"), ("TIMEOUT", "soon"), ("TIMEOUT", "-1"), ("TIMEOUT", "nan"),
        ("CONNECT_TIMEOUT", "0"), ("INSECURE", "maybe"), ("PEER_TIMEOUT", "1"),
        ("SECRET_FD", "stdin"), ("HEARTBEAT", "1e9"),
    ],
)  # fmt: skip
def test_a_bad_variable_is_named(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"\bRINGCOMM_{name}\b") as caught:
        Config.from_env({f"RINGCOMM_{name}": text, "RINGCOMM_KERNEL_SET": "scalar"})
    assert "KERNEL_SET" not in str(caught.value)


def test_the_variable_is_not_blamed_for_an_argument() -> None:
    with pytest.raises(ConfigError, match="lanes=99") as caught:
        Config.from_env({"RINGCOMM_LANES": "2", "RINGCOMM_TIMEOUT": "5"}, lanes=99)
    assert "RINGCOMM_" not in str(caught.value)
    with pytest.raises(ConfigError, match="RINGCOMM_CONNECT_TIMEOUT") as caught:
        Config.from_env({"RINGCOMM_CONNECT_TIMEOUT": "0", "RINGCOMM_TIMEOUT": "5"})
    assert "RINGCOMM_TIMEOUT" not in str(caught.value)


def test_shared_fields_are_what_the_wire_depends_on() -> None:
    assert Config(lanes=2).shared_fields() == {
        "lanes": 2, "probe": True, "segment_bytes": 0, "algorithm": "auto"
    }  # fmt: skip
