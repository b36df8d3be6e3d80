"""Step of gpu_check.py: all-reduces of a GPU tensor from end to end, over links of known rates.

2 and 4 ranks on one GPU, each in a network namespace of its own whose ports are shaped. The floor
of a time is that of its legs, one after the other: to the host by PCIe, which all ranks share, over
the network, and back; and of the launches. Where there are no namespaces, or with the fake driver,
ranks meet on the loopback, and there are no goals.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.site import Site
from netlab import NetLabError, why_unavailable

from gpu_checks.arrays import why_no_torch
from gpu_checks.driver import Driver
from gpu_checks.probe import copy_rates
from gpu_checks.report import at_least, at_most, tell
from ringcomm.codecs import parse

HERE = Path(__file__).resolve().parent
CODECS = ("none", "bf16", "int8", "onebit")
LINKS = ([10_000.0], [10_000.0, 10_000.0])
WORLDS = (2, 4)
BYTES = 100_000_000
GOALS = {"onebit": 1.10}  # times the floor; others:
GOAL = 1.05
GLOO_GOAL = 1.5
PAYLOAD = 1448 / 1514  # of what a port carries, by TCP
LAUNCHES_S = 60e-6


def wire_s(codec: str, nbytes: int, world: int, mbits: list[float]) -> float:
    """Seconds that a rank's bytes take on its ports."""
    sent = nbytes / 4 * parse(codec).bits / 8 * 2 * (world - 1) / world
    return sent * 8 / (sum(mbits) * 1e6 * PAYLOAD)


def floor_s(codec: str, nbytes: int, world: int, mbits: list[float], pcie: float) -> float:
    """Seconds that no all-reduce can be shorter than; pcie: bytes per second, one way. With error
    feedback the CPU packs, so floats cross the bus."""
    bits = 32 if parse(codec).needs_feedback else parse(codec).bits
    bus = world * nbytes / 4 * bits / 8 / pcie
    return wire_s(codec, nbytes, world, mbits) + 2 * bus + LAUNCHES_S


def lines_of(
    site: Site, program: str, asked: Mapping[str, Any], env: Mapping[str, str], limit: float
) -> list[dict[str, Any]]:
    """What rank 0 of a job prints. Raises RuntimeError with what a job that fails said."""
    ended = site.run([sys.executable, str(HERE / program), json.dumps(asked)], env, limit)
    if ended.code:
        print(ended.output)  # for the step's log
    return ended.records()


def name_of(mbits: list[float], world: int) -> str:
    ports = f"{len(mbits)} x " if len(mbits) > 1 else ""
    return f"{world} ranks, {ports}{mbits[0] / 1000:g} Gbit/s" if mbits else f"{world} ranks"


def shaped(
    world: int, mbits: list[float], pcie: float, calls: int, found: dict[str, float]
) -> None:
    """All checks of one kind of links; times go to found."""
    name = name_of(mbits, world)
    with Site(world, world, mbits) as site:
        _bare_streams(site, name, mbits)
        asked = {"bytes": BYTES, "codecs": CODECS, "calls": calls}
        for one in lines_of(site, "link_rank.py", asked, {}, 60):
            codec, took = one["codec"], one["seconds"]
            found[f"{name}, {codec}"] = took
            floor = floor_s(codec, BYTES, world, mbits, pcie)
            goal = GOALS.get(codec, GOAL)
            verdict = at_most(took / floor, goal) if one["same"] else "wrong"
            tell(
                f"{name}, {codec}",
                verdict,
                f"{took * 1e3:.1f} ms, {took / floor:.3f} x floor",
                f"{goal:.2f} x",
                "" if one["same"] else "of others bits than a host tensor",
            )
        if mbits == LINKS[0]:
            _gloo(site, name, calls, found[f"{name}, none"])


def _bare_streams(site: Site, name: str, mbits: list[float]) -> None:
    """What the links carry without any library: whether a floor can be reached at all."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "physical.json")
        command = [
            sys.executable,
            str(HERE.parent / "measure/physical.py"),
            "--seconds",
            "1",
            "--json",
            str(path),
            "--congestion",
            site.congestion,
        ]
        ended = site.run(command, {}, 20)
        if ended.code:
            tell(f"{name}, bare TCP", "skipped", why=ended.reason())
            return
        rate = json.loads(path.read_text())["stream"]
    share = rate * 8e3 / (sum(mbits) * PAYLOAD)
    tell(
        f"{name}, bare TCP",
        at_least(share, 0.97),
        f"{100 * share:.1f} % of the line",
        "97 %",
        f"all ranks at once; {site.congestion}",
    )


def _gloo(site: Site, name: str, calls: int, ours: float) -> None:
    why = why_no_torch()
    if why:
        tell(f"{name}, gloo", "skipped", why=why)
        return
    asked = {"backend": "gloo", "bytes": BYTES, "calls": max(2, calls - 2), "device": "cuda"}
    env = {"GLOO_SOCKET_IFNAME": site.interfaces[0]}
    try:
        (one,) = lines_of(site, "torch_rank.py", asked, env, 45)
    except (RuntimeError, ValueError) as error:
        tell(f"{name}, gloo", "skipped", why=f"it failed: {error}")
        return
    ratio = one["seconds"] / ours
    verdict = at_least(ratio, GLOO_GOAL) if one["right"] else "skipped"
    tell(
        f"{name}, none, beside gloo",
        verdict,
        f"{ratio:.2f} x its speed",
        f"{GLOO_GOAL} x",
        f"gloo takes {one['seconds'] * 1e3:.1f} ms" + ("" if one["right"] else ", and is wrong"),
    )


def unshaped(options: argparse.Namespace, why: str) -> None:
    """On the loopback: results, and times without goals."""
    small = options.fake or options.quick
    for world in WORLDS:
        asked = {"bytes": 400_000 if small else BYTES, "codecs": CODECS, "calls": 2}
        with Site(0, world) as site:
            for one in lines_of(site, "link_rank.py", asked, {"RINGCOMM_SHARED_MEMORY": "0"}, 60):
                tell(
                    f"{name_of([], world)}, loopback, {one['codec']}",
                    "ok" if one["same"] else "wrong",
                    f"{one['seconds'] * 1e3:.1f} ms",
                    why="" if one["same"] else "of others bits than a host tensor",
                )
    tell("shaped links", "skipped", why=why)


def run(options: argparse.Namespace) -> None:
    why = "fake driver" if options.fake else why_unavailable()
    if why:
        unshaped(options, why)
        return
    pcie = min(copy_rates(Driver())[:2])
    tell("floor", "ok", f"PCIe {pcie / 1e9:.1f} GB/s for all ranks", why="the slower way, pinned")
    found: dict[str, float] = {}
    calls = 3 if options.quick else 7
    for mbits in LINKS:
        for world in WORLDS:
            try:
                shaped(world, mbits, pcie, calls, found)
            except NetLabError as error:
                unshaped(options, str(error))
                return
            except RuntimeError as error:
                tell(name_of(mbits, world), "wrong", why=str(error))
    Path(options.folder, "links.json").write_text(json.dumps(found), encoding="utf-8")
