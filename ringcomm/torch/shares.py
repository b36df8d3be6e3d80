"""Residuals of a rank's share of each parameter, and the checkpoint that has all shares joined.

Invariants: a checkpoint has the form of a FeedbackStore's state of whole parameters, so it fits
any number of hosts and ranks. A rank's own state names the rank's place in its host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ..errors import ConfigError
from ..exact import as_own, is_exact, place_of
from .grid import Grid

_KINDS = ("worker", "owner")


def place_in(grid: Grid) -> dict[str, int]:
    """Returns the name of a rank in its own state: its host among the hosts, its place there."""
    return {**place_of(grid.column), "places": grid.places, "place": grid.place}


class Shares:
    """Converts a store's states between one rank's shares and whole parameters.

    Args:
        count_of: returns the number of elements of the whole parameter of a name; None for an
            unknown one.
    """

    def __init__(self, grid: Grid, count_of: Callable[[str], int | None]) -> None:
        self._grid = grid
        self._count_of = count_of

    def joined(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Joins the row's shares in the store's state. A collective of the row; for a rank's own
        state it only adds the rank's place."""
        if is_exact(saved):
            return {**saved, "exact": place_in(self._grid)}
        return {**saved, "tensors": self._whole(saved["tensors"])}

    def divided(self, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        """Cuts this rank's share out of such a state; anything that is no state is returned for the
        store to refuse. Raises ConfigError for a state of another model, or a rank's own of another
        grid."""
        tensors = saved.get("tensors")
        if not isinstance(tensors, Mapping):
            return saved
        if is_exact(saved):
            own = as_own(saved, place_in(self._grid), "the hook")
            return {**own, "exact": place_of(self._grid.column)}
        return {**saved, "tensors": {name: self._share(name, one) for name, one in tensors.items()}}

    def _whole(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        names = sorted(tensors)
        mine = [np.asarray(tensors[name][kind]) for name in names for kind in _KINDS]
        if not mine:
            return {}
        rows = self._grid.row.allgather(np.concatenate(mine))
        joined, start = {}, 0
        for name in names:
            saved, length = dict(tensors[name]), len(tensors[name]["worker"])
            for kind in _KINDS:
                whole = rows[:, start : start + length].reshape(-1)[: self._count_of(name)]
                saved[kind] = torch.from_numpy(whole.copy())
                start += length
            joined[name] = saved
        return joined

    def _share(self, name: str, saved: Any) -> Any:
        count = self._count_of(name)
        if count is None or not isinstance(saved, Mapping) or not set(_KINDS) <= set(saved):
            return saved
        length = -(-count // self._grid.places)
        start, share = self._grid.place * length, dict(saved)
        for kind in _KINDS:
            values = np.asarray(saved[kind])
            if values.shape != (count,):
                raise ConfigError(
                    f"the state is of another model: {name!r} has {values.size} "
                    f"elements there and {count} here"
                )
            part = np.zeros(length, values.dtype)
            found = values[start : start + length]
            part[: len(found)] = found
            share[kind] = part
        return share
