"""The measuring loop: verify, warm up, agree on a plan, time round by round.

Per size, every variant (a library with a compression) is verified, then timed in rounds: one round
of each variant after the other, so that a disturbance of the machine meets all of them. A round is
a barrier, one untimed call that uses up what the links' token buckets saved during the barrier,
and then back-to-back calls, each timed (What.apart: each after a barrier of its own). A round
during which a machine's host took processor time away (lab/steal.py) is made again, all variants of
it, until the size has taken PATIENCE times its budget; of each round the take that lost least
counts.

Invariants: every choice that depends on a clock is rank 0's, or follows from what all ranks saw,
handed round before it is used, so all ranks make the same calls. Input is written anew before each
round, outside the timed part.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence

import numpy as np
from lab.steal import stolen
from libraries.peer import ITEM_BYTES, Call, Peer, What

from measure.closed_form import count_wrong, expected, pattern, tile

MIN_ROUNDS = 3
PATIENCE = 6  # budgets of a size, until disturbed rounds are made again no more
CALLS_PER_ROUND = 25  # few enough that sums of sums stay finite in f32
MIN_CALLS = 6
MAX_CALLS = 500
FEEDBACK_CALLS = 3  # that round, before the one that delivers what is left
FEEDBACK_SLACK = 1e-3  # of their mean: float32 residuals; a wrong input is a quarter or more
LONG_CALL_S = 0.2  # from here on a bucket's burst is noise and the untimed call too dear


@dataclasses.dataclass(frozen=True)
class Variant:
    """A row of the table for each size."""

    peer: Peer
    what: What

    @property
    def label(self) -> str:
        """For example "ringcomm bf16"."""
        return f"{self.peer.name} {self.what.compression}"


@dataclasses.dataclass
class Row:
    """What was measured of one variant at one size; the fields are explained in README.md."""

    size: int
    count: int
    dtype: str
    op: str
    library: str
    compression: str
    calls: int
    time_us: float
    p99_us: float
    algbw: float
    busbw: float
    wirebw: float | None
    wrong: int
    cpu_s_per_gb: float
    stolen: float
    ratios: dict[str, float] = dataclasses.field(default_factory=dict)
    """busbw over that of each other library at this size."""


@dataclasses.dataclass
class _Timing:
    """What one rank saw of one variant; spans: when each call began and ended."""

    spans: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    cpu_s: float = 0.0
    wire: float = 0.0
    payload: float = 0.0
    stolen_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class _Runner:
    """A variant made ready: its call, how many are planned, the guess of one's seconds, and whether
    each is timed by itself."""

    peer: Peer
    call: Call
    plan: int
    guess: float
    apart: bool


def busbw_factor(collective: str, world: int) -> float:
    """busbw / algbw, as in nccl-tests."""
    return 1.0 if collective == "broadcast" else sent_factor(collective, world)


def sent_factor(collective: str, world: int) -> float:
    """Bytes that a rank must send on average, per byte of the size."""
    return (2 if collective == "allreduce" else 1) * (world - 1) / world


def element_count(what: What, size: int, world: int) -> int:
    """Elements of ``size`` bytes: at least one; a multiple of world where the collective cuts."""
    count = max(1, size // ITEM_BYTES[what.dtype])
    if what.collective in ("allgather", "reduce_scatter"):
        count = max(1, count // world) * world
    return count


def measure_size(
    variants: Sequence[Variant],
    size: int,
    *,
    calls: int | None,
    budget: float,
) -> list[Row]:
    """Verify and time every variant at one size; the same rows on all ranks.

    ``size`` in bytes is that of the whole tensor (allgather: of the result). ``calls``:
    how many are timed; None: as many as take each variant about ``budget`` seconds.
    """
    control = variants[0].peer
    what = variants[0].what
    count = element_count(what, size, control.world)
    inputs = _input(what, count, control.rank, control.world)
    runners, wrong = [], []
    for variant in variants:
        call = variant.peer.prepare(variant.what, inputs.size)
        wrong.append(_verify(what, call, inputs, control))
        guess = _warm_up(variant.peer, call, control, budget)
        plan = calls or min(MAX_CALLS, max(MIN_CALLS, int(budget / guess)))
        runners.append(_Runner(variant.peer, call, plan, guess, what.apart))
    most = max(runner.plan for runner in runners)
    rounds = min(most, max(MIN_ROUNDS, math.ceil(most / CALLS_PER_ROUND)))
    until = time.monotonic() + PATIENCE * budget * len(variants)
    takes = [
        _undisturbed(functools.partial(_take, runners, inputs, turn, rounds), control, until)
        for turn in range(rounds)
    ]
    timings = map(_joined, zip(*takes, strict=True))
    return [
        _row(variant, count, timing, bad)
        for variant, timing, bad in zip(variants, timings, wrong, strict=True)
    ]


def _take(runners: Sequence[_Runner], inputs: np.ndarray, turn: int, rounds: int) -> list[_Timing]:
    """One round of each, with its share of the planned calls."""
    taken = []
    for runner in runners:
        share = (turn + 1) * runner.plan // rounds - turn * runner.plan // rounds
        runner.call.fill(inputs)
        taken.append(_time_round(runner, share))
    return taken


def _joined(rounds: Sequence[_Timing]) -> _Timing:
    return _Timing(
        spans=[one for timing in rounds for one in timing.spans],
        cpu_s=sum(timing.cpu_s for timing in rounds),
        wire=sum(timing.wire for timing in rounds),
        payload=sum(timing.payload for timing in rounds),
        stolen_s=sum(timing.stolen_s for timing in rounds),
    )


def _undisturbed(take: Callable[[], list[_Timing]], control: Peer, until: float) -> list[_Timing]:
    """The first take from which no machine's host took time; else that which lost least."""
    best: list[_Timing] = []
    least = math.inf
    while True:
        taken = take()
        lost_s = sum(timing.stolen_s for timing in taken)
        everyone = control.gather(np.array([lost_s, time.monotonic() >= until]))
        worst = float(everyone[:, 0].max())
        if worst < least:
            best, least = taken, worst
        if worst == 0 or everyone[0, 1]:
            return best


def _input(what: What, count: int, rank: int, world: int) -> np.ndarray:
    own = count // world if what.collective == "allgather" else count
    op = what.op if what.collective in ("allreduce", "reduce_scatter") else "sum"
    return tile(pattern(rank, world, op, what.dtype), own, what.dtype)


def _verify(what: What, call: Call, inputs: np.ndarray, control: Peer) -> int:
    """Wrong elements over all ranks of one call; or of the mean of several calls with error
    feedback, the last of which delivers all that those before it rounded away."""
    runs = [call.run] if call.flush is None else [*[call.run] * FEEDBACK_CALLS, call.flush]
    total = np.zeros(1)
    for run in runs:
        call.fill(inputs)
        result = call.read(run())
        total = result if len(runs) == 1 else total + result.astype(np.float64)
    return _wrong(
        what,
        total / len(runs) if len(runs) > 1 else total,
        control,
        FEEDBACK_SLACK if len(runs) > 1 else 0.0,
    )


def _wrong(what: What, result: np.ndarray, control: Peer, slack: float) -> int:
    """Wrong elements over all ranks; a result of the wrong size is wrong altogether."""
    world, rank = control.world, control.rank
    if what.collective == "allreduce":
        wrong = count_wrong(result, expected(world, what.op, what.dtype), 0, what.op, slack)
    elif what.collective == "broadcast":
        wrong = count_wrong(result, pattern(0, world, "sum", what.dtype), 0, "sum")
    elif what.collective == "reduce_scatter":
        total = expected(world, what.op, what.dtype)
        wrong = count_wrong(result, total, rank * result.size, what.op)
    else:
        wrong = sum(
            count_wrong(row, pattern(source, world, "sum", what.dtype), 0, "sum")
            for source, row in enumerate(result.reshape(world, -1))
        )
    return int(control.gather(np.array([wrong])).sum())


def _warm_up(peer: Peer, call: Call, control: Peer, budget: float) -> float:
    """Run untimed calls and return rank 0's guess of the seconds of one."""
    guess = math.inf
    turns, done = 2, 0
    while done < turns:
        peer.barrier()
        began = time.perf_counter()
        call.run()
        mine = max(1e-7, time.perf_counter() - began)
        guess = min(guess, float(control.gather(np.array([mine]))[0, 0]))
        done += 1
        if done == 1:
            turns = max(1, min(5, int(0.2 * budget / guess)))
    return guess


def _time_round(runner: _Runner, calls: int) -> _Timing:
    timing = _Timing()
    if not calls:
        return timing
    peer, call = runner.peer, runner.call
    peer.barrier()
    if runner.guess < LONG_CALL_S:
        call.run()
    sent, lost = peer.sent(), stolen()
    cpu = time.process_time()
    ended = time.perf_counter()
    for _ in range(calls):
        began = _start_apart(peer) if runner.apart else ended
        call.run()
        ended = time.perf_counter()
        timing.spans.append((began, ended))
    timing.cpu_s = time.process_time() - cpu
    now = peer.sent()
    if sent is not None and now is not None:
        timing.wire = now[0] - sent[0]
        timing.payload = now[1] - sent[1]
    timing.stolen_s = stolen() - lost
    return timing


def _start_apart(peer: Peer) -> float:
    peer.barrier()
    return time.perf_counter()


def _seconds(spans: np.ndarray, apart: bool) -> np.ndarray:
    """Of each call, from the spans of all ranks, shape (ranks, calls, 2): the mean over the ranks;
    apart: from the first rank's start to the last rank's end, as all read one machine's clock."""
    began, ended = spans[:, :, 0], spans[:, :, 1]
    if apart:
        return np.asarray(ended.max(axis=0) - began.min(axis=0))
    return np.asarray((ended - began).mean(axis=0))


def _row(variant: Variant, count: int, timing: _Timing, wrong: int) -> Row:
    peer, what = variant.peer, variant.what
    size = count * ITEM_BYTES[what.dtype]
    everyone = peer.gather(
        np.array(
            [timing.stolen_s, timing.cpu_s, timing.wire, timing.payload, *np.ravel(timing.spans)]
        )
    )
    lost = float(everyone[:, 0].max())
    cpu, wire, payload = everyone[:, 1:4].sum(axis=0)
    calls = _seconds(everyone[:, 4:].reshape(peer.world, -1, 2), what.apart)
    seconds = float(np.median(calls))
    known = peer.sent() is not None
    if not known:
        payload = size * calls.size * sent_factor(what.collective, peer.world) * peer.world
    return Row(
        size=size,
        count=count,
        dtype=what.dtype,
        op=what.op,
        library=peer.name,
        compression=what.compression,
        calls=int(calls.size),
        time_us=seconds * 1e6,
        p99_us=float(np.percentile(calls, 99, method="higher")) * 1e6,
        algbw=size / seconds / 1e9,
        busbw=size / seconds / 1e9 * busbw_factor(what.collective, peer.world),
        wirebw=float(wire / peer.world / calls.size / seconds / 1e9) if known else None,
        wrong=wrong,
        cpu_s_per_gb=float(cpu / payload * 1e9) if payload else 0.0,
        stolen=lost / float(calls.sum()),
    )
