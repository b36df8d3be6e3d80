"""Where the time of a step goes: input, computation, exposed and hidden communication.

What is measured, on each rank, with the monotonic clock:

    begin        input_done                      last_submitted    backward_done     end
      | fetch batch | forward, backward, hooks ------- |  waiting for  | optimizer    |
      |             |    [work 1 .............]        |  the last     |              |
      |             |             [work 2 .............|.............] |              |
      |<-- input -->|            hidden: in flight ^   |<-- exposed -->|

- A *work* is the all-reduce of one bucket. Its interval [submitted, done] is taken by the
  communication hook: submitted on entry, in the thread that runs backward; done in the thread
  that completes the work.
- DDP submits buckets in order, each when its last gradient is there, so the last submission marks
  the end of backward's own computation. After it backward() only waits for works and puts their
  results in place.
- exposed = backward_done - last_submitted. It includes waiting for a slower rank, and DDP's own
  bookkeeping: what a training step loses after its computation is done.
- hidden = time before last_submitted in which at least one work was in flight (the union of the
  intervals, so that works queued behind each other are not counted twice).
- input = taking the batch from memory, or waiting for it to be read ahead.
- a method that exchanges in the optimizer's step, or between steps, says how long it has waited
  for others and for transfers; that is exposed, too.
- compute = (end - begin) - input - exposed. What communication costs while it is hidden (shared
  cores and memory, the hook's own work) is part of it.
- scaling efficiency = compute / (compute + exposed): T_s / (T_s + T_c) with the communication that
  is not hidden as T_c.
- trial: after the run, steps with communication and steps under no_sync take turns, each from a
  barrier on. The ratio of their medians also sees what hidden communication takes from backward,
  and so is the stricter efficiency.

In a world of one there are no works: exposed and hidden are zero.

Invariants: this file only computes; it reads no clock and knows neither torch nor ringcomm.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import TypedDict, TypeVar

from ..intervals import Interval, covered

Step = TypeVar("Step")


class Traffic(TypedDict, total=False):
    """What the communication hook did since it was last asked, on this rank.

    buckets: all-reduces. payload_bytes: bytes of gradients. wire_bytes: payload bytes sent over
    ports. shared_bytes: put into memory that ranks of a host share.
    comm_s: seconds from submission to completion, summed. works: each one's interval.
    waited_s: seconds lost to communication after backward; may be left out.
    """

    buckets: int
    payload_bytes: int
    wire_bytes: int
    shared_bytes: int
    comm_s: float
    works: list[Interval]
    waited_s: float


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Seconds of one step; step = input + compute + exposed, hidden lies inside compute."""

    step: float
    input: float
    compute: float
    exposed: float
    hidden: float


def split_step(
    begin: float, input_done: float, backward_done: float, end: float, works: Sequence[Interval],
    waited: float = 0.0,
) -> StepTimes:  # fmt: skip
    """Split a step by the moments of the picture above; ``works`` holds (submitted, done), and
    ``waited`` are the seconds lost to communication after backward."""
    exposed, hidden = waited, 0.0
    if works:
        last_submitted = max(submitted for submitted, _ in works)
        exposed += max(0.0, backward_done - last_submitted)
        hidden = covered(works, last_submitted)
    taken = input_done - begin
    return StepTimes(end - begin, taken, end - begin - taken - exposed, exposed, hidden)


def means(steps: Sequence[StepTimes]) -> StepTimes:
    """Mean of each part, so that the parts still add up. Needs at least one step."""
    columns = zip(*(dataclasses.astuple(step) for step in steps), strict=True)
    return StepTimes(*(statistics.fmean(column) for column in columns))


def settled(steps: Sequence[Step]) -> Sequence[Step]:
    """The steps without the first few, in which DDP rebuilds its buckets and memory is found."""
    return steps[min(5, len(steps) // 2) :]


def efficiency(compute: float, exposed: float) -> float:
    """T_s / (T_s + T_c)."""
    return compute / (compute + exposed) if compute + exposed > 0 else 1.0
