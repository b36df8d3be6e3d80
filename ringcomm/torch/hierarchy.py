"""The hook where a host has several ranks: inside it by a torch process group, across by ringcomm.

With L ranks on each host, NCCL adds up what they have and leaves each with an L-th of the bucket;
ringcomm averages that among the ranks of equal place, so that a host's gradients cross once; NCCL
brings the shares together again (trips.py).

Invariants: what a rank keeps of a parameter is its share's residuals, under the parameter's name; a
checkpoint has them joined. A step that fails on one rank fails on all (grid.py), whatever they wait
for.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from ..codecs import Compression
from ..communicator import Communicator
from ..errors import ConfigError, RingcommError
from ..exact import is_exact, require_place
from ..feedback import FeedbackStore
from .grid import Grid
from .hooks import HookState, default_of
from .trips import Courier, Trip

if TYPE_CHECKING:
    from torch.distributed import GradBucket  # type: ignore[attr-defined]


class HierarchicalState(HookState):
    """A HookState for several ranks per host, joined inside it by a process group of torch.

        local, _ = dist.new_subgroups(8, backend="nccl")           # the ranks of this host
        state = HierarchicalState("int8", local_group=local, model=model)
        ddp.register_comm_hook(state, allreduce_hook)

    Making it is a collective of all ranks: they join in communicators of their own, which
    ``close()`` leaves.

    Args:
        compression, model, feedback, threshold, warmup_steps, scaler, force: as of HookState. What
            crosses between hosts is compressed; inside a host gradients are summed in their dtype.
        comm: the communicator of all ranks; None: that of the default process group if its backend
            is "ringcomm", else ringcomm's default one.
        local_group: the process group of this host's ranks, of any backend that has reduce-scatter
            and all-gather for the gradients' device. All hosts have equally many ranks. Nothing
            else should use it during backward.

    ``state_dict`` is of the form that HookState has, so a checkpoint fits either, and any number of
    hosts and ranks.

    Attributes:
        comm: the communicator of the ranks of equal place, one on each host; ``report()`` counts
            its bytes.

    Raises ConfigError on all ranks for local groups that do not divide them into equal hosts.
    """

    def __init__(
        self,
        compression: Compression | None = None,
        comm: Communicator | None = None,
        *,
        local_group: Any,
        model: torch.nn.Module | None = None,
        feedback: FeedbackStore | bool | None = None,
        threshold: int = 32 << 10,
        warmup_steps: int = 0,
        scaler: Any = None,
        force: bool = False,
    ) -> None:
        self._grid: Grid | None = _grid(comm, local_group)
        self._lock = threading.Lock()
        self._failed = threading.Event()
        self._trips: list[Trip] = []
        self._courier = Courier()
        super().__init__(
            compression, self._grid.column, model=model, feedback=feedback, threshold=threshold,
            warmup_steps=warmup_steps, scaler=scaler, force=force,
        )  # fmt: skip

    @property
    def grid(self) -> Grid:
        """Row and column. Raises ConfigError in a copy, which has none."""
        if self._grid is None:
            raise ConfigError("a copy of a HierarchicalState has no connections; make a new one")
        return self._grid

    def close(self) -> None:
        """Leaves the communicators that it made. The other ranks must be through with their steps,
        too."""
        if self._grid is not None:
            self._courier.end()
            self._grid.close()

    # ---- a step ----

    def _begin_bucket(self) -> None:
        begins = not self._step.running
        super()._begin_bucket()
        if begins:
            self.grid.watch(self._fail)

    def _launch(
        self, bucket: GradBucket, gradients: torch.Tensor, last: bool
    ) -> torch.futures.Future[torch.Tensor]:
        codec = self._codec_of(gradients)
        try:
            trip = Trip(self, bucket, codec, last)
        except RingcommError:
            raise
        except Exception as error:  # of the local group
            self._fail(RingcommError(f"the local group failed: {error}"))
            raise
        with self._lock:
            self._trips.append(trip)
        if self.error is not None:  # it failed meanwhile, and has not seen this one
            trip.end()
        self._end_bucket(last)
        self._courier.take(trip)
        future: torch.futures.Future[torch.Tensor] = trip.future
        return future

    def _forget(self, trip: Trip) -> None:
        with self._lock:
            if trip in self._trips:
                self._trips.remove(trip)

    def _fail(self, error: RingcommError) -> None:
        """Ends the step here and on all other ranks. From any thread, any number of times."""
        with self._lock:
            first = self.error is None
            if first:
                self.error = error
            trips = list(self._trips)
        self._failed.set()
        if first:
            self.grid.fail(error)
        for trip in trips:
            trip.end()

    # ---- residuals ----

    def _kept_of(self, parameter: torch.Tensor) -> int:
        return -(-parameter.numel() // self.grid.places)

    def state_dict(self, *, exact: bool = False) -> dict[str, Any]:
        """As HookState's, and of the same form, save an exact one: that is for a HierarchicalState
        of as many hosts, with as many ranks each."""
        state = super().state_dict(exact=exact)
        if "feedback" in state and exact:
            state["feedback"]["exact"] |= self._place()
        elif "feedback" in state:
            state["feedback"]["tensors"] = self._whole(state["feedback"]["tensors"])
        return state

    def _place(self) -> dict[str, int]:
        """Where in its host this rank is."""
        return {"places": self.grid.places, "place": self.grid.place}

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """As HookState's; of its states, too."""
        tensors = _tensors_of(state)
        if tensors is not None and is_exact(state["feedback"]):
            state = {**state, "feedback": self._without_place(state["feedback"])}
        elif tensors is not None and self._names:
            mine = {name: self._share(name, one) for name, one in tensors.items()}
            state = {**state, "feedback": {**state["feedback"], "tensors": mine}}
        super().load_state_dict(state, strict=strict)

    def _without_place(self, feedback: Mapping[str, Any]) -> dict[str, Any]:
        """An exact state as the store has it. Raises ConfigError if it is of another place."""
        comm, known = self.comm, {"world_size", "rank"}
        require_place(
            feedback, {"world_size": comm.world_size, "rank": comm.rank, **self._place()},
            "the state",
        )  # fmt: skip
        own = {name: value for name, value in feedback["exact"].items() if name in known}
        return {**feedback, "exact": own}

    def _whole(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Of all tensors, the row's shares one after the other."""
        names = sorted(tensors)
        mine = [np.asarray(tensors[name][kind]) for name in names for kind in ("worker", "owner")]
        if not mine:
            return {}
        rows = self.grid.row.allgather(np.concatenate(mine))
        joined, start = {}, 0
        for name in names:
            saved, length = dict(tensors[name]), len(tensors[name]["worker"])
            for kind in ("worker", "owner"):
                whole = rows[:, start : start + length].reshape(-1)[: self._count_of(name)]
                saved[kind] = torch.from_numpy(whole.copy())
                start += length
            joined[name] = saved
        return joined

    def _share(self, name: str, saved: Any) -> Any:
        """This rank's share of a saved tensor; what is none is left for the store to refuse."""
        count = self._count_of(name)
        if count is None or not isinstance(saved, Mapping) or not {"worker", "owner"} <= set(saved):
            return saved
        length = -(-count // self.grid.places)
        start, share = self.grid.place * length, dict(saved)
        for kind in ("worker", "owner"):
            values = np.asarray(saved[kind])
            if values.shape != (count,):
                raise ConfigError(f"the state is of another model: {name!r} has {values.size} "
                                  f"elements there and {count} here")  # fmt: skip
            part = np.zeros(length, values.dtype)
            found = values[start : start + length]
            part[: len(found)] = found
            share[kind] = part
        return share

    def _count_of(self, name: str) -> int | None:
        return next((p.numel() for p, known in self._names.values() if known == name), None)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._grid = None
        self._lock = threading.Lock()
        self._failed = threading.Event()
        self._trips = []
        self._courier = Courier()
        super().__setstate__(state)


def _grid(comm: Communicator | None, local_group: Any) -> Grid:
    return Grid(default_of(dist.group.WORLD) if comm is None else comm, local_group)


def _tensors_of(state: Any) -> Mapping[str, Any] | None:
    feedback = state.get("feedback") if isinstance(state, Mapping) else None
    tensors = feedback.get("tensors") if isinstance(feedback, Mapping) else None
    return tensors if isinstance(tensors, Mapping) else None
