"""All-reduces that send the largest elements only, in numpy.

Written from the rules of docs/DESIGN.md ("The largest elements") alone, for tensors that are
sampled whole. A size is the bits of a float32 but for the sign. All arithmetic is float32.

    contribution  of each segment what is at least as large as the tensor's element of rank density
                  (own parts aside), up to a limit of 8 times the density, and 32 more
    result        of each segment the largest, 1.5 (3 a + d) / 4 of them: a, the mean number that
                  came from the others; d, density times elements

Among equals of the size of the last one that goes, those that go begin with another one in each
call. What is sent leaves nothing, what is not stays as it is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from quantised_reference import Residuals
from reference import Array, chunk_bounds

MASK = (1 << 64) - 1
F0 = np.float32(0)


def sizes(x: Array) -> Array:
    """Magnitudes as integers: infinity and NaN are the largest."""
    return x.view(np.uint32) & np.uint32(0x7FFFFFFF)


def spread(x: int) -> int:
    """splitmix64."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
    return x ^ x >> 31


@dataclasses.dataclass
class Rule:
    """What the ranks of a call have in common: its density, number and segment size."""

    density: float
    seq: int
    segment_bytes: int = 256 << 10

    def segments(self, chunk: int, start: int, stop: int) -> list[slice]:
        """A part, cut; chunk is the length of a whole one."""
        kept = self.segment_bytes // 6
        longest = min(int(max((kept - 32) / (8 * self.density), kept)), 65536) // 256 * 256
        elems = min(max(-(-chunk // 4096) * 256, 16384), longest)
        return [slice(at, min(at + elems, stop)) for at in range(start, stop, elems)]

    def threshold(self, c: Array) -> tuple[int, bool]:
        """(size from which elements are sent, whether many have just that one)."""
        if self.density >= 1 or not len(c):
            return 1, False
        wanted = max(4096, int(256 / self.density) // 8 * 8)
        assert len(c) <= wanted, "this reference knows whole samples only"
        kept = math.floor(self.density * len(c) + 0.5)
        size = int(np.sort(sizes(c))[::-1][max(kept, 1) - 1])
        large = int((sizes(c) >= size).sum())
        return max(size, 1), size > 0 and large > kept + kept // 4 + 8

    def keep(self, c: Array, least: int, most: int) -> Array:
        """Of a segment, what is sent: a mask."""
        size = sizes(c)
        chosen = size >= least
        if chosen.sum() <= most:
            return chosen
        last = np.sort(size)[::-1][most - 1]
        chosen = size > last
        equal = np.flatnonzero(size == last)
        wanted = most - int(chosen.sum())
        first = spread(self.seq) % len(equal)
        order = (np.arange(len(equal)) - first) % len(equal)
        chosen[equal[order < wanted]] = True
        return chosen

    def limit(self, n: int, tied: bool) -> int:
        share = self.density * n
        return self.bounded(math.ceil(share) if tied else math.ceil(8 * share) + 32, n)

    def bounded(self, most: int, n: int) -> int:
        return min(most, n, self.segment_bytes // 6)


def allreduce(
    inputs: Sequence[Array], op: str, rule: Rule, before: Sequence[Residuals] | None = None
) -> tuple[Array, list[Residuals], list[int]]:
    """(result, what is left on each rank, elements that each rank sends)."""
    n, count = len(inputs), len(inputs[0])
    direct = n > 2
    bounds = chunk_bounds(count, n) if direct else [(0, count)]
    given = [Residuals.zero(count)] * n if before is None else list(before)
    owns = bounds if direct else [(0, 0)] * n
    left = [one.fold(own, op, n) for one, own in zip(given, owns, strict=True)]
    c = [x.astype(np.float32) + one.worker for x, one in zip(inputs, left, strict=True)]
    encoded = [np.concatenate([x[:a], x[b:]]) for x, (a, b) in zip(c, owns, strict=True)]
    thresholds = [rule.threshold(x) for x in encoded]
    post = np.float32(1 / n) if op == "avg" else np.float32(1)
    result, sent = np.zeros(count, np.float32), [0] * n
    for owner, (start, stop) in enumerate(bounds):
        for part in rule.segments(bounds[0][1], start, stop):
            size, came, total = (
                part.stop - part.start,
                0,
                np.zeros(part.stop - part.start, np.float32),
            )
            for rank in range(n):
                x = c[rank][part]
                mask = np.ones(size, bool)
                if not direct or rank != owner:
                    least, tied = thresholds[rank]
                    mask = rule.keep(x, least, rule.limit(size, tied))
                    came += int(mask.sum())
                    sent[rank] += int(mask.sum())
                total = total + np.where(mask, x, F0)
                left[rank].worker[part] = np.where(mask, F0, x)
            total = total * post
            if direct:
                mine = slice(part.start - start, part.stop - start)
                total = total + left[owner].owner[mine]
                usual = (3 * came / (n - 1) + rule.density * size) / 4
                most = rule.bounded(math.ceil(1.5 * usual), size)
                mask = rule.keep(total, 1, most)
                sent[owner] += int(mask.sum()) * (n - 1)
                left[owner].owner[mine] = np.where(mask, F0, total)
                total = np.where(mask, total, F0)
            result[part] = total
    return result, left, sent
