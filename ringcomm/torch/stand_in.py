"""The Backend that torch's C++ knows of a group, and the way of a collective through it.

torch fires hooks (those of ``register_pre_hook``, its flight recorder and its NaN check) in its
dispatcher, on the way to a Backend; a process group in Python is called without the dispatcher. So
a collective that hooks shall see goes there first: by torch's own method and the StandIn to the
method of the group. Its caller gets the group's Work: around the one that passes through C++ is a
shell that knows wait() and get_future() alone. A tensor of a device that another backend serves
goes to a process group of torch's own, in which torch lets go of Python's lock, as gloo's and
NCCL's threads need; on the way through an overridden method it keeps it.

Invariants: a collective passes the hooks once. A StandIn keeps its group alive only where torch
made the ProcessGroup around it (``shrink``).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .untraced import leave_function_alone

_Base: Any = dist.ProcessGroup
_C10D: Any = torch._C._distributed_c10d
#: Whether torch has hooks, and asks the backends of a group for their names and abilities.
ASKS_BACKENDS = hasattr(_Base, "register_pre_hook")
MESSAGES = ("send", "recv", "recv_anysource")
COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("allgather", "all_gather_single", "allgather_coalesced", "all_gather_single_coalesced"),
    *("gather", "gather_single", "scatter", "alltoall", "all_to_all_single"),
)
NOT_CARRIED = ("gather_single",)  # for which torch's C++ asks no Backend in Python
_PASSED_ON = (
    *("get_error", "_get_sequence_number_for_group", "set_timeout", "shrink", "abort", "shutdown"),
)
_OPTIONS = tuple(kind for name, kind in vars(_C10D).items() if name.endswith("Options"))
_OLD_NAMES = {
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
    "gather_into_tensor": "gather_single",
}
#: Calls that torch has by single values, too: how many arguments come before these, the class of
#: options that has them, and their names.
_BY_VALUES: dict[str, tuple[int, Any, tuple[str, ...]]] = {
    "allreduce": (1, _C10D.AllreduceOptions, ("op", "timeout")),
    "broadcast": (1, _C10D.BroadcastOptions, ("root", "timeout")),
    "barrier": (0, _C10D.BarrierOptions, ("timeout",)),
    "reduce": (1, _C10D.ReduceOptions, ("root", "op", "timeout")),
    "reduce_scatter": (2, _C10D.ReduceScatterOptions, ("op", "timeout")),
    "allgather": (2, _C10D.AllgatherOptions, ("timeout",)),
    "gather": (2, _C10D.GatherOptions, ("root", "timeout")),
    "scatter": (2, _C10D.ScatterOptions, ("root", "timeout")),
    "all_to_all_single": (4, _C10D.AllToAllOptions, ("timeout",)),
}
_FIELDS = {"op": "reduceOp", "root": "rootRank"}  # of options, where they differ from the names


class _Passing(threading.local):
    """Works of this thread's collectives on their way through C++, the innermost last."""

    def __init__(self) -> None:
        self.boxes: list[list[Any]] = []


_passing = _Passing()


def lead_through_torch(group_class: Any) -> None:
    """Has each collective and message of a group's class go to the group that ``elsewhere(args)``
    returns; else pass torch's dispatcher where ``goes_by_torch(name, args)`` says so, and then run
    by ``run(name, method, args, named)``: three methods of the class, none of which is asked while
    ``is_alone``. Older names are aliases, but where torch's own call the newer ones, which the
    class inherits."""
    for name in (*COLLECTIVES, *MESSAGES):
        setattr(group_class, name, _led(name, getattr(group_class, name)))
    for old, name in _OLD_NAMES.items():
        if not ASKS_BACKENDS or name in NOT_CARRIED:
            setattr(group_class, old, getattr(group_class, name))


def _led(name: str, own: Callable[..., Any]) -> Any:
    by_torch = getattr(_Base, name, None)
    counts = int(name not in MESSAGES)
    first, kind, _ = _BY_VALUES.get(name, (0, None, ()))

    def led(self: Any, *args: Any, **named: Any) -> Any:
        if self.is_alone:  # what follows shows in the time of a small collective
            self.collectives += counts
            if kind is not None and (len(args) <= first or type(args[first]) is not kind):
                args, named = _with_options(name, args, named)
            return own(self, *args, **named)
        given = (*args, *named.values())
        elsewhere = self.elsewhere(given)
        if elsewhere is not None:
            return getattr(elsewhere, name)(*args, **named)
        if not self.goes_by_torch(name, given):
            return self.run(name, own, *_with_options(name, args, named))
        box: list[Any] = []
        _passing.boxes.append(box)
        try:
            shell = by_torch(self, *args, **named)  # type: ignore[misc]
        finally:
            _passing.boxes.pop()
        return box[0] if box else shell

    functools.update_wrapper(led, own)
    # By a caller of this name pybind11 knows that an overriding method calls the overridden one.
    led.__code__ = led.__code__.replace(co_name=name)
    return leave_function_alone(led)


def _with_options(name: str, args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns a call's arguments with options in place of single values; as they are, where they
    fit no call of torch's by values, and the method refuses what is wrong."""
    if name not in _BY_VALUES or "opts" in named:
        return args, named
    first, kind, names = _BY_VALUES[name]
    given = args[first:]
    if len(given) > len(names) or any(isinstance(one, _OPTIONS) for one in given):
        return args, named
    options, others = kind(), dict(named)
    values = [*zip(names, given, strict=False), *((n, others.pop(n, None)) for n in names)]
    for key, value in values:
        if value is not None:
            setattr(options, _FIELDS.get(key, key), value)
    return args[:first], {**others, "opts": options}


def is_torchs(name: str, args: Sequence[Any]) -> bool:
    """Returns whether torch's own method takes these arguments, as they come from torch; ours may
    be called with fewer."""
    if name in MESSAGES:
        return len(args) == (2 if name == "recv_anysource" else 3)
    return name not in NOT_CARRIED and bool(args) and isinstance(args[-1], _OPTIONS)


def place_of(args: Sequence[Any]) -> str:
    """Returns the device type of the first tensor in a call's arguments, or "sparse" for one that
    no dispatcher takes; without tensors that of a barrier's options, or "cpu"."""
    for given in args:
        while isinstance(given, (list, tuple)) and given:
            given = given[0]
        if isinstance(given, torch.Tensor):
            return given.device.type if given.layout == torch.strided else "sparse"
    device = getattr(args[-1], "device", None) if args else None
    return "cpu" if device is None else str(device.type)


@functools.cache
def stand_in_class() -> Any:
    """Makes the class of StandIns; torch before 2.14 has no use for them."""

    class StandIn(_C10D.Backend):  # type: ignore[misc]
        """Backend of one group.

        Args:
            group: returns the group.
        """

        def __init__(self, group: Callable[[], Any], rank: int, size: int) -> None:
            super().__init__(rank, size)
            self.group = group

        @property
        def options(self) -> Any:
            return _C10D.Backend.Options("ringcomm")

        def getBackendName(self) -> str:  # noqa: N802 (torch's)
            return "ringcomm"

    for name in {*COLLECTIVES, *MESSAGES}.difference(NOT_CARRIED):
        setattr(StandIn, name, _carried(name))
    for name in _PASSED_ON:
        setattr(StandIn, name, _passed_on(name))
    # C++ looks up each property that a subclass does not define in the subclass again: an endless
    # recursion.
    for name in dir(_C10D.Backend):
        if "supports_" in name and isinstance(getattr(_C10D.Backend, name), property):
            setattr(StandIn, name, name == "supports_shrinking")
    return StandIn


def _carried(name: str) -> Any:
    def method(self: Any, *args: Any) -> Any:
        group = self.group()
        work = group.run(name, getattr(type(group), name).__wrapped__, args, {})
        if _passing.boxes:
            _passing.boxes[-1].append(work)
        return work

    return leave_function_alone(method)


def _passed_on(name: str) -> Any:
    def method(self: Any, *args: Any) -> Any:
        return getattr(self.group(), name)(*args)

    return leave_function_alone(method)
