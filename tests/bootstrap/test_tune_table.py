"""The tuned table: its file, whose cluster it is for, and what of it travels between ranks."""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from ringcomm.bootstrap import commit, tuned
from ringcomm.bootstrap.blobs import Record, pack
from ringcomm.bootstrap.lanes import LaneId
from ringcomm.bootstrap.rails import Endpoint, Port
from ringcomm.bootstrap.tuned import Cluster, Document, Measured, Row, Table
from ringcomm.config import ALGORITHMS, Config
from ringcomm.errors import BootstrapError, ConfigError

HERE = Cluster((0, 0, 1, 1), (("eth0 1000 Mbit/s", "eth1"),) * 4, ("a", "a", "b", "b"))
ROWS = (Row(1000, "one_shot"), Row(5000, "auto"), Row(2**40, "direct"))
SIZES = (Measured(1024, {"auto": 2e-4, "one_shot": 1e-4}, "one_shot"),)


def document(cluster: Cluster = HERE, rows: tuple[Row, ...] = ROWS) -> Document:
    return Document(cluster, rows, True, SIZES, "0.1.0", "2026-01-01T00:00:00+00:00")


def write(path: Path, **changes: Any) -> str:
    """A good file with some fields changed."""
    document().write(str(path))
    fields = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps(fields))
    return str(path)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# ---- the file ----


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "table.json"
    document().write(str(path))
    assert tuned.read(str(path)) == document()
    assert os.listdir(path.parent) == ["table.json"]
    fields = json.loads(path.read_text())
    assert fields["format"] == 2
    assert fields["memory"] == 1
    assert fields["cluster"]["world_size"] == 4
    assert fields["rows"][0] == {"up_to": 1000, "algorithm": "one_shot"}


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        document().write(str(tmp_path / "file" / "table.json"))


def test_a_good_table_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "t.json")
    assert tuned.load(Config(tune_table=path), HERE) == Table(path, ROWS, memory=True)
    assert warnings(caplog) == []
    other_names = dataclasses.replace(HERE, names=("c", "d", "e", "f"))
    assert tuned.load(Config(tune_table=path), other_names) == Table(path, ROWS, memory=True)


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "auto"])
def test_an_algorithm_that_is_set_beats_the_table(tmp_path: Path, algorithm: str) -> None:
    path = write(tmp_path / "t.json")
    assert tuned.load(Config(tune_table=path, algorithm=algorithm), HERE) is None


DIGEST = HERE.to_fields()


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 1},
        {"format": None},
        {"memory": None},
        {"memory": 2},
        {"rows": None},
        {"rows": {}},
        {"rows": [1]},
        {"rows": [{"up_to": 1}]},
        {"rows": [{"up_to": -1, "algorithm": "ring"}]},
        {"rows": [{"up_to": 2**63, "algorithm": "ring"}]},
        {"rows": [{"up_to": 1.5, "algorithm": "ring"}]},
        {"rows": [{"up_to": True, "algorithm": "ring"}]},
        {"rows": [{"up_to": 1, "algorithm": "tree"}]},
        {"rows": [{"up_to": 1, "algorithm": 1}]},
        {"rows": [{"up_to": 5, "algorithm": "ring"}, {"up_to": 5, "algorithm": "direct"}]},
        {"rows": [{"up_to": 5, "algorithm": "ring"}, {"up_to": 4, "algorithm": "direct"}]},
        {"rows": [{"up_to": i, "algorithm": "ring"} for i in range(65)]},
        {"measured": None},
        {"measured": [{"bytes": 1, "seconds": {"ring": "x"}, "chosen": ""}]},
        {"date": 5},
        {"ringcomm": None},
        {"cluster": None},
        {"cluster": {}},
        {"cluster": {**DIGEST, "digest": "0" * 16}},
        {"cluster": {**DIGEST, "hosts": [0, 0, 1, 2]}},
        {"cluster": {**DIGEST, "hosts": ["0"] * 4}},
        {"cluster": {**DIGEST, "ports": [["a"]] * 3}},
        {"cluster": {**DIGEST, "ports": [[1]] * 4}},
        {"cluster": {**DIGEST, "ports": 7}},
    ],
)
def test_broken_fields(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any]
) -> None:
    path = write(tmp_path / "t.json", **changes)
    assert tuned.load(Config(tune_table=path), HERE) is None
    (line,) = warnings(caplog)
    assert path in line
    assert "ignored" in line
    assert "run python -m ringcomm tune again" in line


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[1]", "format 2"),
        (b"[" * 100_000, "not JSON"),
        (b" " * (4 << 20) + b"{}", "too long"),
    ],
    ids=["empty", "cut", "binary", "list", "deep", "long"],
)
def test_broken_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes, says: str
) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    assert tuned.load(Config(tune_table=str(path)), HERE) is None
    (line,) = warnings(caplog)
    assert says in line


def test_what_is_no_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("", "pipe", "nothing", "nothing/at/all"):
        assert tuned.load(Config(tune_table=str(tmp_path / name)), HERE) is None
    assert len(warnings(caplog)) == 4


def test_the_cache_is_looked_at_where_nothing_is_set(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuned.load(Config(), HERE) is None  # silently: nobody has tuned
    path = tuned.path_of(Config(), HERE)
    assert path == str(tmp_path / "ringcomm" / HERE.file_name)
    document().write(path)
    assert tuned.load(Config(), HERE) == Table(path, ROWS, memory=True)
    assert tuned.load(Config(tune_table="off"), HERE) is None
    assert warnings(caplog) == []
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert tuned.default_folder() == "/home/somebody/.cache/ringcomm"


def test_changed_ports_find_the_old_table_and_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    document().write(tuned.path_of(Config(), HERE))
    faster = dataclasses.replace(HERE, ports=(("eth0 2500 Mbit/s", "eth1"),) * 4)
    assert tuned.load(Config(), faster) is None
    (line,) = warnings(caplog)
    assert "ports of rank 0 were eth0 1000 Mbit/s, eth1 and are eth0 2500 Mbit/s, eth1" in line


# ---- whose it is ----


@pytest.mark.parametrize(
    ("hosts", "ports", "says"),
    [
        ((0, 1), (("eth0",),) * 2, "world_size was 2 and is 4"),
        ((0, 1, 2, 3), HERE.ports, "ranks per host were 1+1+1+1 and are 2+2"),
        ((0, 1, 0, 1), HERE.ports, "ranks per host were of hosts 0,1,0,1 and are 2+2"),
        (HERE.hosts, (*HERE.ports[:3], ("eth0",)), "ports of rank 3 were eth0 and are eth0 1000"),
    ],
)
def test_another_cluster(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, hosts: Any, ports: Any, says: str
) -> None:
    path = tmp_path / "t.json"
    document(Cluster(hosts, ports)).write(str(path))
    assert tuned.load(Config(tune_table=str(path)), HERE) is None
    (line,) = warnings(caplog)
    assert says in line
    assert Cluster(hosts, ports).digest != HERE.digest


def test_a_cluster_is_made_of_what_ranks_tell() -> None:
    def ports(speed: int, address: str) -> list[Port]:
        return [Port("eth0", speed, (Endpoint(ipaddress.ip_interface(address), 1),))]

    made = Cluster.of([0, 1], [ports(1000, "10.0.0.1/24"), ports(0, "10.0.0.2/24")], ["a", "b"])
    assert made == Cluster((0, 1), (("eth0 1000 Mbit/s",), ("eth0",)))
    moved = Cluster.of([0, 1], [ports(1000, "10.9.0.1/24"), ports(0, "10.9.0.2/24")], ["a", "b"])
    assert moved.digest == made.digest  # addresses may change
    assert made.world_size == 2
    assert made.file_name != Cluster.of([0, 1], [[], []], ["a", "c"]).file_name


# ---- between ranks ----


def test_rows_travel_in_the_last_round() -> None:
    lanes = [LaneId(1, 0, 0)]
    sent = commit.Made.of(lanes, [], Table("/tmp/t.json", ROWS, memory=True))
    record = Record.unpack("rank 0", pack(sent.to_fields()))
    assert commit.Made.from_record(record, 2, 1) == sent
    record = Record.unpack("rank 0", pack(commit.Made.of(lanes, []).to_fields()))
    assert commit.Made.from_record(record, 2, 1).table is None


@pytest.mark.parametrize("memory", [False, True])
def test_a_table_of_other_memory_is_ignored_by_all(
    memory: bool, caplog: pytest.LogCaptureFixture
) -> None:
    table = Table("t.json", ROWS, memory)
    assert tuned.fitting(table, memory, 0) is table
    assert tuned.fitting(None, memory, 0) is None
    assert warnings(caplog) == []
    assert [tuned.fitting(table, not memory, rank) for rank in (0, 1)] == [None, None]
    (line,) = warnings(caplog)
    assert "t.json is ignored: it was measured" in line
    assert f"this job runs {'without' if memory else 'with'}" in line


def test_a_longest_table_with_an_odd_path_fits() -> None:
    rows = tuple(Row(2**62 + i, "one_shot") for i in range(tuned.MAX_ROWS))
    table = Table("/\x1b[31m\udcff\n/" + "ü" * 5000, rows)
    blob = pack(commit.Made.of([], [], table).to_fields())
    assert len(blob) < 8192
    read = commit.Made.from_record(Record.unpack("rank 0", blob), 2, 1).table
    assert read is not None
    assert read.rows == rows
    assert read.path.isprintable()


@pytest.mark.parametrize(
    "table",
    [
        1,
        [],
        {},
        {"path": "x", "memory": 0},
        {"path": 1, "memory": 0, "rows": []},
        {"path": "\x1b", "memory": 0, "rows": []},
        {"path": "x", "rows": []},
        {"path": "x", "memory": 2, "rows": []},
        {"path": "x", "memory": 0, "rows": [{"up_to": 1, "algorithm": "tree"}]},
        {"path": "x", "memory": 0, "rows": [{"up_to": 2, "algorithm": "ring"}] * 2},
        {"path": "x", "memory": 0, "rows": [{"up_to": -2, "algorithm": "ring"}]},
        {"path": "x", "memory": 0, "rows": [{"up_to": i, "algorithm": "ring"} for i in range(65)]},
    ],
)
def test_what_no_rank_0_sends_is_refused(table: Any) -> None:
    blob = pack({"links": [], "rows": [], "table": table})
    with pytest.raises(BootstrapError, match="rank 0"):
        commit.Made.from_record(Record.unpack("rank 0", blob), 2, 1)


def test_rows_say_as_the_core_does() -> None:
    assert [tuned.choose(ROWS, n) for n in (0, 1000, 1001, 5000, 5001, 2**40, 2**40 + 1)] == [
        "one_shot",
        "one_shot",
        "auto",
        "auto",
        "direct",
        "direct",
        "auto",
    ]
