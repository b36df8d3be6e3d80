"""Step of gpu_check.py: calls follow the caller's stream and are followed by it.

A kernel that keeps the stream busy goes before the one that makes a rank's contribution; who
consumes the result comes right after the call; and a tensor is dropped right after it, whose memory
is then written by somebody else. Whatever was not waited for gives other numbers. Each library's
arrays, on its default stream, on one that waits for no other, and on the thread's own.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from gpu_checks.arrays import KINDS, Cupy, Library, Ours, Torch, why_no_cupy, why_no_torch
from gpu_checks.report import tell

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from ringcomm import Communicator, RingcommError  # noqa: E402

TURNS = 3


def follows(comm: Communicator, library: Library, kind: str, count: int) -> str:
    """In place, between two kernels; what is wrong, in words. (A rank that finds something goes on,
    or others would wait for it.)"""
    why = ""
    with library.stream(kind):
        for _ in range(TURNS):
            x = library.full(count, 1.0 + comm.rank)
            library.slow()
            library.double(x)
            comm.allreduce(x)
            library.double(x)
            why = why or _expect(library.read(x), 4 * _sum(comm))
    return why


def survives(comm: Communicator, library: Library, kind: str, count: int) -> str:
    """Out of place, in flight while the input is dropped and memory is taken anew."""
    why = ""
    with library.stream(kind):
        for codec in (None, "bf16", "int8"):
            out = library.full(count, -1.0)
            x = library.full(count, 1.0 + comm.rank)
            library.slow()
            library.double(x)
            work = comm.allreduce(x, out=out, compression=codec, async_op=True)
            del x
            others = [library.full(count, float("nan")) for _ in range(3)]
            work.wait()
            library.double(out)
            found = _expect(library.read(out), 4 * _sum(comm), 0.01 if codec == "int8" else 0.0)
            if found:
                why = why or f"{codec or 'no codec'}, input dropped: {found}"
            del others
    return why


def refuses(comm: Communicator, library: Library, count: int) -> str:
    """A call on a stream under capture raises, and leaves things as they were."""
    found = ""
    with library.stream("side"):
        x = library.full(count, 1.0)
        library.read(x)
        comm.barrier()
        if comm.rank == 0:
            try:
                with library.capture():
                    try:
                        comm.allreduce(x)
                        found = "a captured stream was not refused"
                    except RingcommError as error:
                        if "captured" not in str(error):
                            found = f"it says: {error}"
            except Exception as error:
                found = f"the capture was spoilt: {error}"
        comm.barrier()
        if not found:
            comm.allreduce(x)
            found = _expect(library.read(x), float(comm.world_size))
    return found


def _sum(comm: Communicator) -> float:
    return float(sum(range(1, comm.world_size + 1)))


def _expect(got: np.ndarray[Any, Any], value: float, error: float = 0.0) -> str:
    """All elements are the value but for a relative error; in words, which are not."""
    wrong = np.flatnonzero(~(np.abs(got - np.float32(value)) <= error * value))
    if not wrong.size:
        return ""
    return f"{wrong.size} of {got.size} elements, first {got[wrong[0]]} for {value}"


def check(library: Library, count: int) -> None:
    from ranks import run_ranks

    def told(name: str, body: Any) -> None:
        try:
            found = [why for why in run_ranks(2, body, timeout=25.0) if why]
        except Exception as error:  # a rank's own
            found = [f"{type(error).__name__}: {error}"]
        tell(f"{library.name}, {name}", "wrong" if found else "ok", why=found[0] if found else "")

    for kind in KINDS:

        def body(comm: Communicator, kind: str = kind) -> str:
            found = [call(comm, library, kind, count) for call in (follows, survives)]
            return found[0] or found[1]

        told(f"{kind} stream", body)
    told("graph capture refused", lambda comm: refuses(comm, library, count))


def run(options: argparse.Namespace) -> None:
    small = options.fake or options.quick
    check(Ours(), 5000 if small else 1 << 22)
    for maker, why_not in ((Torch, why_no_torch), (Cupy, why_no_cupy)):
        why = "fake driver" if options.fake else why_not()
        if why:
            tell(maker.name, "skipped", why=why)
        else:
            check(maker(), 1 << 22)
