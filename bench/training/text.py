"""The texts of convergence.py: both ship with CPython, so nothing is downloaded.

    topics    pydoc_data.topics, the language reference as help() shows it: English prose and code
    sources   modules of the standard library, in the symbols of the first

Each is cut into as many contiguous shards as there are ranks; the last twentieth of each shard is
for validation. Invariants: a text is the same bytes on every rank and in every run of one release
of Python; its digest is part of every row, and rows of different texts are never compared.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import sysconfig
from pathlib import Path

import torch

VALIDATION = 0.05  # of each shard
SOURCES = 460_000  # characters


@dataclasses.dataclass(frozen=True)
class Text:
    """A text as numbers.

    Attributes:
        symbols: how many different ones the numbers stand for.
        codes: int64, one for each character.
        digest: of the characters.
    """

    symbols: int
    codes: torch.Tensor
    digest: str

    def shards(self, ranks: int) -> list[torch.Tensor]:
        """One contiguous part of equal length for each rank, what is validated on included."""
        length = len(self.codes) // ranks
        return [self.codes[rank * length : (rank + 1) * length] for rank in range(ranks)]

    def training(self, ranks: int) -> list[torch.Tensor]:
        """Of each shard what is trained on."""
        return [shard[: len(shard) - _held_back(shard)] for shard in self.shards(ranks)]

    def validation(self, ranks: int, context: int) -> torch.Tensor:
        """What is held back of all shards, in windows of ``context`` characters and the next."""
        windows = []
        for shard in self.shards(ranks):
            tail = shard[len(shard) - _held_back(shard) :]
            count = len(tail) // (context + 1)
            windows.append(tail[: count * (context + 1)].view(count, context + 1))
        return torch.cat(windows)


def _held_back(shard: torch.Tensor) -> int:
    return int(VALIDATION * len(shard))


@functools.cache
def text(name: str) -> Text:
    """The text of that name."""
    characters = _characters(name)
    symbols = {symbol: code for code, symbol in enumerate(sorted(set(_characters("topics"))))}
    kept = [symbols[symbol] for symbol in characters if symbol in symbols]
    digest = hashlib.sha256(characters.encode()).hexdigest()[:12]
    return Text(len(symbols), torch.tensor(kept), digest)


@functools.cache
def _characters(name: str) -> str:
    if name == "topics":
        from pydoc_data.topics import topics

        return "".join(topics[key] for key in sorted(topics))
    assert name == "sources"
    folder = Path(sysconfig.get_path("stdlib"))
    modules = sorted(path for path in folder.glob("*.py") if not path.name.startswith("_"))
    whole = ""
    for path in modules:
        whole += path.read_text(encoding="utf-8", errors="ignore")
        if len(whole) >= SOURCES:
            break
    return whole[:SOURCES]


class Batches:
    """The batches of one rank, drawn anew for each seed; every method sees the same ones."""

    def __init__(self, shard: torch.Tensor, batch: int, context: int, seed: int, rank: int) -> None:
        self._shard, self._batch = shard, batch
        self._window = torch.arange(context + 1)
        self._generator = torch.Generator().manual_seed(1000 * seed + rank)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Characters [batch, context], and what comes after each."""
        last = len(self._shard) - len(self._window)
        starts = torch.randint(0, last, (self._batch,), generator=self._generator)
        windows = self._shard[starts[:, None] + self._window]
        return windows[:, :-1], windows[:, 1:]
