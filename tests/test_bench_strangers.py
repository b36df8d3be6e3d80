"""bench/strangers.py: a start among strangers, measured, and nothing of it left."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"
sys.path.insert(0, str(BENCH))

import strangers  # noqa: E402
from trials import crowd  # noqa: E402


def test_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    wanted = ["--ranks", "2", "--rate", "200", "--rounds", "1", "--kinds", "hello"]
    assert strangers.main([*wanted, "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())
    assert (row["kind"], row["failed"], row["starts"], row["error"]) == ("hello", 0, 1, "")
    assert row["rate"] > 0
    assert row["lines"] >= 1  # somebody was turned away
    assert "| hello " in capsys.readouterr().out


def test_every_kind_says_what_it_is_called() -> None:
    said = {}
    for kind in crowd.KINDS:
        said[kind] = crowd.Crowd(kind, bytes(4), 2)._words()
    assert said["one byte"] == b"R"
    assert len(said["public bytes"]) == 10
    assert len(said["hello"]) == 128
    assert said["close"] == said["reset"] == said["silent"] == b""


def test_only_listeners_of_these_processes() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as ours:
        assert ours.getsockname()[1] in crowd.listeners_of([os.getpid()])
        assert crowd.listeners_of([]) == []


def test_unknown_kind() -> None:
    with pytest.raises(SystemExit):
        strangers.main(["--kinds", "friends"])
