"""What convergence.py runs: settings, runs and their keys, the tuning, and what is still due.

For every method and baseline alike:

    tune     4 rates on a logarithmic grid, 2 seeds that are used for nothing else (T5: 1). The rate
             with the least mean loss at the end; where it is the first or the last of the grid,
             the grid grows on that side, up to EXTENSIONS rates, until the best lies inside
    final    8 seeds at that rate, and at those of claims (T5: 3)
    process  the first of these seeds again, each rank a process, over sockets: to the same bits

T4 starts from one checkpoint of T1 under AdamW, which no tuning changes. Its grid is T1's over ten.

Invariants: what is due follows from the methods and the rows alone; a run's key holds all that
defines it, its method's settings and version included, so that a changed method is run anew. No
source text is in it: a method that is only written differently keeps its rows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from report.rows import Row, Rows

from training.claims import CLAIMS
from training.methods import METHODS, Method
from training.stats import loss_of

HARNESS = 1  # of what all runs have in common: data, model, schedule; a new one runs all anew
RANKS = 4
TUNE_SEEDS = (101, 102)
SEEDS = tuple(range(1, 9))
OTHER_SEEDS = tuple(range(11, 19))  # of the null control
CHECKPOINT_SEED, CHECKPOINT_RATE = 201, 1e-2  # in no key of T4's: with others, raise HARNESS
QUICK_SHARE = 0.5  # of the steps
EXTENSIONS = 3

Role = Literal["tune", "final", "process", "checkpoint", "quick"]


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is trained on what.

    Attributes:
        text: the name of what is learned: a text, or "digits" (tasks.py).
        steps: of a final run.
        rate: what a method's grid of rates is multiplied by.
        warmup, floor: shares of the steps and of the rate: a linear rise, then a cosine down.
        clip: the norm to which gradients are clipped.
        starts_at: the setting whose checkpoint it starts from; empty: at weights by the seed.
        tuned_on: the seeds of the tuning; of no run's result, so in no key.
    """

    name: str
    text: str
    steps: int
    rate: float = 1.0
    warmup: float = 0.1
    floor: float = 0.05
    clip: float = 1.0
    batch: int = 8
    context: int = 64
    starts_at: str = ""
    tuned_on: tuple[int, ...] = TUNE_SEEDS

    def told(self) -> dict[str, Any]:
        """What of it defines a run's result."""
        return {name: value for name, value in vars(self).items() if name != "tuned_on"}

    def factor(self, step: int, steps: int) -> float:
        """Of the rate, in a step from 0 on."""
        rise = max(1, round(self.warmup * steps))
        if step < rise:
            return (step + 1) / rise
        turn = math.cos(math.pi * (step - rise) / max(1, steps - rise))
        return self.floor + (1 - self.floor) * 0.5 * (1 + turn)


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("T1", "topics", 400),
        Setting("T4", "sources", 150, rate=0.1, starts_at="T1"),
        Setting("T5", "digits", 400, clip=math.inf, batch=16, context=0, tuned_on=TUNE_SEEDS[:1]),
    )
}


@dataclasses.dataclass(frozen=True)
class Run:
    """One training of one method.

    Attributes:
        steps: batches of each rank; a method that accumulates takes fewer optimizer steps.
    """

    setting: str
    method: str
    lr: float
    seed: int
    role: Role
    steps: int

    @property
    def key(self) -> str:
        """Of all that defines the result."""
        method = METHODS[self.method]
        told: dict[str, Any] = {
            "harness": HARNESS,
            "setting": SETTINGS[self.setting].told(),
            "method": [method.name, method.options, method.version],
            "lr": self.lr,
            "seed": self.seed,
            "steps": self.steps,
            "deal": method.deal,
            "accumulate": method.accumulate,
        }
        world = "process" if self.role == "process" else "thread"
        if method.world == "process" or world == "process":
            told["world"] = "process"
        if self.role == "checkpoint":
            told["role"] = "checkpoint"
        text = json.dumps(told, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def in_processes(self) -> bool:
        """Whether each rank is a process."""
        return self.role == "process" or METHODS[self.method].world == "process"


CHECKPOINT = Run(
    "T1", "adamw", CHECKPOINT_RATE, CHECKPOINT_SEED, "checkpoint", SETTINGS["T1"].steps
)


def steps_of(setting: Setting, method: Method, role: Role) -> int:
    """A method's batches in a role."""
    share = method.share * (QUICK_SHARE if role == "quick" else 1.0)
    steps = round(setting.steps * share)
    return steps - steps % method.accumulate


def rates_of_claims(method: Method, setting: str) -> list[float]:
    """Rates at which claims compare a method with another one, beside its own."""
    return sorted(
        {
            claim.lr
            for claim in CLAIMS
            if claim.lr is not None
            and claim.setting == setting
            and method.name in (claim.method, claim.baseline)
        }
    )


class Plan:
    """What the rows hold of the methods' runs, and what they lack; a method whose API is missing
    has its rows all the same."""

    def __init__(self, rows: Rows, methods: Iterable[Method]) -> None:
        self.rows, self.methods = rows, list(methods)

    # ---- tuning ----

    def tuned(self, method: Method, setting: str = "T1") -> float | None:
        """The rate of its final runs; None before its tuning is over."""
        source = METHODS[method.tuned_as] if method.tuned_as else method
        grid, mean = self._grid(source, setting)
        return min(grid, key=mean.__getitem__) if len(mean) == len(grid) else None

    def is_interior(self, method: Method, setting: str = "T1") -> bool:
        """Whether the tuned rate lies between others that were tried."""
        source = METHODS[method.tuned_as] if method.tuned_as else method
        grid, _ = self._grid(source, setting)
        return self.tuned(method, setting) not in (None, grid[0], grid[-1])

    def _grid(self, method: Method, setting: str) -> tuple[list[float], dict[float, float]]:
        """The rates to try as far as is known, and the mean losses of those that are over."""

        def losses() -> dict[float, float]:
            known = {rate: self._tuning_loss(method, setting, rate) for rate in grid}
            return {rate: loss for rate, loss in known.items() if loss is not None}

        grid = sorted(_rounded(rate * SETTINGS[setting].rate) for rate in method.lrs)
        mean = losses()
        for _ in range(EXTENSIONS):
            if any(rate not in mean for rate in grid):
                break
            best = min(grid, key=mean.__getitem__)
            ratio = grid[1] / grid[0]
            if best == grid[0]:
                grid.insert(0, _rounded(grid[0] / ratio))
            elif best == grid[-1]:
                grid.append(_rounded(grid[-1] * ratio))
            else:
                break
            mean = losses()
        return grid, mean

    def _tuning_loss(self, method: Method, setting: str, rate: float) -> float | None:
        found = [self.rows.find(run.key) for run in self._tuning(method, setting, rate)]
        if None in found:
            return None
        return sum(loss_of(row["loss"]) for row in found if row) / len(found)

    def _tuning(self, method: Method, setting: str, rate: float) -> list[Run]:
        of = SETTINGS[setting]
        steps = steps_of(of, method, "tune")
        return [Run(setting, method.name, rate, seed, "tune", steps) for seed in of.tuned_on]

    # ---- runs ----

    def runs(self, method: Method) -> Iterator[Run]:
        """All runs of a method that are known so far, done or not, in order."""
        for name in method.settings:
            setting = SETTINGS[name]
            if setting.starts_at:
                yield CHECKPOINT
            if not method.tuned_as:
                for rate in self._grid(method, name)[0]:
                    yield from self._tuning(method, name, rate)
            at = self.tuned(method, name)
            if at is None:
                continue
            steps = steps_of(setting, method, "final")
            for rate in dict.fromkeys((at, *rates_of_claims(method, name))):
                for seed in method.seeds:
                    yield Run(name, method.name, rate, seed, "final", steps)
            if method.world == "thread":
                yield Run(name, method.name, at, method.seeds[0], "process", steps)

    def due(self) -> list[Run]:
        """What can be run now, most valuable first: of each method in turn what is next."""
        found: dict[str, Run] = {}
        for method in self.methods:
            for run in self.runs(method) if not method.missing() else ():
                if self.rows.find(run.key) is None:
                    found.setdefault(run.key, run)
        return list(found.values())

    def count(self) -> tuple[int, int, float]:
        """(runs done, runs in all as far as is known, seconds of processor that the rest takes)."""
        runs = {run.key: run for method in self.methods for run in self.runs(method)}
        left = [run.steps for key, run in runs.items() if self.rows.find(key) is None]
        unknown = [
            steps_of(SETTINGS[name], method, "final")
            for method in self.methods
            for name in method.settings
            if self.tuned(method, name) is None
            for _ in range(len(method.seeds) + 1)
        ]
        seconds = self._seconds_per_step() * (sum(left) + sum(unknown))
        done, total = len(runs) - len(left), len(runs) + len(unknown)
        return done, total, seconds

    def _seconds_per_step(self) -> float:
        known = sorted(row["cpu_s"] / row["steps"] for row in self.rows if row["steps"])
        return known[len(known) // 2] if known else 0.1

    # ---- results ----

    def finals(self, setting: str, name: str, lr: float | None = None) -> dict[int, Row]:
        """The final rows of a method by seed, at its tuned rate or at another."""
        method = METHODS[name]
        at = self.tuned(method, setting) if lr is None else lr
        if at is None:
            return {}
        steps = steps_of(SETTINGS[setting], method, "final")
        found = {}
        for seed in method.seeds:
            row = self.rows.find(Run(setting, name, at, seed, "final", steps).key)
            if row is not None:
                found[seed] = row
        return found

    def process_check(self, setting: str, method: str) -> str:
        """Whether the run over real processes had the same bits. torch's own kernels give others on
        another processor."""
        finals = self.finals(setting, method)
        for run in self.runs(METHODS[method]):
            if run.role == "process" and run.setting == setting and run.seed in finals:
                row = self.rows.find(run.key)
                if row is not None:
                    final = finals[run.seed]
                    if row.get("cpu") != final.get("cpu"):
                        return "other processor"
                    return "same bits" if row["weights"] == final["weights"] else "OTHER BITS"
        return "-"


def quick_runs(names: Sequence[str], rates: dict[str, float]) -> list[Run]:
    """T1 at half the steps, 3 seeds, the rates given."""
    steps = {name: steps_of(SETTINGS["T1"], METHODS[name], "quick") for name in names}
    return [
        Run("T1", name, rates[name], seed, "quick", steps[name])
        for name in names
        for seed in SEEDS[:3]
    ]


def _rounded(rate: float) -> float:
    return float(f"{rate:.4g}")
