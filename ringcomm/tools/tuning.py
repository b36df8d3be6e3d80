"""What ``python -m ringcomm tune`` measures, and what it concludes.

All ranks run the contenders by turns, in another order each round, on one communicator and its
lanes; the time of a round is that of the slowest rank. Everything that decides how it goes on
(repetitions, rounds, who drops out) follows from times that all ranks have exchanged, so that they
take the same steps.

A contender replaces the cost model at a size only if it is clearly faster: in the median round by
a twentieth, and in three rounds out of four at all. What is within the noise stays with the model.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from ..bootstrap.tuned import MAX_ROWS, Measured, Row
from ..communicator import Communicator
from ..config import ALGORITHMS

MODEL = "auto"
_ANY_SIZE = 2**63 - 1
_CLEARLY = 0.95  # of the model's time, in the median round
_HOPELESS = 3.0  # times the best contender's time: not measured further
_ROUND_S = 4e-3  # that small calls are repeated for
_MOST_CALLS, _FEWEST_ROUNDS, _MOST_ROUNDS = 64, 7, 25

Contenders = Mapping[str, Sequence[Row]]
"""What the communicator is to follow, by name; MODEL is among them."""


def algorithms() -> dict[str, Sequence[Row]]:
    """The cost model, and every algorithm that can be asked for."""
    fixed = {name: (Row(_ANY_SIZE, name),) for name in ALGORITHMS if name != MODEL}
    return {MODEL: (), **fixed}


@dataclasses.dataclass(frozen=True)
class Sample:
    """One message size."""

    bytes: int
    seconds: Mapping[str, Sequence[float]]
    """By contender, one call's time in each round on the slowest rank; of one that is hopeless,
    the two rounds that showed it."""

    def median(self, name: str) -> float:
        """Seconds."""
        return statistics.median(self.seconds[name])

    def ratios(self, name: str) -> list[float]:
        """Of a contender's time to the model's in the same round, in ascending order."""
        pairs = zip(self.seconds[name], self.seconds[MODEL], strict=False)
        return sorted(mine / model for mine, model in pairs)

    def choice(self) -> str:
        """The fastest contender that is clearly faster than the model; else MODEL."""
        clear = [name for name in self.seconds if name != MODEL and _is_clear(self.ratios(name))]
        return min(clear, key=self.median, default=MODEL)

    def measured(self) -> Measured:
        """For the file."""
        seconds = {name: self.median(name) for name in self.seconds}
        return Measured(self.bytes, seconds, self.choice())


def _is_clear(ratios: Sequence[float]) -> bool:
    enough = len(ratios) >= _FEWEST_ROUNDS
    return enough and statistics.median(ratios) < _CLEARLY and ratios[len(ratios) * 3 // 4] < 1.0


def sizes(smallest: int, largest: int) -> list[int]:
    """Powers of two from smallest to largest, in bytes."""
    powers = itertools.takewhile(lambda size: size <= largest, (1 << i for i in itertools.count()))
    return [size for size in powers if size >= max(smallest, 4)]


def with_edges(at: Sequence[int], table: Iterable[Row]) -> list[int]:
    """Also the sizes at both sides of the table's bounds, where it was not measured."""
    edges = {row.up_to // 4 * 4 + step for row in table for step in (0, 4)}
    return sorted({*at, *(size for size in edges if at[0] <= size <= at[-1])})


def rows(choices: Sequence[tuple[int, str]]) -> list[Row]:
    """The table for the choices made at ascending sizes. What was chosen for two sizes is for those
    between them too; where the choice changes, the model keeps what lies between, and two others
    part at the geometric mean. Above the largest size it is the model's."""
    table: list[Row] = []
    for (size, algorithm), (larger, following) in itertools.pairwise([*choices, (0, MODEL)]):
        if algorithm == following:
            continue
        up_to = math.isqrt(size * larger)
        if MODEL in (algorithm, following):
            up_to = larger - 1 if algorithm == MODEL else size
        table.append(Row(up_to, algorithm))
    return table


def measure(
    comm: Communicator, contenders: Contenders, at: Iterable[int], seconds: float
) -> Iterator[Sample]:
    """Times all-reduces of float32 of each size in bytes; about ``seconds`` for each."""
    for size in at:
        yield _Size(comm, contenders, size).run(seconds)


def measure_closely(
    comm: Communicator, contenders: Contenders, at: Sequence[int], seconds: float
) -> Iterator[Sample]:
    """As measure, and then where the choice changes, twice at the size half-way."""
    found = {}
    for level in range(3):
        for size in at:
            (found[size],) = measure(comm, contenders, [size], seconds)
            yield found[size]
        at = _between(sorted(found.items())) if len(found) < MAX_ROWS // 2 and level < 2 else []


def _between(found: Sequence[tuple[int, Sample]]) -> list[int]:
    return [
        math.isqrt(size * larger) // 4 * 4
        for (size, here), (larger, there) in itertools.pairwise(found)
        if here.choice() != there.choice() and larger - size > 64
    ]


class _Size:
    """The measurement of one size, on one rank."""

    def __init__(self, comm: Communicator, contenders: Contenders, size: int) -> None:
        self._comm = comm
        self._contenders = contenders
        self._size = size
        self._data = np.zeros(size // 4, dtype=np.float32)
        self._calls = dict.fromkeys(contenders, 1)

    def run(self, seconds: float) -> Sample:
        trial = self._slowest(
            [{name: self._time(name) for name in self._contenders} for _ in range(3)][1:]
        )
        typical = {name: min(times) for name, times in trial.items()}
        best = min(typical.values())
        hopeful = [n for n in typical if n == MODEL or typical[n] <= _HOPELESS * best]
        for name in hopeful:
            self._calls[name] = min(_MOST_CALLS, max(1, math.ceil(_ROUND_S / typical[name])))
        one_round = sum(typical[name] * self._calls[name] for name in hopeful)
        rounds = min(_MOST_ROUNDS, max(_FEWEST_ROUNDS, int(seconds / one_round)))
        order = random.Random(self._size)  # the same on all ranks
        times = self._slowest(
            [
                {name: self._time(name) for name in order.sample(hopeful, len(hopeful))}
                for _ in range(rounds)
            ]
        )
        return Sample(self._size, {n: times.get(n, trial[n]) for n in self._contenders})

    def _time(self, name: str) -> float:
        """Seconds of one of a row of calls."""
        self._comm._follow(self._contenders[name])
        self._comm.barrier()
        began = time.perf_counter()
        for _ in range(self._calls[name]):
            self._comm.allreduce(self._data)
        return (time.perf_counter() - began) / self._calls[name]

    def _slowest(self, rounds: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
        """By contender, each round's longest time of any rank."""
        names = [name for name in self._contenders if name in rounds[0]]
        mine = np.array([[times[name] for name in names] for times in rounds])
        slowest = self._comm.allgather(mine).max(axis=0)
        return {name: [float(t) for t in slowest[:, i]] for i, name in enumerate(names)}
