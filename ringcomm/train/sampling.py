"""Samples of each rank in each step, and the thread that fetches them ahead.

An epoch is one permutation of the training set, drawn from (seed, epoch) alone. Step s of it takes
the slice [s*batch, (s+1)*batch); rank r of n takes every n-th of that slice, from the r-th on, and
cuts its share into micro-batches. Samples after the last whole slice are dropped.

Invariants: the shares of all ranks are disjoint and make up the slice, for any n that divides the
batch; a position is a step number, so nothing but that number need be kept to resume.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from ..errors import ConfigError
from .data import Data

MicroBatches = list[tuple[Tensor, Tensor]]


class Sampler:
    """Order of a training set of ``size`` samples for one rank."""

    def __init__(
        self, size: int, batch: int, *, rank: int, world_size: int, accumulate: int, seed: int
    ) -> None:
        """Set up the order; ``batch`` counts samples over all ranks.

        Raises ConfigError if it is not a multiple of world_size * accumulate, or exceeds the set.
        """
        parts = world_size * accumulate
        if batch % parts:
            fits = ", ".join(
                str(n) for n in (batch // parts * parts, -(-batch // parts) * parts) if n
            )
            raise ConfigError(
                f"--batch {batch} cannot be shared by {world_size} ranks with --accumulate "
                f"{accumulate}; give a multiple of {parts} ({fits})"
            )
        if batch > size:
            raise ConfigError(
                f"--batch {batch} exceeds the training set of {size} samples; give a smaller one"
            )
        self._size = size
        self._batch = batch
        self._rank = rank
        self._world_size = world_size
        self._accumulate = accumulate
        self._seed = seed
        self.steps_per_epoch = size // batch

    def share(self, step: int) -> list[Tensor]:
        """Return sample numbers of this rank's micro-batches in a step (counted over epochs)."""
        epoch, position = divmod(step, self.steps_per_epoch)
        order = _permutation(self._size, (self._seed << 24) + epoch)
        whole = order[position * self._batch : (position + 1) * self._batch]
        return list(whole[self._rank :: self._world_size].chunk(self._accumulate))


@functools.lru_cache(maxsize=1)
def _permutation(size: int, seed: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))


def batches(data: Data, sampler: Sampler, first: int, last: int) -> Iterator[MicroBatches]:
    """Yield the micro-batches of steps first <= step < last, in order.

    Data on disk is fetched one step ahead in a thread. Data in memory is not: the thread would
    only take a core from backward.
    """

    def fetch(step: int) -> MicroBatches:
        return [data.batch("train", numbers) for numbers in sampler.share(step)]

    if not data.on_disk:
        yield from map(fetch, range(first, last))
        return
    with ThreadPoolExecutor(1, thread_name_prefix="fetch") as thread:
        fetches = (thread.submit(fetch, step) for step in range(first, last))
        ahead = next(fetches, None)
        while ahead is not None:
            ready, ahead = ahead.result(), next(fetches, None)
            yield ready
