"""topologies: where the bottleneck of a step sits, port by port, when a gradient goes by way of
parameter servers, around a ring, directly, or through each host first (Lambda's slides).

A step exchanges the gradient and nothing else. N workers have a host each, or two ranks share each
of N hosts. Shares are in gradients: what a port sends or receives in a step over the gradient's
bytes. The busiest port's share over the port's rate is the least that a step can take.

    one server, its own host        N               it takes N gradients in and gives N sums out
    k servers, a host each          N/k, at least 1 a worker's port carries the gradient once
    a server on every worker's host 2(N-1)/N        as ring and direct: the shards are its chunks
    ring, direct                    2(N-1)/N
    two ranks per host: ring        2(2N-1)/2N      one hop of two crosses a port
                        direct      4(N-1)/N        each rank sends to all other hosts by itself
                        hierarchical 2(N-1)/N       joined on the host first

The parameter server is no straw man: see _topology_rank.py. Workers keep a few pieces under way to
each server and no more; else they overflow its port (incast), and one falls behind the others.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.site import Site

from .source import Claim, Found, Point

DOCUMENT = (
    "Distributed Training: A Gentle Introduction (Lambda's slides): a parameter server needs much "
    "bandwidth and a host; several share it; ring all-reduce needs neither. They have no figures."
)
REAL = "sums, and each port's bytes as the kernel counts them."
EMULATED = (
    "links (200 Mbit/s), 8 workers. The gradient is a tenth of ResNet-50's; steps have no compute."
)
WITHOUT_ROOT = "bench/sweep.py under torchrun times all-reduces on the loopback"
HARNESS = 1

HOSTS = (4, 8)
MBIT = 200.0
GOODPUT = 1448 / 1514  # of a port's rate, in payload of TCP
ELEMENTS = 2_560_000
STEPS = 5
PIECE, WINDOW = 16_384, 3  # elements of a piece, and pieces under way from a worker to a server
WITHIN_BYTES, WITHIN_TIME = 0.03, 0.10
RANK = Path(__file__).with_name("_topology_rank.py")


@dataclasses.dataclass(frozen=True)
class Way:
    """A topology.

    Attributes:
        share: of its busiest port, by the number of worker hosts.
        algorithm: of the all-reduce.
        servers: of their own, each on a host of its own.
        everywhere: a server beside the worker on every host.
        ranks: workers per host.
        shared: whether those of a host meet in memory.
    """

    share: Callable[[int], float]
    algorithm: str = "auto"
    servers: int = 0
    everywhere: bool = False
    ranks: int = 1
    shared: bool = False


def _ring(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


WAYS: Mapping[str, Way] = {
    "one server": Way(float, servers=1),
    "two servers": Way(lambda n: max(n / 2, 1.0), servers=2),
    "a server on every host": Way(_ring, everywhere=True),
    "ring": Way(_ring, algorithm="ring"),
    "direct": Way(_ring, algorithm="direct"),
    "ring, 2 ranks per host": Way(lambda n: _ring(2 * n), algorithm="ring", ranks=2),
    "direct, 2 ranks per host": Way(lambda n: 2 * _ring(n), algorithm="direct", ranks=2),
    "hierarchical, 2 ranks per host": Way(_ring, ranks=2, shared=True),
}


def points(quick: bool) -> list[Point]:
    """Each topology on each number of worker hosts."""
    size = {"elements": ELEMENTS, "steps": STEPS, "mbit": MBIT, "piece": PIECE, "window": WINDOW}
    if quick:
        size = {**size, "elements": 64_000, "steps": 1}
    return [_point(hosts, way, size) for hosts in ((3,) if quick else HOSTS) for way in WAYS]


def _point(hosts: int, way: str, size: Mapping[str, Any]) -> Point:
    return Point(f"{hosts} hosts: {way}", {"hosts": hosts, "way": way, **size}, MBIT)


# --- measuring ---


def roles(way: Way, hosts: int) -> tuple[int, list[int], list[int]]:
    """Ranks per host, and the ranks that are workers and servers."""
    if way.everywhere:
        return 2, list(range(0, 2 * hosts, 2)), list(range(1, 2 * hosts, 2))
    workers = hosts * way.ranks
    return way.ranks, list(range(workers)), list(range(workers, workers + way.servers))


def measure(point: Point) -> dict[str, Any]:
    """One topology: its ports' shares and the time of a step."""
    asked = point.settings
    way, hosts = WAYS[asked["way"]], asked["hosts"] + WAYS[asked["way"]].servers
    per_host, workers, servers = roles(way, asked["hosts"])
    command = {
        **asked,
        "algorithm": way.algorithm,
        "shared_memory": way.shared,
        "workers": workers,
        "servers": servers,
    }
    with Site(hosts, hosts * per_host, [asked["mbit"]]) as site:
        print(f"# {site.describe()}", flush=True)
        ended = site.run([sys.executable, str(RANK), json.dumps(command)], {}, 300)
    (told,) = (record for record in ended.records() if "received" in record)
    if told["wrong"]:
        raise RuntimeError(f"{told['wrong']} elements of the sums are wrong")
    total = asked["elements"] * 4 * asked["steps"]
    return {
        "step_s": statistics.median(told["times"]),
        "times": told["times"],
        **{
            name: [count / total for count in told[name][::per_host]]
            for name in ("sent", "received")
        },
    }


# --- what the rows say ---


def busiest(row: Mapping[str, Any]) -> tuple[int, float]:
    """The busiest port's host and share, of the direction that carries more."""
    shares = [*map(max, row["sent"], row["received"])]
    host = max(range(len(shares)), key=shares.__getitem__)
    return host, shares[host]


def share_of(row: Mapping[str, Any]) -> float:
    """What the formula says of the busiest port."""
    settings = row["settings"]
    return WAYS[settings["way"]].share(settings["hosts"])


def used(row: Mapping[str, Any]) -> float:
    """How much of the busiest port's rate the step's median time uses, by the formula's bytes."""
    settings = row["settings"]
    least_s = share_of(row) * settings["elements"] * 32 / (settings["mbit"] * 1e6 * GOODPUT)
    return least_s / float(row["step_s"])


def by_hosts(found: Found) -> dict[int, dict[str, Mapping[str, Any]]]:
    """The rows by number of worker hosts and topology, each in order."""
    sizes = sorted({row["settings"]["hosts"] for row in found.values()})
    every = {(row["settings"]["hosts"], row["settings"]["way"]): row for row in found.values()}
    return {
        hosts: {way: every[hosts, way] for way in WAYS if (hosts, way) in every} for hosts in sizes
    }


def claims(found: Found) -> list[Claim]:
    """Of the largest number of hosts."""
    hosts, ways = max(by_hosts(found).items(), default=(max(HOSTS), {}))
    made = [
        _carried(ways, hosts, way)
        for way in ("one server", "two servers", "ring", "direct", "hierarchical, 2 ranks per host")
    ]
    return [*made, *(_slower(ways, hosts, way) for way in ("one server", "two servers"))]


def _carried(ways: Mapping[str, Mapping[str, Any]], hosts: int, way: str) -> Claim:
    share = WAYS[way].share(hosts)
    ours = busiest(ways[way])[1] if way in ways else None
    return Claim(
        f"{way}, gradients by the busiest port",
        "-",
        "" if ours is None else f"{ours:.3f}",
        f"{share:.3f} within {100 * WITHIN_BYTES:.0f} %",
        None if ours is None else abs(ours / share - 1) <= WITHIN_BYTES,
    )


def _slower(ways: Mapping[str, Mapping[str, Any]], hosts: int, way: str) -> Claim:
    want = WAYS[way].share(hosts) / WAYS["ring"].share(hosts)
    both = way in ways and "ring" in ways
    ours = ways[way]["step_s"] / ways["ring"]["step_s"] if both else None
    return Claim(
        f"{way}, step over the ring's",
        "-",
        "" if ours is None else f"{ours:.2f}",
        f"{want:.2f} by its port, within {100 * WITHIN_TIME:.0f} %",
        None if ours is None else abs(ours / want - 1) <= WITHIN_TIME,
    )


def _whose(row: Mapping[str, Any]) -> str:
    host, share = busiest(row)
    if min(map(max, row["sent"], row["received"])) > (1 - WITHIN_BYTES) * share:
        return "all alike"
    return "a server's" if host >= row["settings"]["hosts"] else f"host {host}'s"


HEADS = (
    "hosts",
    "topology",
    "busiest port",
    "sends",
    "receives",
    "formula",
    "other ports",
    "step",
    "x ring",
    "formula",
    "port used",
)


def table(found: Found) -> list[Sequence[str]]:
    """A line for each topology; shares in gradients."""
    lines: list[Sequence[str]] = [HEADS]
    for hosts, ways in by_hosts(found).items():
        for way, row in ways.items():
            host, _ = busiest(row)
            shares = [*map(max, row["sent"], row["received"])]
            others = shares[:host] + shares[host + 1 :]
            over = row["step_s"] / ways["ring"]["step_s"] if "ring" in ways else None
            lines.append(
                (
                    str(hosts) + (f" + {WAYS[way].servers}" if WAYS[way].servers else ""),
                    way,
                    _whose(row),
                    f"{row['sent'][host]:.3f}",
                    f"{row['received'][host]:.3f}",
                    f"{share_of(row):.3f}",
                    f"{min(others):.2f}-{max(others):.2f}",
                    f"{row['step_s']:.3f} s",
                    "-" if over is None else f"{over:.2f}",
                    f"{share_of(row) / WAYS['ring'].share(hosts):.2f}",
                    f"{100 * used(row):.0f} %",
                )
            )
    return lines


def draw(found: Found, figure: Any) -> None:
    """Every port of every topology on the largest number of hosts, and the step's time."""
    hosts, ways = max(by_hosts(found).items(), default=(0, {}))
    left, right = figure.subplots(1, 2, width_ratios=[3, 1], sharey=True)
    figure.suptitle(
        f"What each port carries in a step, and how long the step takes: {hosts} hosts with workers"
    )
    for place, row in enumerate(ways.values()):
        ports = [*map(max, row["sent"], row["received"])]
        height = 0.8 / len(ports)
        spots = [place - 0.4 + height * (number + 0.5) for number in range(len(ports))]
        colors = ["tab:red" if number >= hosts else "tab:blue" for number in range(len(ports))]
        left.barh(spots, ports, height * 0.85, color=colors)
        left.plot([share_of(row)] * 2, [place - 0.45, place + 0.45], color="black", linewidth=1)
        if "ring" in ways:
            right.barh(place, row["step_s"] / ways["ring"]["step_s"], 0.7, color="tab:gray")
            predicted = share_of(row) / WAYS["ring"].share(hosts)
            right.plot([predicted] * 2, [place - 0.4, place + 0.4], color="black", linewidth=1)
    left.set_yticks(range(len(ways)), list(ways), fontsize=8)
    left.invert_yaxis()
    left.set_xlabel(
        "gradients each way: a bar for each host's port, red where it is a server's; line: formula",
        fontsize=8,
    )
    right.set_xlabel("step over the ring's; line: formula", fontsize=8)
