"""Settings: what is taken, from where, and that a bad one is refused by name at once."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

import ringcomm
from ringcomm import Communicator, Config, ConfigError, RingcommError, config


@pytest.fixture(autouse=True)
def _no_kernel_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite may run with one that its environment names (conftest.py)."""
    monkeypatch.delenv("RINGCOMM_KERNEL_SET", raising=False)


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
        ({"algorithm": "tree"}, "algorithm='tree': give one of auto, ring, one_shot, doubling, d"),
        ({"spin_us": -2}, "spin_us=-2: give a whole number from -1"),
        ({"threads": 3}, "threads=3: give a whole number from 0 to 2"),
        ({"insecure": "no"}, "insecure='no': give True or False"),
        ({"secret_fd": "3"}, "secret_fd='3': give a whole number from -1"),
        ({"secret_file": 3}, "secret_file=3: give a file's path"),
        ({"tune_table": "off"}, r"Config\(\): tune_table= is gone: the cost model goes by"),
        ({"kernel_set": 3}, "kernel_set=3: give a name, such as avx2"),
        ({"algorithm": ["ring"]}, r"algorithm=\['ring'\]: give one of"),
        ({"algorithm": "rin"}, "did you mean ring?"),
        ({"lanes": 99}, r"\(given as an argument\)"),
        ({"peer_timeout": 0.5}, r"\(heartbeat: the default, peer_timeout: given as an argument\)"),
        ({"lane": 2}, r"Config\(\) has no argument 'lane': did you mean lanes\?"),
        ({"qwertz": 2}, r"Config\(\) has no argument 'qwertz'; it has interfaces, lanes, "),
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
    "recovery": ("off", "off"),
    "algorithm": ("direct", "direct"),
    "shared_memory": ("0", False),
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
    assert (Config().lanes, Config(lanes=2).lanes, Config(timeout=1).lanes) == (3, 2, 3)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("LANES", "two"),
        ("LANES", ""),
        ("LANES", "99"),
        ("SEGMENT_BYTES", "64K"),
        ("SEGMENT_BYTES", "5000"),
        ("TIMEOUT", "soon"),
        ("TIMEOUT", "-1"),
        ("TIMEOUT", "nan"),
        ("CONNECT_TIMEOUT", "0"),
        ("INSECURE", "maybe"),
        ("PEER_TIMEOUT", "0.5"),
        ("SECRET_FD", "stdin"),
        ("HEARTBEAT", "1e9"),
    ],
)
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
    assert Config(lanes=2, heartbeat=1).shared_fields() == {
        "lanes": "2",
        "probe": "yes",
        "segment_bytes": "0",
        "algorithm": "auto",
        "peer_timeout": "10",
        "heartbeat": "1",
        "recovery": "on",
    }


# ---- where a value is from ----


def test_fields_that_are_not_given_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGCOMM_TIMEOUT", "12")
    monkeypatch.setenv("RINGCOMM_LANES", "3")
    with Communicator.create(config=Config(lanes=1)) as comm:
        assert (comm.config.timeout, comm.config.lanes) == (12, 1)
    made = Config(lanes=1)  # what equals the default is an argument all the same
    assert [made.sources()[name] for name in ("lanes", "timeout", "probe")] == [
        "argument",
        "RINGCOMM_TIMEOUT",
        "default",
    ]
    assert set(made.sources()) == set(ENVIRONMENT)


def test_a_config_keeps_what_the_environment_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it was made: not when it is copied, replaced, pickled or compared."""
    monkeypatch.setenv("RINGCOMM_TIMEOUT", "12")
    made = Config(lanes=2)
    assert "timeout=12.0" in repr(made)
    monkeypatch.setenv("RINGCOMM_TIMEOUT", "13")
    again = [pickle.loads(pickle.dumps(made)), copy.deepcopy(made), dataclasses.replace(made)]
    assert all(one == made and hash(one) == hash(made) for one in again)
    assert again[0].sources() == made.sources()
    assert dataclasses.replace(made, lanes=4).timeout == 12
    assert made != Config(lanes=2)
    assert made == Config(lanes=2, timeout=12.0)


def test_what_is_replaced_and_what_is_not_say_where_they_are_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RINGCOMM_LANES", "2")
    changed = Config(probe=False).replaced("torch", timeout=7.0, peer_timeout=10.0)
    sources = changed.sources()
    known = {name: sources[name] for name in ("lanes", "probe", "timeout", "peer_timeout")}
    assert known == {
        "lanes": "RINGCOMM_LANES",
        "probe": "argument",
        "timeout": "torch",
        "peer_timeout": "default",
    }
    assert (changed.timeout, changed.probe, changed.lanes) == (7.0, False, 2)
    with pytest.raises(ConfigError, match=r"lanes=99: .* \(given as an argument\)"):
        changed.replaced(lanes=99)


def test_the_signature_shows_the_defaults() -> None:
    shown = str(inspect.signature(Config))
    assert "lanes: 'int' = 1" in shown
    assert "congestion: 'tuple[str, ...]' = ('cubic', 'reno')" in shown


def test_of_two_values_each_says_where_it_is_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGCOMM_PEER_TIMEOUT", "5")
    with pytest.raises(
        ConfigError,
        match="heartbeat: given as an argument, peer_timeout: set by RINGCOMM_PEER_TIMEOUT",
    ):
        Config(heartbeat=4)


def test_paths_are_taken_as_paths() -> None:
    assert Config(secret_file=Path("/run/key")).secret_file == "/run/key"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"lanes": 2}, r"init\(\) has no argument 'lanes': give config=ringcomm.Config\(lanes="),
        ({"lane": 2}, r"give config=ringcomm.Config\(lanes=\.\.\.\)"),
        ({"timout": 2}, r"has no argument 'timout': did you mean timeout\?"),
        ({"colour": 2}, "has no argument 'colour'; it has rank, world_size, init_method, config"),
        ({"config": {"lanes": 2}}, r"config=\{'lanes': 2\}: give a ringcomm.Config, as Config"),
        ({"config": Config}, "give a ringcomm.Config"),
        ({"init_method": 5}, 'init_method=5: give "tcp://host:port"'),
    ],
)
def test_init_says_what_it_takes(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ringcomm.init(**arguments)
    assert not ringcomm.is_initialized()
    if "has no argument" not in says and "lane" not in arguments:
        with pytest.raises(ConfigError, match=says):
            Communicator.create(**arguments)


# ---- variables that nothing reads ----


@pytest.fixture
def unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_warned", set())


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "RINGCOMM_LANE",
            "RINGCOMM_LANE is set, and ringcomm has no such setting: did you mean RINGCOMM_LANES?",
        ),
        ("RINGCOMM_INTERFACE", "did you mean RINGCOMM_INTERFACES?"),
        ("RINGCOMM_SECRET_FIEL", "did you mean RINGCOMM_SECRET_FILE?"),
        ("RINGCOMM_COMPRESION", "did you mean RINGCOMM_COMPRESSION?"),
        ("ringcomm_timeout", "did you mean RINGCOMM_TIMEOUT?"),
        ("RINGCOMM_XYZZY", "RINGCOMM_XYZZY is set, and ringcomm has no such setting"),
        ("RINGCOMM_TUNE_TABLE", "RINGCOMM_TUNE_TABLE is gone: the cost model goes by the speed"),
    ],
)
def test_an_unknown_variable_is_warned_of_once(
    name: str,
    says: str,
    unwarned: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(name, "2")
    with caplog.at_level(logging.WARNING, "ringcomm"):
        Config()
        Config(lanes=2)
    assert len(caplog.messages) == 1
    assert says in caplog.messages[0]
    assert ("did you mean" in says) == ("did you mean" in caplog.messages[0])


def test_what_the_package_reads_is_known() -> None:
    """Every variable that the package, its build or its documents name."""
    root = Path(ringcomm.__file__).parent.parent
    files = [*root.glob("ringcomm/**/*.py"), root / "build_ffi.py"]
    files += [root / "README.md", *root.glob("docs/*.md")]
    found = {
        name
        for path in files
        for name in re.findall(r"\bRINGCOMM_[A-Z_]*[A-Z]\b", path.read_text())
    }
    assert {"RINGCOMM_SECRET", "RINGCOMM_LOG", "RINGCOMM_LIBCUDA"} <= found
    found -= {"RINGCOMM_VERSION"}  # a macro of the C core
    assert config.unknown_variables(dict.fromkeys(found, "")) == {}
