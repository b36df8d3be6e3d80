"""What a sparse exchange costs: choosing, the optimizer's step, and bytes.

    python bench/sparse.py
    python bench/sparse.py --elements 10000000 --rounds 5 --json sparse.json

choose   elements per second of one thread at density 1/64, beside a copy of the same traffic (12
         bytes per element). Floor .5e9 in CPU time.
step     SGD and Adam of 1 % of the blocks of 16, scattered, beside torch's dense fused step on as
         many parameters, in turn within one run. The sparse one has one thread, torch --threads.
         Floor: at most 5 %.
bytes    of payloads that a rank sends in a round at density 1/64, beside an all-reduce of float32.
         Floor: at most 1/30.

Times are medians of ratios of neighbours in time; CPU time where it says so, which other programs
on the machine disturb less: of the calling thread, and of torch's step of all its threads. Exit
code 1 if a floor is missed, 2 without torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _columns import aligned

from ringcomm import chunks
from ringcomm._native import kernel_sets

CHUNK, BLOCK, SHARE = 4096, 16, 0.01
HEADS = ("what", "measured", "beside", "floor", "")


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure; ``holds`` says whether the floor was kept."""

    what: str
    measured: str
    beside: str
    floor: str
    holds: bool


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """(seconds, CPU seconds of this thread)."""
    start, used = time.perf_counter(), time.thread_time()
    call()
    return time.perf_counter() - start, time.thread_time() - used


def choose(elements: int, rounds: int) -> list[Row]:
    """The choice at density 1/64, of elements and of blocks."""
    from ringcomm.buffers import view

    rng = np.random.default_rng(0)
    delta, residual = (rng.standard_normal(elements, np.float32) for _ in range(2))
    left, copied = np.zeros(elements, np.float32), np.zeros(3 * elements // 2, np.float32)
    source = np.ones_like(copied)
    kernels = [name for name, supported in kernel_sets() if supported][-1]
    rows = []
    for block in (1, BLOCK):
        form = chunks.Format(CHUNK, block, CHUNK // 64 // block, "bf16")
        wire = np.zeros(form.payload_bytes(elements), np.uint8)
        seen = view(delta, writable=False)
        pairs = []
        for _ in range(rounds):
            _, copy = timed(lambda: np.copyto(copied, source))
            _, used = timed(lambda form=form, wire=wire, seen=seen: chunks.select(
                form, kernels, wire, left, residual, seen, 0.95))  # fmt: skip
            pairs.append((used, copy / used))
        rate = elements / statistics.median(used for used, _ in pairs)
        ratio = statistics.median(ratio for _, ratio in pairs)
        rows.append(Row(f"choose, blocks of {block}", f"{rate / 1e9:.2f}e9 elements/s (CPU time)",
                        f"{ratio:.2f} x copy", ">= .5e9", rate >= 0.5e9))  # fmt: skip
    return rows


def received(elements: int) -> chunks.Entries:
    """One block of a hundred, anywhere."""
    rng = np.random.default_rng(1)
    units = elements // BLOCK
    chosen = np.sort(rng.choice(units, int(units * SHARE), replace=False))
    form = chunks.Format(CHUNK, BLOCK, 3, "bf16")
    entries = chunks.Entries(form, elements, len(chosen))
    per = CHUNK // BLOCK
    entries.counts[:] = np.bincount(chosen // per, minlength=len(entries.counts))
    entries.index[:] = chosen % per
    entries.values[:] = rng.standard_normal(entries.values.shape).astype(np.float32) * 1e-3
    return entries


def step(elements: int, rounds: int, threads: int) -> list[Row]:
    """1 % of the blocks beside all of them."""
    import torch

    from ringcomm.torch.sparse.bucket import in_lines

    torch.set_num_threads(threads)
    entries = received(elements)
    kernels = [name for name, supported in kernel_sets() if supported][-1]
    master, first, second = (in_lines(elements) for _ in range(3))
    for array in (master, first, second):
        array[:] = 1e-3
    last = in_lines(elements // BLOCK, np.uint32)
    dense = torch.full((elements,), 1e-3, requires_grad=True)
    dense.grad = torch.full((elements,), 1e-3)
    rows = []
    for name in ("SGD", "Adam"):
        other: Any = (torch.optim.SGD([dense], 1e-3, momentum=0.9, fused=True) if name == "SGD"
                      else torch.optim.Adam([dense], 1e-3, fused=True))  # fmt: skip

        def ours(number: int, name: str = name) -> None:
            if name == "SGD":
                sgd = chunks.SgdStep(1e-3, 0.9, 0.0, False, number)
                chunks.sgd(entries, kernels, sgd, master, first, last)
            else:
                adam = chunks.AdamStep(1e-3, 0.9, 0.999, 1e-8, 0.0, False, number)
                chunks.adam(entries, kernels, adam, master, first, second)

        taken = []
        for number in range(rounds + 1):
            began = time.process_time()  # its threads are all its own, also as they wait
            wall, _ = timed(other.step)
            used = time.process_time() - began
            own_wall, own_used = timed(lambda number=number, ours=ours: ours(number + 1))
            if number:  # the first one touches memory for the first time
                taken.append((own_wall, own_used, own_wall / wall, own_used / used))
        own, own_cpu, ratio, cpu = (statistics.median(one) for one in zip(*taken, strict=True))
        rows.append(Row(
            f"step, {name}, 1 % of {elements:,}", f"{own * 1e3:.1f} ms",
            f"{ratio:.1%} of torch's, {threads} threads", "<= 5 %", ratio <= 0.05,
        ))  # fmt: skip
        rows.append(Row(
            f"step, {name}, CPU time", f"{own_cpu * 1e3:.1f} ms", f"{cpu:.1%} of torch's",
            "<= 5 %", cpu <= 0.05,
        ))  # fmt: skip
        del other
    return rows


def sent(elements: int) -> list[Row]:
    """Payload bytes of a round, as SparseExchange chooses how to exchange."""
    form = chunks.Format(CHUNK, 1, CHUNK // 64, "bf16")
    rows = []
    for ranks in (2, 4, 8, 16):
        size = form.payload_bytes(elements)
        twice = chunks.Format(CHUNK, 1, CHUNK // 32, "bf16").payload_bytes(elements)
        gathers = ranks <= 4
        whole = (ranks - 1) * size if gathers else (ranks - 1) / ranks * (size + twice)
        dense = 2 * (ranks - 1) / ranks * 4 * elements
        rows.append(Row(f"bytes, N = {ranks}, {'gather' if gathers else 'owner'}",
                        f"{whole / elements:.4f} B/element", f"1/{dense / whole:.1f} of float32's",
                        "<= 1/30", whole <= dense / 30))  # fmt: skip
    return rows


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sparse.py", description="Sparse exchanges.")
    add = parser.add_argument
    add("--elements", type=int, default=100_000_000, help="of the optimizer's parameters")
    add("--rounds", type=int, default=15)
    add("--threads", type=int, default=2, help="torch's")
    add("--json", type=Path, metavar="FILE")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = parse_arguments(argv)
    try:
        rows = choose(min(options.elements, 32 << 20), options.rounds)
        rows += step(options.elements, options.rounds, options.threads)
    except ImportError as error:
        print(f"sparse: {error}", file=sys.stderr)
        return 2
    rows += sent(options.elements)
    table = [HEADS] + [(one.what, one.measured, one.beside, one.floor,
                        "met" if one.holds else "short") for one in rows]  # fmt: skip
    print("\n".join(aligned(table)))
    if options.json:
        records = [dataclasses.asdict(one) for one in rows]
        options.json.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    return 0 if all(one.holds for one in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
