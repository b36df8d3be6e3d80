"""States for checkpoints: a rank's own, for the same rank of a world of the same size, and gathered
ones.

    state_dict()         this rank's own, exact state; nothing is sent; a restart has the same bits
    gather_state_dict()  residuals of all ranks together, by a collective; the same on all ranks and
                         for a world of any size; a restart has the same curve, not the same bits
    load_state_dict()    takes either

An own state of residuals has these keys, among others; a gathered one has no ``exact``:

    exact         {"world_size": 4, "rank": 1}: the place that it belongs to
    worker        residual of this rank's contributions: float32[count]
    owner         residual of the results that it makes: float32
    owner_start   index of the first of them

Another rank of a world of this size may load it, e.g. if only rank 0 has saved: its residuals then
start from zero, with a warning. In a world of another size it is refused.

Invariants: a state holds tensors, strings and numbers only, so torch.load reads it with
weights_only=True. A state that is refused changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard, TypeVar

import numpy as np

from .communicator import Communicator
from .config import names_arguments
from .core.calls import naming
from .core.faces.torch import torch_of_caller
from .core.residuals import Floats
from .errors import ConfigError, warn_caller

Place = Mapping[str, int]
"""``world_size`` and ``rank``; with torch/shares.py also ``places`` and ``place`` on this host."""
F = TypeVar("F", bound=Callable[..., Any])


def place_of(comm: Communicator) -> Place:
    """Returns this rank's place."""
    return {"world_size": comm.world_size, "rank": comm.rank}


def is_exact(state: object) -> TypeGuard[Mapping[str, Any]]:
    """True for a rank's own state, of a tensor or of several."""
    return isinstance(state, Mapping) and "exact" in state


def is_own(state: Mapping[str, Any], place: Place, name: str) -> bool:
    """True if an exact state belongs to this rank; warns if it belongs to another rank of a world
    of the same size.

    Args:
        place: place of this rank.
        name: name of the object that loads it, for messages.

    Raises ConfigError in a world of another size, or for a state that names no rank.
    """
    there = require_world(state, place, name)
    if dict(there) == dict(place):
        return True
    warn_caller(
        f"{name}: {_whose(there, place)}: what only that rank had, as residuals, starts from zero. "
        "Save state_dict() on each rank, in a file of its own, or gather_state_dict(), the same on "
        "all ranks"
    )
    return False


def require_world(state: Mapping[str, Any], place: Place, name: str) -> Place:
    """Returns the place in an exact state. Raises ConfigError as ``is_own``."""
    there: Place = state["exact"]
    if not isinstance(there, Mapping) or "world_size" not in there or "rank" not in there:
        raise ConfigError(f"{name}: this is no state of a rank alone: it does not say whose")
    if any(there.get(size) != place.get(size) for size in ("world_size", "places")):
        raise ConfigError(
            f"{name}: {_whose(there, place)}: state_dict() is for a world of the same size; "
            "gather_state_dict(), which all ranks call, makes states for any"
        )
    return there


def require_format(state: Mapping[str, Any], known: int, name: str) -> None:
    """Raises ConfigError for a state of another format than the one that this version reads."""
    if state.get("format") != known:
        raise ConfigError(
            f"{name}: the state has format {state.get('format')!r}; this version reads {known}"
        )


def _whose(there: Place, here: Place) -> str:
    return f"the state belongs to {_format_place(there)} alone, and this is {_format_place(here)}"


def as_own(state: Mapping[str, Any], place: Place, name: str) -> Mapping[str, Any]:
    """Returns an exact state as this rank's: unchanged, or without residuals if it is another
    rank's. Warns and raises as ``is_own``."""
    return state if is_own(state, place, name) else _without_residuals(state, place)


def _without_residuals(state: Mapping[str, Any], place: Place) -> Mapping[str, Any]:
    """Returns a copy of a state without residuals, for this place; leaves what is invalid as it
    is, for the reader to refuse."""
    empty = {**state, "exact": dict(place)}
    if isinstance(state.get("tensors"), Mapping):
        inner = {name: place[name] for name in ("world_size", "rank")}
        empty["tensors"] = {
            name: _without_residuals(one, inner) if isinstance(one, Mapping) else one
            for name, one in state["tensors"].items()
        }
    elif hasattr(state.get("worker"), "__len__"):
        zeros = np.zeros(len(state["worker"]), np.float32)
        empty.update(worker=zeros, owner=zeros[:0], owner_start=0)
    return empty


def without_exact(state_dict: F) -> F:
    """Wraps a ``state_dict`` to refuse the removed argument ``exact=`` and name its replacement."""
    gone = (
        "is gone: the state is always this rank's own, exact, and sends nothing; "
        "gather_state_dict(), which all ranks call, is for a world of any size"
    )
    return names_arguments(state_dict, removed={"exact": gone})


class Checkpointed:
    """Base of objects that have a state for checkpoints."""

    def saved(self, *, own: bool) -> dict[str, Any]:
        """Returns this rank's own state; or the gathered one, by a collective."""
        raise NotImplementedError

    @without_exact
    def state_dict(self) -> dict[str, Any]:
        """State of this rank, with which the same rank of a world of the same size continues to the
        bit. Nothing is sent; each rank saves its own, in a file of its own. Raises ConfigError
        while an exchange of it is in flight that the state cannot hold."""
        return self.saved(own=True)

    def gather_state_dict(self) -> dict[str, Any]:
        """State for a world of any size, the same on all ranks. Training continues from it along
        the same curve, though not to the bit. A collective.

        Raises:
            ConfigError: as ``state_dict``.
            MismatchError: the ranks' states differ in size, or not all ranks call it.
            RingcommError: as ``allreduce``.
        """
        with naming(f"gather_state_dict() of {type(self).__name__}"):
            return self.saved(own=False)


def as_callers(array: Floats) -> Any:
    """Converts an array to a torch tensor if torch has been imported; else returns it."""
    torch = torch_of_caller()
    return array if torch is None else torch.from_numpy(array)


def floats_of(value: object) -> Floats | None:
    """Returns residuals of a state as an array; None for all but float32 of one dimension."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):  # a tensor that numpy cannot see
        return None
    return array if array.dtype == np.float32 and array.ndim == 1 else None


def residuals_of(state: Mapping[str, Any], name: str) -> tuple[Floats, Floats, int | None]:
    """Returns ``worker``, ``owner`` and ``owner_start`` of a tensor's state; the start is None in a
    gathered one. Raises ConfigError, with the name of who loads it, where they do not fit."""
    worker, owner = (floats_of(state.get(part)) for part in ("worker", "owner"))
    if worker is None or owner is None:
        raise ConfigError(
            f"{name}: the residuals of a state are float32 of one dimension, in host memory"
        )
    if not is_exact(state):
        if len(worker) != len(owner):
            raise ConfigError(
                f"{name}: the state has {len(worker)} residuals of the workers and "
                f"{len(owner)} of the owners; it must be as many"
            )
        return worker, owner, None
    start = state.get("owner_start")
    if not isinstance(start, int) or not 0 <= start <= len(worker) - len(owner):
        raise ConfigError(f"{name}: this is no state_dict() of a rank: its owner_start is {start}")
    return worker, owner, start


def _format_place(place: Place) -> str:
    """Formats a place as "rank 1 of 4", or "place 0 of 2 on host 1 of 4"."""
    text = f"rank {place['rank']} of {place['world_size']}"
    if "places" in place:
        text = f"place {place['place']} of {place['places']} on host {text.removeprefix('rank ')}"
    return text
