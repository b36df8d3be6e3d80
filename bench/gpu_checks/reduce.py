"""Step of gpu_check.py: all-reduces of GPU tensors have the bits of host tensors' all-reduces.

2, 3 and 4 ranks on one GPU, as threads of one process that are joined by TCP on the loopback; every
dtype, and by every codec float32 and float64, for two steps with what was left of the first. The
host's all-reduce is held to a reference of its own by the tests.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from gpu_checks.driver import Array, Driver
from gpu_checks.report import tell

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from ringcomm import Communicator, Config, ErrorFeedback  # noqa: E402

HALVES = ("bf16", "fp16")
CODECS = (*HALVES, "int8", "fp8", "int4", "onebit")


def differs(comm: Communicator, driver: Driver, dtype: str, codec: str | None, count: int) -> str:
    """Two steps of one codec on one dtype; what differs, in words."""
    import tensors

    rank = comm.rank
    feedbacks: list[Any] = [None, None]
    if codec is not None and codec not in HALVES:
        feedbacks = [ErrorFeedback(), ErrorFeedback()]
    for step in range(2 if codec else 1):
        values = tensors.elements(dtype, count, rank, step)
        if codec in (None, *HALVES):
            values[:100] = tensors.special(dtype, min(100, count), rank)
        host = values.copy()
        array = Array.of(driver, values, dtype, driver.stream())
        there: Any = tensors.tensor(host, dtype) if dtype == "bf16" else host
        for tensor, feedback in zip((array, there), feedbacks, strict=True):
            comm.allreduce(tensor, compression=codec, feedback=feedback)
        if array.read().tobytes() != host.tobytes():
            return f"{dtype} by {codec or 'no codec'}, {count} elements, step {step + 1}"
    return ""


def run(options: argparse.Namespace) -> None:
    from ranks import run_ranks
    from reference import NUMPY

    small = options.fake or options.quick
    plain = [dtype for dtype in NUMPY if dtype != "bf16" or _has_torch()]
    cases: list[tuple[str, str | None]] = [(dtype, None) for dtype in plain]
    cases += [(dtype, codec) for codec in CODECS for dtype in ("f32", "f64")]
    driver = Driver()
    by_links = Config(timeout=50.0, shared_memory=False)  # or the GPU would pack nothing
    for world in (2, 3, 4):
        counts = [3001] if small else [1, 3001, 1 << 20]

        def body(comm: Communicator, counts: list[int] = counts) -> list[str]:
            found = [
                differs(comm, driver, dtype, codec, count)
                for dtype, codec in cases
                for count in counts
            ]
            return [why for why in found if why]

        with np.errstate(all="ignore"):
            found = [
                why
                for rank in run_ranks(world, body, timeout=50.0, config=by_links)
                for why in rank
            ]
        tell(
            f"all-reduce, {world} ranks",
            "wrong" if found else "ok",
            f"{len(cases) * len(counts)} tensors",
            "",
            f"of others bits: {found[0]}" if found else "",
        )


def _has_torch() -> bool:
    import importlib.util

    return importlib.util.find_spec("torch") is not None
