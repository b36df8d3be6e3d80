"""Submission of a process group's collectives to the core.

Each method gives the calls of its collective (Call), and a function to run when they are over;
``_start`` submits them, and waits if the caller is going to.

Invariant: a method checks its arguments before it starts anything.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..communicator import Communicator
from ..core import cuda
from ..core.faces.torch import torch_stream
from ..core.native import lib
from ..core.views import DeviceView, View
from ..core.work import Work
from ..errors import NotInitializedError
from . import detail, profiling
from .options import Options
from .tensors import MetaView, moved, staged
from .works import RingWork, seconds_of

Tensors = list[torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Call:
    """Arguments of one call of Communicator.run_collective."""

    collective: int
    src: View | None
    dst: View | None
    count: int
    op: str = "sum"
    root: int | None = 0
    tag: int = 0
    compression: str | None = None


def one(tensors: Any, what: str) -> torch.Tensor:
    """Returns the tensor of a list of one: torch passes lists, which once had a tensor per
    device."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if not isinstance(tensors, (list, tuple)) or len(tensors) != 1:
        raise ValueError(f"{what}: ringcomm takes one tensor, not {len(tensors)}")
    if not isinstance(tensors[0], torch.Tensor):
        raise TypeError(f"{what}: {type(tensors[0]).__name__} is not a tensor")
    return tensors[0]


def root_of(opts: Any) -> int:
    """Returns the root of an options object."""
    return int(getattr(opts, "rootRank", 0))


def moving_call(
    collective: int,
    source: torch.Tensor | None,
    target: torch.Tensor | None,
    root: int | None = 0,
    tag: int = 0,
) -> Call:
    """Returns the call of a collective that moves elements unchanged from one tensor to another;
    None: this rank has none. The larger tensor holds the parts of all ranks."""
    src = None if source is None else moved(source, writable=False)
    dst = None if target is None else moved(target, writable=True, reads=False)
    count = min(view.count for view in (src, dst) if view is not None)
    return Call(collective, src, dst, count, root=root, tag=tag)


def alike(call: Call) -> Call:
    """Returns the call with both tensors on the same way: by the device pipeline, or staged."""
    src, dst = call.src, call.dst
    if src is None or dst is None or isinstance(src, DeviceView) == isinstance(dst, DeviceView):
        return call
    if isinstance(src, DeviceView):
        return dataclasses.replace(call, src=staged(src.owner, writable=False))
    return dataclasses.replace(call, dst=staged(dst.owner, writable=True, reads=False))


def precede_chosen(calls: Sequence[Call]) -> None:
    """Makes the stream of ``cuda.stream``, which the calls follow, wait for torch's current stream,
    on which their tensors were made."""
    chosen = cuda.chosen_stream()
    if chosen is None:
        return
    views = [view for call in calls for view in (call.src, call.dst)]
    for device in {view.owner.device for view in views if isinstance(view, DeviceView)}:
        torch_stream(torch, chosen, device).wait_stream(torch.cuda.current_stream(device))


class Submitter:
    """Base of the parts of a group.

    Attributes:
        comm: its ringcomm.Communicator, with methods that torch lacks (``stats()``, ``rails``).
        options: its Options.
    """

    _comm: Communicator | None
    _options: Options
    _coalescing: list[RingWork] | None
    _detailed: bool
    _checks_nan: bool
    _undelivered: set[RingWork]  # asynchronous works whose ``after`` has not run

    @property
    def comm(self) -> Communicator:
        """Communicator of the group's ranks. Raises NotInitializedError where none is joined."""
        if self._comm is None:
            raise NotInitializedError("this process group has no ranks yet: call its reconfigure()")
        return self._comm

    def _start(
        self,
        name: str,
        calls: Sequence[Call],
        tensors: Tensors,
        opts: Any = None,
        after: Callable[[], None] | None = None,
        earlier: Sequence[Work] = (),
    ) -> RingWork:
        """Submits the calls of one collective; waits for them if the caller is going to.

        Args:
            tensors: the result.
            after: runs on this rank when the calls are over.
            earlier: other works that the result waits for.
        """
        if any(isinstance(view, MetaView) for call in calls for view in (call.src, call.dst)):
            return RingWork.finished(list(tensors))
        if self._checks_nan:
            rank = self.comm.rank  # a broadcast has its target as source everywhere
            sends = [c for c in calls if c.collective != lib.RC_BROADCAST or c.root == rank]
            detail.require_no_nan(name, [call.src for call in sends if call.src is not None])
        if self._detailed:
            detail.compare(self.comm, name, tensors)

        submit = functools.partial(self._submit, calls, tensors, opts, after, earlier)
        return profiling.recorded(name, submit) if profiling.is_on() else submit()

    def _in_place(
        self,
        collective: int,
        tensor: torch.Tensor,
        opts: Any,
        op: str = "sum",
        compression: str | None = None,
        root: int = 0,
    ) -> RingWork | None:
        """Submits a collective that reads and writes one plain tensor, without a View of it; waits
        for it if the caller is going to.

        Returns None, and has submitted nothing, for any other tensor, and where ``_start`` has more
        to do: for checks, a profiler, coalescing or a timeout.
        """
        watched = self._detailed or self._checks_nan or self._coalescing is not None
        if watched or profiling.is_on() or seconds_of(getattr(opts, "timeout", None)) is not None:
            return None
        if getattr(opts, "asyncOp", True):
            part = self.comm.submit_in_place(tensor, collective, op, compression, root)
            return None if part is None else RingWork((part,), [tensor])
        if self.comm.run_in_place(tensor, collective, op, compression, root):
            return RingWork.finished([tensor])
        return None

    def _submit(
        self,
        calls: Sequence[Call],
        tensors: Tensors,
        opts: Any,
        after: Callable[[], None] | None,
        earlier: Sequence[Work],
    ) -> RingWork:
        at_once = not getattr(opts, "asyncOp", True) and self._coalescing is None
        timeout = seconds_of(getattr(opts, "timeout", None))
        alone = at_once and len(calls) == 1 and not earlier
        precede_chosen(calls)
        parts = [
            self.comm.run_collective(
                call.collective,
                call.src,
                call.dst,
                call.count,
                op=call.op,
                root=call.root,
                tag=call.tag,
                compression=call.compression,
                async_op=not alone,
                timeout=timeout,
            )
            for call in map(alike, calls)
        ]
        used = [
            view.owner
            for call in calls
            for view in (call.src, call.dst)
            if after is not None and isinstance(view, DeviceView)
        ]
        work = RingWork(() if alone else [*parts, *earlier], tensors, after, used)
        if at_once:
            work.wait()
        elif after is not None or any(call.dst is not None and call.dst.is_copy for call in calls):
            if after is not None:  # else the part writes its copy back
                self._undelivered.add(work)
            work.deliver(self._undelivered.discard)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _require_world(self, tensors: Any, what: str) -> None:
        if len(tensors) != self.comm.world_size:
            raise ValueError(
                f"{what}: give a list of {self.comm.world_size} tensors, one for each rank of the "
                f"group, not {len(tensors)}"
            )
