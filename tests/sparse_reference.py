"""A second, slow implementation of sparse exchanges (csrc/sparse, ringcomm/sparse.py), in numpy.

Written from what the documents say, element by element where that is clearer: sizes are compared by
their bits, equals go in order, sums are made in order of rank.
"""

from __future__ import annotations

import numpy as np
from reference import Array


def words(x: Array) -> Array:
    """The bits of float32."""
    return np.ascontiguousarray(x).view(np.uint32)


def bf16(x: Array) -> Array:
    """Rounded to nearest, ties to even; infinity and NaN as they are."""
    whole = words(x).astype(np.uint64)
    rounded = ((whole + 0x7FFF + (whole >> 16 & 1)) >> 16 << 16).astype(np.uint32)
    return np.where(np.isfinite(x), rounded.view(np.float32), x)


def scores(c: Array, block: int) -> Array:
    """Of each block, the sum of its magnitudes, halves folded onto each other."""
    rows = np.abs(np.pad(c, (0, -len(c) % block))).reshape(-1, block)
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0].copy()


def largest(x: Array, k: int) -> Array:
    """Places of the k largest, in ascending order; of equals the first."""
    sizes = (words(x) & 0x7FFFFFFF).astype(np.int64)
    return np.sort(np.argsort(-sizes, kind="stable")[:k])


def chosen(
    residual: Array, delta: Array, decay: float, chunk: int, block: int, kept: int, values: str
) -> tuple[Array, Array, Array]:
    """(what is sent, as a dense tensor; what is left; 1 where a block is sent)."""
    c = residual * np.float32(decay) + delta
    sent, mask = np.zeros_like(c), np.zeros(len(c), bool)
    for start in range(0, len(c), chunk):
        part = c[start : start + chunk]
        share = -(-kept * len(part) // chunk)
        for one in largest(scores(part, block) if block > 1 else part, share):
            mask[start + one * block : min(start + (one + 1) * block, start + len(part))] = True
    sent[mask] = c[mask] if values == "fp32" else bf16(c[mask])
    return sent, c - sent, mask


def senders(sent: Array, chunk: int, block: int) -> Array:
    """1 for each element of a block that has a value other than zero."""
    there = np.zeros(len(sent), np.int64)
    for start in range(0, len(sent), chunk):
        stop = min(start + chunk, len(sent))
        for first in range(start, stop, block):
            last = min(first + block, stop)
            there[first:last] = (sent[first:last] != 0).any()
    return there


def joined(sent: list[Array], chunk: int, block: int, aggregate: str, ranks: int) -> Array:
    """The sum in order of rank, over all ranks or over those that sent a block."""
    total = np.zeros_like(sent[0])
    count = np.zeros(len(total), np.int64)
    for one in sent:
        total = np.where(one != 0, total + one, total)
        count += senders(one, chunk, block)
    if aggregate == "mean":
        return total * np.float32(1 / ranks)
    return total * (np.float32(1) / np.maximum(count, 1).astype(np.float32))


class World:
    """All ranks' residuals, and the owners'; a round of all."""

    def __init__(
        self,
        ranks: int,
        count: int,
        chunk: int,
        block: int,
        kept: int,
        decay: float,
        values: str,
        aggregate: str,
        owner_kept: int = 0,
    ) -> None:
        self.ranks, self.chunk, self.block, self.kept = ranks, chunk, block, kept
        self.decay, self.values, self.aggregate = decay, values, aggregate
        self.owner_kept = owner_kept
        self.residuals = [np.zeros(count, np.float32) for _ in range(ranks)]
        self.owner = np.zeros(count, np.float32)

    def round(self, deltas: list[Array]) -> Array:
        """What all ranks get, dense."""
        sent = []
        for rank, delta in enumerate(deltas):
            out, self.residuals[rank], _ = chosen(
                self.residuals[rank],
                delta,
                self.decay,
                self.chunk,
                self.block,
                self.kept,
                self.values,
            )
            sent.append(out)
        mean = joined(sent, self.chunk, self.block, self.aggregate, self.ranks)
        if not self.owner_kept:
            return mean
        out, self.owner, _ = chosen(
            self.owner, mean, self.decay, self.chunk, self.block, self.owner_kept, self.values
        )
        return out
