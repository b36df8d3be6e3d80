"""Direct exchange or a ring with feedback at every hop: which loses less? A simulation in numpy.

    python bench/hops.py
    python bench/hops.py --worlds 4,16 --codecs int4,onebit --steps 400

Both send 2 (N-1)/N of the encoded tensor, so what decides is the error. With direct exchange a
value is encoded as a contribution and as a sum. On a ring every hop encodes the partial sum that it
passes on, N-1 times; with feedback each sender keeps what its hop lost for its next call. Ranks
draw normally distributed gradients around one mean, SNR 0.3 each. Printed are, at the end:

    lag     how many steps the sum of all results is behind the sum of all means, in steps:
            |sum of results - sum of means| / |mean|
    error   relative error of one result (L2), mean over the last tenth of the steps
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from sweep import _list_of

Codec = Callable[[Any], Any]
"""Encodes and decodes: shape (..., elements), a multiple of 256."""


def _blocks(x: Any, block: int) -> Any:
    return x.reshape(*x.shape[:-1], -1, block)


def _uniform(levels: int, block: int) -> Codec:
    def code(x: Any) -> Any:
        cut = _blocks(x, block)
        scale = np.abs(cut).max(-1, keepdims=True) / levels
        return (np.rint(cut / np.where(scale > 0, scale, 1)) * scale).reshape(x.shape)

    return code


def _onebit(x: Any) -> Any:
    cut = _blocks(x, 256)
    rms = np.sqrt((cut * cut).mean(-1, keepdims=True))
    scale = np.minimum(rms, 1.75 * np.abs(cut).mean(-1, keepdims=True))
    return np.where(cut >= 0, scale, -scale).reshape(x.shape)


CODECS: dict[str, Codec] = {
    "int8": _uniform(127, 256), "int4": _uniform(7, 64), "onebit": _onebit,
}  # fmt: skip


class Direct:
    """Contributions to the owner, its sum to all; feedback of both."""

    def __init__(self, codec: Codec, world: int, count: int, feedback: bool) -> None:
        self._codec, self._world, self._feedback = codec, world, feedback
        self._own = np.zeros((world, count), np.float32)
        self._sum = np.zeros(count, np.float32)

    def step(self, x: Any) -> Any:
        """The mean, as all ranks have it. x: [rank, element]."""
        c = x + self._own
        sent = self._codec(c)
        chunk = x.shape[1] // self._world
        for rank in range(self._world):  # its own contribution to its own part is not encoded
            part = slice(rank * chunk, (rank + 1) * chunk)
            sent[rank, part] = c[rank, part]
        total = sent.sum(0) / self._world + self._sum
        result = self._codec(total)
        if self._feedback:
            self._own, self._sum = c - sent, total - result
        return result


class Ring:
    """A chunk's partial sum is encoded by every rank that passes it on."""

    def __init__(self, codec: Codec, world: int, count: int, feedback: bool) -> None:
        self._codec, self._world, self._feedback = codec, world, feedback
        self._left = np.zeros((world, world, count // world), np.float32)  # [chunk, hop]

    def step(self, x: Any) -> Any:
        """As Direct.step."""
        world = self._world
        parts = x.reshape(world, world, -1)  # [rank, chunk]
        result = []
        for chunk in range(world):
            partial = np.zeros_like(parts[0, chunk])
            for hop in range(world):
                value = partial + parts[(chunk + hop) % world, chunk]
                if hop + 1 == world:
                    value = value / world
                value = value + self._left[chunk, hop]
                partial = self._codec(value)
                if self._feedback:
                    self._left[chunk, hop] = value - partial
            result.append(partial)
        return np.concatenate(result)


def simulate(machine: Direct | Ring, world: int, count: int, steps: int) -> tuple[float, float]:
    """(lag, error) at the end."""
    rng = np.random.default_rng(1)
    mean = rng.standard_normal(count, dtype=np.float32)
    behind, errors = np.zeros(count), []
    for step in range(steps):
        noise = rng.standard_normal((world, count), dtype=np.float32)
        x = mean + noise / 0.3
        exact = x.mean(0)
        result = machine.step(x)
        behind += exact - result
        if step >= steps - max(1, steps // 10):
            errors.append(np.linalg.norm(result - exact) / np.linalg.norm(exact))
    return float(np.linalg.norm(behind) / np.linalg.norm(mean)), float(np.mean(errors))


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="hops.py", description="Direct exchange or ring hops.")
    add = parser.add_argument
    add("--worlds", type=lambda text: [int(part) for part in text.split(",")],
        default="2,4,8,16", metavar="N,...")
    add("--codecs", type=_list_of(tuple(CODECS)), default="int8,int4,onebit", metavar="LIST")
    add("--steps", type=int, default=200)
    add("--chunk", type=int, default=1024, help="elements of a rank's part; a multiple of 256")
    options = parser.parse_args(argv)
    if options.chunk < 1 or options.chunk % 256 or options.steps < 1:
        parser.error("--chunk must be a multiple of 256 and --steps at least 1")
    print(f"{'codec':>8}{'world':>6}   {'direct+EF':>16}{'ring+EF':>16}{'direct':>16}{'ring':>16}"
          f"\n{'':>14}   {'lag, error':>16}{'lag, error':>16}{'lag, error':>16}{'lag, error':>16}")
    for codec in options.codecs:
        for world in options.worlds:
            cells = []
            for feedback in (True, False):
                for kind in (Direct, Ring):
                    count = world * options.chunk
                    machine = kind(CODECS[codec], world, count, feedback)
                    lag, error = simulate(machine, world, count, options.steps)
                    cells.append(f"{lag:9.3g}, {error:5.2g}")
            print(f"{codec:>8}{world:6d}   {''.join(f'{cell:>16}' for cell in cells)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
