"""Step of gpu_check.py: DDP steps on a GPU by torch, with ringcomm's hook and bf16 on the wire.

Two ranks on one GPU and a shaped port of 10 Gbit/s each; compute takes about twice as long as the
gradients take on the wire. The bound of a step is what DDP can do, which exchanges nothing in
forward.
"""

from __future__ import annotations

import argparse
from typing import Any

from lab.site import Site
from netlab import NetLabError, why_unavailable

from gpu_checks.arrays import why_no_torch
from gpu_checks.links import lines_of, wire_s
from gpu_checks.report import at_most, tell

CODEC, WORLD, MBITS = "bf16", 2, [10_000.0]
WIDTH, LAYERS = 1250, 16
GOAL = 1.10
ERROR = 0.01  # relative, of a gradient by bf16


def verdict(one: dict[str, Any], wire: float) -> tuple[str, str, str]:
    """(verdict, measured, why)"""
    if not one["same"]:
        return "wrong", "", "a gradient differs between ranks"
    if not one["error"] <= ERROR:
        return "wrong", "", f"a gradient is off by {one['error']:.3g}"
    bound = max(one["compute_s"], one["forward_s"] + wire)
    measured = (
        f"{one['step_s'] * 1e3:.1f} ms, {one['step_s'] / bound:.3f} x the bound, "
        f"{one['step_s'] / one['compute_s']:.3f} x compute"
    )
    why = (
        f"compute {one['compute_s'] * 1e3:.1f} ms (forward {one['forward_s'] * 1e3:.1f}), wire "
        f"{wire * 1e3:.1f} ms, batch {one['batch']}"
    )
    return at_most(one["step_s"] / bound, GOAL), measured, why


def run(options: argparse.Namespace) -> None:
    why = "fake driver" if options.fake else why_no_torch() or why_unavailable()
    if why:
        tell("DDP", "skipped", why=why)
        return
    wire = wire_s(CODEC, 4 * LAYERS * WIDTH * WIDTH, WORLD, MBITS)
    asked = {
        "device": "cuda",
        "width": WIDTH,
        "layers": LAYERS,
        "codec": CODEC,
        "steps": 7,
        "target_s": 2 * wire,
        "bucket_mb": 5,
    }
    name = f"DDP step, {WORLD} ranks, 10 Gbit/s, {CODEC}"
    try:
        with Site(WORLD, WORLD, MBITS) as site:
            (one,) = lines_of(site, "train_rank.py", asked, {}, 50)
    except NetLabError as error:
        tell(name, "skipped", why=str(error))
    except (RuntimeError, ValueError) as error:
        tell(name, "wrong", why=str(error))
    else:
        found, measured, about = verdict(one, wire)
        tell(name, found, measured, f"{GOAL:.2f} x the bound", about)
