"""ErrorFeedback and FeedbackStore: residuals that outlive the job.

Residuals differ from rank to rank, and their number depends on the number of ranks. But only the
sum that all results so far lack matters: the mean (of sums: the sum) of the workers' residuals,
and the owners' residuals. So a checkpoint holds

    worker   mean, or sum, over all ranks of the residuals of their contributions: float32[count]
    owner    residuals of the results, whichever rank has them:                    float32[count]

whatever the world size (``gather_state_dict``). A restart gives each rank an equal share of worker
(of a mean: the mean), and its part of owner. So the sum that all results lack is the same, and the
bits of later results may differ from those of the unbroken job. Each rank's own, exact state keeps
those (exact.py).

Invariants: a state holds tensors, strings and numbers only, so torch.load reads it with
weights_only=True. A load that raises changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .api import given_or_default
from .codecs import BLOCK
from .communicator import Communicator, require_same
from .core.calls import naming
from .core.residuals import Floats, Residuals, require_scale
from .errors import ConfigError
from .exact import (
    as_callers,
    as_own,
    is_exact,
    place_of,
    require_format,
    residuals_of,
    without_exact,
)

_FORMAT = 1
_MOST_ELEMENTS = 2 << 20  # elements of tensors that one all-reduce saves together


class ErrorFeedback(Residuals):
    """Error feedback of one tensor: adds rounding errors of lossy collectives to its next call.

        feedback = ringcomm.ErrorFeedback()               # one for each tensor, kept over all steps
        for step in range(steps):
            ringcomm.allreduce(gradient, "avg", compression="int4", feedback=feedback)

    A call changes it only if it succeeds, with a finite result. It takes two to 2.7 times
    the memory of the tensor as float32, in host memory. The codec may change from call to
    call; none, bf16 or fp16 delivers all residuals. It cannot be pickled or copied: see
    ``state_dict``.
    """

    @without_exact
    def state_dict(self, comm: Communicator | None = None) -> dict[str, Any]:
        """Returns this rank's own residuals, with which the same rank of a world of the same size
        continues bit by bit. Nothing is sent; each rank saves its own.

        Args:
            comm: the communicator on which it was used; None: the default one.

        Returns:
            ``worker``, float32[count], and ``owner``, float32, for the elements from
            ``owner_start`` on (torch tensors if torch has been imported, else numpy arrays),
            ``op``, ``loss_scale``, ``format``, and in ``exact`` the rank it belongs to.

        Raises ConfigError while a collective in flight uses it.
        """
        start, owner = self.owner_part()
        return {
            "format": _FORMAT,
            "exact": dict(place_of(given_or_default(comm))),
            "op": self._op,
            "loss_scale": self._loss_scale,
            "worker": as_callers(self.worker),
            "owner": as_callers(owner),
            "owner_start": start,
        }

    @naming("gather_state_dict() of ErrorFeedback")
    def gather_state_dict(self, comm: Communicator | None = None) -> dict[str, Any]:
        """Returns the residuals of all ranks together, for a world of any size. A collective: all
        ranks call it and get the same. It costs an all-reduce of two float32 per element.

        Args:
            comm: the communicator on which it was used; None: the default one.

        Returns:
            ``worker`` and ``owner``, float32[count] each (torch tensors or numpy arrays, as
            above), ``op``, ``loss_scale`` and ``format``.

        Raises:
            ConfigError: a collective in flight uses it, or an all-gather made it.
            MismatchError: the ranks' residuals differ in size or op, or not all ranks call it.
            RingcommError: as ``allreduce``.
        """
        return _save([self], [""], given_or_default(comm))[0]

    def load_state_dict(self, state: Mapping[str, Any], comm: Communicator | None = None) -> None:
        """Restores a state of ``state_dict`` or ``gather_state_dict``. Nothing is sent; each
        rank loads its own, or all load the same.

        Args:
            comm: the communicator on which it is going to be used; None: the default one.

        Raises:
            ConfigError: the state is invalid, of another size, or a rank's own in a world of
                another size; or the feedback is in use. (Another rank's own, of a world of this
                size, is taken as zero, with a warning.)
        """
        comm = given_or_default(comm)
        if is_exact(state):
            state = as_own(state, place_of(comm), self.name)
        self._take(_read(state, self.name, comm), comm)

    def _take(self, state: _State, comm: Communicator) -> None:
        worker, owner, start = state.worker, state.owner, state.owner_start
        if start is None:
            # The elements of an all-reduce whose results this rank makes. (If a later call divides
            # them otherwise, the core adds owner residuals that no longer fit to the worker's.)
            size = -(-len(worker) // comm.world_size)
            size += -size % BLOCK
            start = min(comm.rank * size, len(worker))
            worker, owner = worker * _share(state.op != "avg", comm), owner[start : start + size]
        self.load(worker, owner, start)
        self._op, self._loss_scale = state.op, state.loss_scale


class FeedbackStore:
    """ErrorFeedbacks by name: ``store["layer1.weight"]`` makes one if there is none yet.

    All ranks use the same names. After ``load_state_dict`` no new ones are made, so that restored
    residuals cannot stay unused under a name that has changed.
    """

    def __init__(self) -> None:
        self._items: dict[str, ErrorFeedback] = {}
        self._loss_scale = 1.0
        self._restored = False

    def __getitem__(self, name: str) -> ErrorFeedback:
        """Returns the ErrorFeedback of a name, made if need be. Raises ConfigError for a name that
        is no string, or is not among the restored ones."""
        found = self._items.get(name) if isinstance(name, str) else None
        if found is not None:
            return found
        if self._restored:
            raise ConfigError(
                f"the store was restored from a checkpoint without {name!r}: is it of another "
                "model? load_state_dict(..., strict=False) allows new names"
            )
        return self.add(name)

    def add(self, name: str, count: int | None = None) -> ErrorFeedback:
        """Makes the ErrorFeedback of a tensor of count elements. Raises ConfigError if the name
        exists or is no string."""
        if not isinstance(name, str) or name in self._items:
            raise ConfigError(f"{name!r}: give a name, as a string, that the store does not have")
        made = ErrorFeedback(count)
        made.name = f"the feedback of {name!r}"
        made.loss_scale = self._loss_scale
        self._items[name] = made
        return made

    def remove(self, name: str) -> None:
        """Drops the ErrorFeedback of a name, with its residuals."""
        del self._items[name]

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    @property
    def loss_scale(self) -> float:
        """Factor that all gradients contain. Setting another one rescales all residuals; raises
        ConfigError unless it is positive and finite, or while a feedback is in use."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        require_scale("loss_scale", scale)
        if scale != self._loss_scale:
            self._each(lambda one: setattr(one, "loss_scale", scale))
            self._loss_scale = float(scale)

    def rescale(self, factor: float) -> None:
        """Calls ErrorFeedback.rescale on all."""
        require_scale("factor", factor, least=0.0)
        self._each(lambda one: one.rescale(factor))

    def _each(self, change: Callable[[ErrorFeedback], None]) -> None:
        for one in self._items.values():
            one.require_idle()
        for one in self._items.values():
            change(one)

    @without_exact
    def state_dict(self, comm: Communicator | None = None) -> dict[str, Any]:
        """Returns ErrorFeedback.state_dict of all: ``tensors`` by name, ``loss_scale``, ``format``,
        and in ``exact`` the rank it belongs to. Nothing is sent."""
        comm = given_or_default(comm)
        tensors = {name: one.state_dict(comm) for name, one in sorted(self._items.items())}
        return {**self._state_of(tensors), "exact": dict(place_of(comm))}

    @naming("gather_state_dict() of FeedbackStore")
    def gather_state_dict(self, comm: Communicator | None = None) -> dict[str, Any]:
        """Returns ErrorFeedback.gather_state_dict of all: ``tensors`` by name, ``loss_scale`` and
        ``format``. A collective; small tensors share all-reduces."""
        names = sorted(self._items)
        saved = _save([self._items[name] for name in names], names, given_or_default(comm))
        return self._state_of(dict(zip(names, saved, strict=True)))

    def saved(self, comm: Communicator, *, own: bool) -> dict[str, Any]:
        """Returns ``state_dict`` or, by a collective, ``gather_state_dict``."""
        return self.state_dict(comm) if own else self.gather_state_dict(comm)

    def _state_of(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        return {"format": _FORMAT, "loss_scale": self._loss_scale, "tensors": tensors}

    def load_state_dict(
        self, state: Mapping[str, Any], comm: Communicator | None = None, *, strict: bool = True
    ) -> None:
        """Restores a state of ``state_dict`` or ``gather_state_dict``, as
        ErrorFeedback.load_state_dict does.

        Args:
            strict: names must be the same if the store has any, and no new ones are made from
                now on. False: names missing in the state start from zero, names missing in the
                store are left out, unless it is empty.

        Raises:
            ConfigError: the state is invalid, or of another model; names the missing, unexpected
                or differently sized tensors. Or it is a rank's own of a world of another size.
        """
        if not isinstance(state, Mapping) or not isinstance(state.get("tensors"), Mapping):
            raise ConfigError("this is no state of a FeedbackStore: it has no 'tensors'")
        require_format(state, _FORMAT, "the store")
        scale = state.get("loss_scale")
        require_scale("the state's loss_scale", scale)
        comm = given_or_default(comm)
        if is_exact(state):
            state = as_own(state, place_of(comm), "the store")
        known = {name: _read(one, repr(name), comm) for name, one in state["tensors"].items()}
        self._require_same(known, strict)
        for one in self._items.values():
            one.require_idle()  # before anything is changed
        taken = [name for name in known if name in self._items] if self._items else known
        for name in taken:
            (self._items.get(name) or self.add(name))._take(known[name], comm)
        self._loss_scale = float(scale)  # type: ignore[arg-type]
        for one in self._items.values():
            one.loss_scale = self._loss_scale
        self._restored = strict

    def _require_same(self, known: Mapping[str, _State], strict: bool) -> None:
        differing = (
            (self._items.keys() - known.keys(), "it lacks {}"),
            (known.keys() - self._items.keys(), "it has {}, unknown here"),
        )
        found = [
            what.format(_listed(sorted(names)))
            for names, what in differing
            if names and strict and self._items
        ]
        for name in sorted(known.keys() & self._items.keys()):
            here, there = self._items[name].count, len(known[name].worker)
            if there and here not in (None, there):
                found.append(f"{name!r} has {there} elements there and {here} here")
        if found:
            more = [f"and {len(found) - 4} more"] if len(found) > 5 else []
            raise ConfigError(
                "the state is of another model: " + "; ".join([*found[: 4 if more else 5], *more])
            )


# ---- states ----


@dataclasses.dataclass(frozen=True)
class _State:
    """Checked state of one tensor: a rank's own, or gathered, with owner_start None."""

    worker: Floats
    owner: Floats
    owner_start: int | None
    op: str | None
    loss_scale: float


def _read(state: object, name: str, comm: Communicator) -> _State:
    if not isinstance(state, Mapping) or not {"worker", "owner", "op"} <= set(state):
        raise ConfigError(
            f"{name}: this is no state of an ErrorFeedback: it must have 'worker', 'owner' and 'op'"
        )
    require_format(state, _FORMAT, name)
    require_scale(f"{name}: loss_scale", state.get("loss_scale"))
    worker, owner, start = residuals_of(state, name)
    own = is_exact(state)
    if own and state["exact"] != dict(place_of(comm)):
        raise ConfigError(f"{name}: this is no state_dict() of an ErrorFeedback")
    if state["op"] not in (None, "sum", "avg") and not (own and state["op"] == "gather"):
        raise ConfigError(f"{name}: the state's op is {state['op']!r}; it must be sum or avg")
    return _State(worker, owner, start, state["op"], float(state["loss_scale"]))


def _save(
    items: Sequence[ErrorFeedback], names: Sequence[str], comm: Communicator
) -> list[dict[str, Any]]:
    for one in items:
        one.require_idle()
        if one._op == "gather":
            raise ConfigError(
                f"{one.name} was made by all-gathers: it belongs to this rank's own tensor, and "
                "has no form that is independent of the number of ranks; save state_dict() on each "
                "rank"
            )
    about = [(name, one.count, one._op) for name, one in zip(names, items, strict=True)]
    require_same(comm, about, "residuals to save (by name, size and op)")
    return [
        {
            "format": _FORMAT,
            "op": one._op,
            "loss_scale": one.loss_scale,
            "worker": as_callers(worker),
            "owner": as_callers(owner),
        }
        for group in _groups(items)
        for one, worker, owner in zip(group, *_gathered(group, comm), strict=True)
    ]


def _groups(items: Sequence[ErrorFeedback]) -> Iterator[list[ErrorFeedback]]:
    group: list[ErrorFeedback] = []
    filled = 0
    for one in items:
        if group and filled + (one.count or 0) > _MOST_ELEMENTS:
            yield group
            group, filled = [], 0
        group.append(one)
        filled += one.count or 0
    if group:
        yield group


def _gathered(
    group: Sequence[ErrorFeedback], comm: Communicator
) -> tuple[list[Floats], list[Floats]]:
    """Sums or averages worker residuals, as the op does, and sums owner residuals, by one
    all-reduce; returns both lists."""
    counts = [one.count or 0 for one in group]
    both = np.zeros((2, sum(counts)), np.float32)
    ends = np.cumsum(counts)
    for one, end, count in zip(group, ends, counts, strict=True):
        start, owner = one.owner_part()
        start += end - count
        both[0, end - count : end] = one.worker
        both[1, start : start + len(owner)] = owner
    comm.allreduce(both, "sum")
    workers, owners = (
        [row[end - count : end].copy() for end, count in zip(ends, counts, strict=True)]
        for row in both
    )
    for one, worker in zip(group, workers, strict=True):
        worker *= _share(one._op == "avg", comm)
    return workers, owners


def _share(divides: bool, comm: Communicator) -> np.float32:
    return np.float32(1 / comm.world_size if divides else 1)  # type: ignore[no-any-return]


def _listed(names: Sequence[object]) -> str:
    shown = ", ".join(map(repr, names[:3]))
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
