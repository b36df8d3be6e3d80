"""FSDP2 with compressed exchanges: the weights of plain FSDP2 where nothing is rounded, near them
where something is, the same on all ranks, in fewer bytes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

from ranks import run_processes
from torch_versions import before

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(before(2, 13), reason="compress() is for PyTorch 2.13 and later"),
]
STEPS = 6  # of fsdp_ranks.py
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "RINGCOMM_INTERFACES": "lo", "OMP_NUM_THREADS": "1"}


def told(ranks: int, function: str, **env: str) -> list[list[dict[str, Any]]]:
    code = f"import sys; sys.path.insert(0, 'tests'); import fsdp_ranks; fsdp_ranks.{function}()"
    finished = run_processes(ranks, code, env={**LOOPBACK, **env})
    return [[json.loads(line) for line in one.stdout.splitlines()] for one in finished]


def test_shards_over_all_ranks() -> None:
    for events in told(3, "over_all_ranks"):
        exact, rounded, narrow = events
        assert all(event["alike"] for event in events)
        assert exact["distance"] <= 1e-5
        assert exact["rounded"] == 0
        assert 1e-6 < rounded["distance"] <= 0.03
        assert 1e-6 < rounded["rounded"] <= 0.1
        assert narrow["distance"] <= 0.1
        # Of weights, twice, and gradients two thirds leave a rank, in 4 bytes, or 1 and a scale.
        sent = STEPS * 3 * 2 / 3 * exact["count"]
        assert 4 * sent <= exact["carried"] <= 4.2 * sent
        assert sent <= rounded["carried"] <= 1.1 * sent
        assert sent <= narrow["carried"] <= 1.1 * sent


@pytest.mark.parametrize(
    ("ranks", "function", "ways"),
    [(4, "in_smaller_groups", 1), (2, "in_other_ways", 3)],
    ids=["smaller groups", "factors and accumulation"],
)
def test_other_ways_of_fsdp(ranks: int, function: str, ways: int) -> None:
    for events in told(ranks, function):
        assert len(events) == ways
        for event in events:
            assert event["alike"], event
            assert event["exact"] <= 1e-5, event
            assert 1e-6 < event["rounded"] <= 0.1, event


def test_a_host_shards_and_the_hosts_average() -> None:
    for exact, rounded, resumed in told(4, "across_hosts"):
        assert exact["alike"]
        assert rounded["alike"]
        assert exact["distance"] <= 1e-5
        assert 1e-6 < rounded["distance"] <= 0.2
        assert exact["residuals"] == 0
        assert rounded["residuals"] == 4 - 1  # the model itself has no parameter of its own
        assert resumed["same"]
        assert not resumed["without"]


def test_a_checkpoint_of_two_ranks_is_read_by_three(tmp_path: Path) -> None:
    told(2, "write_checkpoint", FOLDER=str(tmp_path))
    for (event,) in told(3, "read_checkpoint", FOLDER=str(tmp_path)):
        assert event == {"same": True, "finite": True}


def test_what_is_refused() -> None:
    assert told(2, "refused") == [[{"ended": True}]] * 2
