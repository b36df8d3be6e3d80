"""Step of gpu_check.py: how fast kernels are, beside a copy on the GPU of as many bytes.

Traffic is what is read and written, the wire's bytes included. Tensors are more than four times
the GPU's cache. Each measurement is of a copy and a kernel by turns, in batches that are long
beside the launch of one, and a ratio is that of such a pair.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gpu_checks.driver import L2_BYTES, PTX, Driver
from gpu_checks.exact import BLOCKS, HALVES, payload_bytes
from gpu_checks.report import at_least, tell

ELEMENTWISE, OF_BLOCKS = 0.80, 0.70  # of the copy's bandwidth
PAIRS = 7
BATCH_S = 0.004
GRIDS = (1024, 2048, 4096, 512)  # the first is the pipe's, and is judged


class Memory:
    """Device memory for all kernels of n elements."""

    def __init__(self, driver: Driver, n: int) -> None:
        self.n = n
        names = ("src", "dst", "wire", "from", "to")
        sizes = (4 * n, 4 * n, 3 * n, 8 * n, 8 * n)
        self.at = {name: driver.alloc(size) for name, size in zip(names, sizes, strict=True)}
        random = np.random.default_rng(3)
        some = random.standard_normal(1 << 20, np.float32)
        driver.put(self.at["src"], np.resize(some, n))
        driver.put(self.at["wire"], np.zeros(3 * n, np.uint8))


def cases(memory: Memory) -> list[tuple[str, str, list[Any], float, float]]:
    """(title, kernel, arguments, bytes moved, goal)"""
    n, at = memory.n, memory.at
    src, dst, wire = (at[k] for k in ("src", "dst", "wire"))
    found: list[tuple[str, str, list[Any], float, float]] = []
    for codec in HALVES:
        found.append((f"pack {codec}", f"pack_{codec}", [wire, src, 1.0, n], 6.0 * n, ELEMENTWISE))
        found.append((f"unpack {codec}", f"unpack_{codec}", [dst, wire, n], 6.0 * n, ELEMENTWISE))
    found.append(("scale", "scale", [dst, src, 0.5, n], 8.0 * n, ELEMENTWISE))
    segment = 1 << 16
    for codec in BLOCKS:
        size = payload_bytes(codec, segment)
        last = [n, segment, size]
        sent = float(size * (n // segment))
        found.append(
            (f"pack {codec}", f"pack_{codec}", [wire, src, *last], 4.0 * n + sent, OF_BLOCKS)
        )
        found.append(
            (f"unpack {codec}", f"unpack_{codec}", [dst, wire, *last], 4.0 * n + sent, OF_BLOCKS)
        )
        found.append(
            (
                f"add {codec}",
                f"add_{codec}",
                [dst, wire, int(sent), 0.5, *last],
                4.0 * n + 2 * sent,
                OF_BLOCKS,
            )
        )
    return found


def seconds(driver: Driver, call: Callable[[], None], repeats: int) -> float:
    """Of one call, of so many in succession."""
    driver.wait()
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    driver.wait()
    return (time.perf_counter() - began) / repeats


def ratio(driver: Driver, memory: Memory, call: Callable[[], None], moved: float) -> list[float]:
    """(seconds of a call, of a copy, ratio of copy to call), medians."""
    half = int(moved / 2) // 16 * 16
    source, target = memory.at["from"], memory.at["to"]

    def copy() -> None:
        driver.copy("DtoD", target, source, half)

    once = max(seconds(driver, call, 2), 1e-6)
    repeats = max(4, min(200, int(BATCH_S / once)))
    pairs = []
    for _ in range(PAIRS):
        copied = seconds(driver, copy, repeats) * moved / (2 * half)
        taken = seconds(driver, call, repeats)
        pairs.append((taken, copied, copied / taken))
    return [statistics.median(column) for column in zip(*pairs, strict=True)]


def measure(driver: Driver, memory: Memory, grids: Sequence[int] = GRIDS) -> None:
    for title, kernel, arguments, moved, goal in cases(memory):
        found = {}
        for blocks in grids:
            call = driver.prepared(kernel, arguments, blocks=blocks)
            found[blocks] = ratio(driver, memory, call, moved)
        taken, _, share = found[grids[0]]
        best = max(found, key=lambda blocks: found[blocks][2])
        others = "" if best == grids[0] else f"; {100 * found[best][2]:.0f} % by {best} blocks"
        tell(
            title,
            at_least(share, goal),
            f"{100 * share:.0f} % of a copy",
            f"{100 * goal:.0f} %",
            f"{moved / taken / 1e9:.0f} GB/s, {taken * 1e6:.0f} us{others}",
        )


def run(options: argparse.Namespace) -> None:
    if options.fake:
        tell("bandwidth", "skipped", why="fake driver")
        return
    driver = Driver()
    driver.load(PTX.read_bytes() + b"\0")
    cache = driver.attribute(L2_BYTES, 64 << 20)
    n = max(64 << 20, -(-4 * cache // (1 << 20)) << 20)
    measure(driver, Memory(driver, n))
