"""bench/sources/topologies.py: the parameter server's sums, what rows say, and a tiny run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from beside import Done
from ranks import run_ranks

from ringcomm import Communicator

BENCH = Path(__file__).resolve().parent.parent / "bench"
sys.path.insert(0, str(BENCH))

from netlab import why_unavailable  # noqa: E402
from report.rows import Rows  # noqa: E402
from sources import _topology_rank as rank  # noqa: E402
from sources import topologies  # noqa: E402
from sources.topologies import WAYS  # noqa: E402


@pytest.mark.parametrize(("servers", "window"), [([3], 1), ([3, 4], 50), ([1, 3, 4], 3)])
def test_what_workers_pull_is_the_sum(servers: list[int], window: int) -> None:
    """1,000 elements in pieces of 64, none of which divides into the shards."""
    workers = [each for each in range(5) if each not in servers]
    asked = {
        "elements": 1000,
        "piece": 64,
        "window": window,
        "workers": workers,
        "servers": servers,
    }

    def body(comm: Communicator) -> np.ndarray:
        gradient = np.arange(1000, dtype=np.float32) * (comm.rank + 1)
        out = np.zeros_like(gradient)
        step = rank.step_of(comm, asked, gradient, out)
        step()
        step()  # a second one after what the first has left
        return out

    made = run_ranks(5, body)
    want = np.arange(1000) * sum(worker + 1 for worker in workers)
    for worker in workers:
        np.testing.assert_array_equal(made[worker], want)


@pytest.mark.parametrize(
    ("way", "shares"),
    [
        ("one server", (4, 8)),
        ("two servers", (2, 4)),
        ("a server on every host", (1.5, 1.75)),
        ("ring", (1.5, 1.75)),
        ("ring, 2 ranks per host", (1.75, 1.875)),
        ("direct, 2 ranks per host", (3, 3.5)),
        ("hierarchical, 2 ranks per host", (1.5, 1.75)),
    ],
)
def test_what_the_formulas_say(way: str, shares: tuple[float, float]) -> None:
    assert tuple(WAYS[way].share(hosts) for hosts in (4, 8)) == shares


def rows(slower: Callable[[str], float] = lambda way: 1.0) -> dict[str, Any]:
    """Every port as its formula says with 1 % of headers, and steps as long as that takes."""
    made = {}
    for point in topologies.points(False):
        hosts, way = point.settings["hosts"], WAYS[point.settings["way"]]
        share = way.share(hosts)
        ports = [1.01 * min(share, 1.0 if way.servers else share)] * hosts
        ports += [1.01 * share] * way.servers
        made[point.name] = {
            "name": point.name,
            "settings": dict(point.settings),
            "date": "2026-01-01",
            "cpu": "a CPU",
            "torch": "",
            "sent": ports,
            "received": ports,
            "step_s": share * slower(point.settings["way"]),
        }
    return made


def test_claims_are_met_and_missed() -> None:
    made = topologies.claims(rows())
    assert [claim.verdict for claim in made] == ["met"] * 7
    assert (made[0].ours, made[2].ours, made[5].ours) == ("8.080", "1.768", "4.57")
    late = topologies.claims(rows(lambda way: 1.2 if way == "one server" else 1.0))
    assert [claim.verdict for claim in late] == ["met"] * 5 + ["short", "met"]
    more = rows()
    more["8 hosts: ring"]["received"][3] = 2.0
    assert topologies.claims(more)[2].verdict == "short"


@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
@pytest.mark.beside(
    "{python}",
    str(BENCH / "results.py"),
    "topologies",
    "--quick",
    "--only",
    "server",
    "--rows",
    "{folder}/rows",
)
def test_a_tiny_run(beside: Done) -> None:
    """What the kernel counts at the ports; its times are for a quiet machine."""
    assert beside.code == 0, beside.output
    taken = {row["settings"]["way"]: row for row in Rows(beside.folder / "rows")}
    for way in ("one server", "two servers", "a server on every host"):
        host, share = topologies.busiest(taken[way])
        assert share == pytest.approx(WAYS[way].share(3), rel=0.2)
        assert (host >= 3) == (way != "a server on every host")
