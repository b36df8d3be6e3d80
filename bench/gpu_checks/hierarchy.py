"""Step of gpu_check.py: HierarchicalState on a GPU, two emulated hosts of two ranks each.

All four ranks share the GPU. A host is a network namespace, or on the loopback just a pair. Inside
a host ranks are joined by ringcomm's backend, which needs nothing; and by NCCL, under the terms of
the step nccl: each rank another host to it, over sockets, and an MPS daemon. With the fake driver
the same program runs on host tensors.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.site import Site
from netlab import NetLabError, why_unavailable

from gpu_checks.arrays import why_no_torch
from gpu_checks.nccl import SETTINGS, private_mps, why_no_nccl
from gpu_checks.report import tell

RANK = Path(__file__).with_name("hierarchy_rank.py")
HOSTS, WORLD, MBITS = 2, 4, [10_000.0]
ERRORS = {"none": 1e-6, "bf16": 0.01, "int8": 0.05}
"""Of all gradients together, relative; by codec."""
SHAPE = {"width": 512, "layers": 8, "bucket_mb": 1, "steps": 7}
SMALL = {"width": 256, "layers": 4, "bucket_mb": 0.2, "steps": 2}
LIMIT_S = 70


def verdict(one: Mapping[str, Any]) -> tuple[str, str]:
    """(verdict, why) of what a rank told of a codec."""
    if not one["same"]:
        return "wrong", "gradients differ between ranks"
    if not one["error"] <= ERRORS[one["codec"]]:
        return "wrong", f"gradients are off by {one['error']:.3g}"
    return "ok", f"off by {one['error']:.2g}"


def check(site: Site, where: str, asked: Mapping[str, Any], env: Mapping[str, str]) -> None:
    """All codecs by one kind of local group."""
    local = asked["local"]
    ended = site.run([sys.executable, str(RANK), json.dumps(asked)], env, LIMIT_S)
    told = [json.loads(line) for line in ended.output.splitlines() if line[:1] == "{"]
    for one in told[1:]:
        found, why = verdict(one)
        tell(
            f"local group {local}, {one['codec']}",
            found,
            f"{one['step_s'] * 1e3:.1f} ms a step",
            why=f"{why}; {where}",
        )
    if ended.code:
        print(ended.output)  # for the step's log
        lost = "skipped" if local == "nccl" and not told else "wrong"  # NCCL will not have it
        tell(f"local group {local}", lost, why=f"{ended.reason()}; {where}")


def by_nccl(site: Site, where: str, asked: Mapping[str, Any], env: Mapping[str, str]) -> None:
    why = why_no_nccl()
    if why:
        tell("local group nccl", "skipped", why=why)
        return
    with private_mps() as mps:
        settings = {**env, **SETTINGS, **mps, "NCCL_SOCKET_IFNAME": "lo"}
        check(site, where, {**asked, "local": "nccl"}, settings)


def run(options: argparse.Namespace) -> None:
    has_torch = importlib.util.find_spec("torch") is not None
    device = "cpu" if options.fake else "cuda"
    why = why_no_torch() if device == "cuda" else None if has_torch else "no torch"
    if why:
        tell("HierarchicalState", "skipped", why=why)
        return
    shape = SMALL if options.fake or options.quick else SHAPE
    asked = {"device": device, "local": "ringcomm", "hosts": HOSTS, "codecs": list(ERRORS), **shape}
    apart = not options.fake and why_unavailable() is None
    where = f"{HOSTS} hosts of {WORLD // HOSTS} ranks, " + (
        "a namespace each" if apart else f"{'host tensors, ' if options.fake else ''}loopback"
    )
    env = {} if apart else {"RINGCOMM_SHARED_MEMORY": "0"}
    try:
        with Site(HOSTS, WORLD, MBITS) if apart else Site(0, WORLD) as site:
            if options.fake:
                check(site, where, asked, env)
                tell("GPU tensors", "skipped", why="fake driver")
                return
            check(site, where, asked, env)
            by_nccl(site, where, asked, env)
    except (NetLabError, RuntimeError) as error:
        tell("HierarchicalState", "skipped", why=str(error))
