"""Exact states of residuals: what one rank has left, for the same rank of a world of the same size.

What FeedbackStore.state_dict makes by itself fits a world of any size, as it holds what all ranks
lack together; a job that goes on from it follows the same curve, not the same bits. An exact state
is this rank's own residuals as they are, so that a job which goes on from it does so to the bit
(but by topk, which looks for a threshold in samples that are placed by the number of the call):

    exact         {"world_size": 4, "rank": 1}: the place that it belongs to
    worker        what is left of this rank's contributions: float32[count]
    owner         what is left of the results that it makes, from element owner_start on: float32
    padding       None, or what onebit-deepspeed has left after the tensor's end: worker, owner

Invariants: it holds tensors, strings and numbers only, so torch.load reads it with
weights_only=True. Another place refuses it, and changes nothing.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from .errors import ConfigError
from .residuals import Floats, Padding

Place = Mapping[str, int]

_OPS = (None, "sum", "avg", "gather")


@dataclasses.dataclass(frozen=True)
class ExactState:
    """One tensor's."""

    worker: Floats
    owner: Floats
    owner_start: int
    op: str | None
    loss_scale: float
    padding: Padding | None

    def told(self, place: Place) -> dict[str, Any]:
        """As it is kept."""
        padding = None
        if self.padding is not None:
            parts = (self.padding.worker, self.padding.owner)
            padding = dict(zip(("worker", "owner"), map(as_callers, parts), strict=True))
        return {
            "exact": dict(place), "op": self.op, "loss_scale": self.loss_scale,
            "worker": as_callers(self.worker), "owner": as_callers(self.owner),
            "owner_start": self.owner_start, "padding": padding,
        }  # fmt: skip


def is_exact(state: object) -> bool:
    """Whether it is one, of a tensor or of several."""
    return isinstance(state, Mapping) and "exact" in state


def require_place(state: Mapping[str, Any], place: Place, name: str) -> None:
    """Raises ConfigError unless the state belongs to this place."""
    there = state["exact"]
    if not isinstance(there, Mapping) or "world_size" not in there or "rank" not in there:
        raise ConfigError(f"{name}: this is no exact state: it does not say whose it is")
    if there["world_size"] != place["world_size"]:
        raise ConfigError(
            f"{name}: the state is exact, of a world of {there['world_size']}, and this is one of "
            f"{place['world_size']}; states that are saved without exact=True fit any"
        )
    if dict(there) != dict(place):
        raise ConfigError(
            f"{name}: the state is exact, of {_told(there)}, and this is {_told(place)}; each rank "
            "saves its own, in a file of its own, and loads that"
        )


def read(state: Mapping[str, Any], place: Place, name: str) -> ExactState:
    """What was kept. Raises ConfigError for another place's, or what is none."""
    require_place(state, place, name)
    wrong = ConfigError(f"{name}: this is no exact state of an ErrorFeedback")
    start, padding = state.get("owner_start"), state.get("padding")
    scale = state.get("loss_scale")
    if not isinstance(start, int) or state.get("op") not in _OPS:
        raise wrong
    if not isinstance(scale, float) or not 0 < scale < float("inf"):
        raise wrong
    worker, owner = (_floats(state.get(part), wrong) for part in ("worker", "owner"))
    if start < 0 or start + len(owner) > len(worker):
        raise wrong
    if padding is not None:
        if not isinstance(padding, Mapping):
            raise wrong
        parts = (_floats(padding.get(part), wrong) for part in ("worker", "owner"))
        padding = Padding((place["world_size"], place["rank"]), *parts)
    return ExactState(worker, owner, start, state["op"], scale, padding)


def as_callers(array: Floats) -> Any:
    """A torch tensor where torch has been imported, else the array."""
    torch = sys.modules.get("torch")
    return array if torch is None else torch.from_numpy(array)


def _floats(value: object, wrong: ConfigError) -> Floats:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):  # a tensor that numpy cannot see
        raise wrong from None
    if array.dtype != np.float32 or array.ndim != 1:
        raise wrong
    return array


def _told(place: Place) -> str:
    """ "rank 1 of 4", and what else there is of it."""
    known = ("rank", "world_size")
    more = [f"{name} {value}" for name, value in place.items() if name not in known]
    return ", ".join([f"rank {place['rank']} of {place['world_size']}", *more])
