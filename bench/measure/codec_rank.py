"""One rank of codecs.py: an all-reduce of each size by each codec, in turn, verified and timed.

    codec_rank.py '{"sizes": [4000000], "codecs": ["none", "onebit"], "rounds": 3, "budget": 1.0}'

Rank 0 prints a line of JSON for each size and codec (Taken of codecs.py). Invariants: every choice
that depends on a clock is rank 0's; codecs take turns within a round, in an order that moves on.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import ringcomm
from ringcomm.codecs import parse

CHECKED = 1 << 16  # elements whose error is looked at
LONG_CALL_S = 0.2  # from here on a shaper's burst is noise, and an untimed call too dear


def values(rank: int, count: int) -> Any:
    """What a rank contributes: normally distributed, as gradients nearly are."""
    return np.random.default_rng(rank).standard_normal(count, dtype=np.float32)


class Case:
    """One codec at one size."""

    def __init__(self, codec: str, src: Any, out: Any) -> None:
        self.codec, self._src, self._out = codec, src, out
        self._feedback = ringcomm.ErrorFeedback(src.size) if parse(codec).needs_feedback else None
        self.seconds: list[float] = []
        self.sent = self.cpu = self.frames = 0.0
        self.calls = 0

    def run(self) -> float:
        """One call; its seconds."""
        began = time.perf_counter()
        ringcomm.allreduce(
            self._src,
            "avg",
            out=self._out,
            feedback=self._feedback,
            compression=None if self.codec == "none" else self.codec,
        )
        return time.perf_counter() - began

    def verify(self) -> tuple[float, bool]:
        """Relative error of the first call's first elements, and whether all ranks have the same
        bits."""
        self.run()
        n = min(CHECKED, self._src.size)
        exact = sum(values(r, n).astype(np.float64) for r in range(ringcomm.world_size()))
        exact /= ringcomm.world_size()
        error = np.linalg.norm(self._out[:n] - exact) / np.linalg.norm(exact)
        digest = hashlib.blake2b(self._out.tobytes(), digest_size=8).digest()
        digests = ringcomm.allgather(np.frombuffer(digest, np.uint8))
        return float(error), bool((digests == digests[0]).all())

    def round(self, budget: float) -> None:
        """A round of calls within the budget, as rank 0 counts it."""
        ringcomm.barrier()
        guess = _agreed(self.run())
        calls = max(1, min(200, int(budget / guess)))
        if guess < LONG_CALL_S:
            ringcomm.barrier()
            self.run()
        sent, frames, cpu = _sent_bytes(), _sent_frames(), time.process_time()
        took = [self.run() for _ in range(calls)]
        self.cpu += time.process_time() - cpu
        self.sent += _sent_bytes() - sent
        self.frames += _sent_frames() - frames
        self.calls += calls
        self.seconds.append(statistics.median(_mean_of_ranks(took)))


def _mean_of_ranks(took: list[float]) -> list[float]:
    return ringcomm.allreduce(np.array(took), "avg").tolist()  # type: ignore[no-any-return]


def _agreed(seconds: float) -> float:
    return float(ringcomm.broadcast(np.array([seconds]))[0])


def _sent_bytes() -> int:
    """By this host's network ports, link headers included."""
    return sum(
        int(path.read_text()) for path in Path("/sys/class/net").glob("eth*/statistics/tx_bytes")
    )


def _sent_frames() -> int:
    lanes = ringcomm.default_communicator().stats()["lanes"]
    return sum(lane["sent_frames"] for lane in lanes)


def main() -> None:
    """The rank."""
    asked = json.loads(sys.argv[1])
    ringcomm.init()
    rank, world = ringcomm.rank(), ringcomm.world_size()
    for size in asked["sizes"]:
        src = values(rank, size // 4)
        out = np.zeros_like(src)
        cases = [Case(codec, src, out) for codec in asked["codecs"]]
        checked = [case.verify() for case in cases]
        for turn in range(asked["rounds"]):
            first = turn % len(cases)
            for case in [*cases[first:], *cases[:first]]:
                case.round(asked["budget"])
        for case, (error, same) in zip(cases, checked, strict=True):
            sums = ringcomm.allreduce(np.array([case.sent, case.cpu, case.frames]))
            sums /= case.calls * world
            told = {
                "size": size,
                "codec": case.codec,
                "seconds": case.seconds,
                "error": error,
                "same_bits": same,
                "sent": sums[0],
                "cpu_s": sums[1],
                "frames": sums[2],
            }
            if rank == 0:
                print(json.dumps(told), flush=True)
    ringcomm.shutdown()


if __name__ == "__main__":
    main()
