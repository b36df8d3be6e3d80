"""Backend "ringcomm" of torch.distributed: a process group whose collectives are ringcomm's.

torch calls one method per collective, with lists of tensors and an options object, and gets a
Work: reducing.py, moving.py and messaging.py define them. This file has a group's names, and its
end.

Invariants: every method of torch's interface exists under both of its names, where releases differ.
The group closes its communicator when torch shuts it down, or when it is no longer referenced.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..api import default_communicator
from ..communicator import Communicator
from ..errors import RingcommError
from . import detail
from .messaging import Messaging
from .moving import Moving
from .options import Options
from .reducing import Reducing
from .works import seconds_of

_Base: Any = dist.ProcessGroup
_C10D: Any = torch._C._distributed_c10d
_ASKS_BACKENDS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)
_GRACE = 0.5  # seconds to wait for a message, which is never over if its peer does not take it


class RingcommGroup(Reducing, Moving, Messaging, _Base):  # type: ignore[misc]
    """A process group, as ``dist.init_process_group("ringcomm")`` and ``new_group`` make it.

    Attributes:
        comm: its ringcomm.Communicator, with methods that torch lacks (``stats()``, ``rails``).
        options: its Options.
    """

    # Flags that torch's Python reads from a group's backend, by the names of all releases.
    supports_splitting = True
    supports_abort_hooks = supports_coalescing = supports_reconfigure = supports_shrinking = False
    supports_time_estimate = _supports_time_estimate = supports_window = False

    def __init__(self, store: Any, comm: Communicator, options: Options, regroup: Any) -> None:
        super().__init__(comm.rank, comm.world_size)
        self.comm = comm
        self._options = options
        self._store = store
        self._regroup = regroup
        self._name = self._desc = ""
        self._coalescing = None
        self._undelivered = set()
        self._detailed = detail.is_on()
        self._checks_nan = detail.checks_nan()
        if _ASKS_BACKENDS:
            self._register_stand_in()

    def _register_stand_in(self) -> None:
        """Registers a Backend that carries nothing: torch's C++ asks each group's backend for its
        name and abilities, as the flight recorder of 2.15 does for every new group."""
        stand_in = _stand_in_class()(self.comm.rank, self.comm.world_size)
        kind = _Base.BackendType.CUSTOM
        self._set_default_backend(kind)
        for device in ("cpu", "cuda"):
            self._register_backend(torch.device(device), kind, stand_in)

    @property
    def options(self) -> Options:
        """Options that the group was made with."""
        return self._options

    def getBackendName(self) -> str:  # noqa: N802 (torch's)
        """Name of the backend."""
        return "ringcomm"

    name = getBackendName

    def getGroupName(self) -> str:  # noqa: N802
        """Name that torch gave the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Sets the name; called by torch."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Description that torch gave the group."""
        return self._desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        """Sets the description; called by torch."""
        self._desc = desc

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    def rank(self) -> int:
        """Number of this rank in the group."""
        return self.comm.rank

    def size(self) -> int:
        """Number of ranks."""
        return self.comm.world_size

    getRank = rank  # noqa: N815
    getSize = size  # noqa: N815

    def supports_tensor_alloc(self, _device: Any = None) -> bool:
        """Returns whether the group allocates memory for tensors to communicate: it does not."""
        return False

    def get_group_store(self) -> Any:
        """Store that the group was made with."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        cuda = [torch.device("cuda")] if torch.cuda.is_available() else []
        return [torch.device("cpu"), *cuda]

    def _get_backend(self, _device: Any) -> RingcommGroup:
        return self

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: the core numbers its collectives from 0."""

    def eager_connect_single_device(self, _device: Any = None) -> None:
        """Does nothing: all ranks are connected when a group is made."""

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Sets the timeout of collectives called from here on."""
        seconds = seconds_of(timeout)
        if seconds is None:
            raise ValueError(f"timeout={timeout}: give one above 0")
        self.comm.set_timeout(seconds)

    _set_default_timeout = set_timeout

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: Any = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        **_: Any,
    ) -> RingcommGroup | None:
        """Makes a group of some ranks of this one. Returns None on ranks that are not among
        them."""
        if self.comm.rank not in new_ranks:
            return None
        name = group_name or f"{self._name}/{','.join(map(str, new_ranks))}"
        group: RingcommGroup = self._regroup(self, list(new_ranks), timeout, opts, name)
        group.setGroupName(name)
        group.setGroupDesc(group_desc or "undefined")
        return group

    def shutdown(self) -> None:
        """Waits for collectives in flight, each until its timeout as others may be late, and leaves
        the group. Messages in flight fail after half a second. Called by destroy_process_group."""
        self._leave(self.comm.config.timeout)

    def _leave(self, patience: float) -> None:
        began = time.monotonic()
        for work in self.comm.works_in_flight():
            until = began + (_GRACE if work.is_message else patience)
            with contextlib.suppress(RingcommError):
                work.wait(max(0.0, until - time.monotonic()))
        for delivered in list(self._undelivered):
            delivered.is_completed()
        self.comm.close()

    _shutdown = shutdown

    def abort(self) -> None:
        """Fails all collectives here and on the other ranks, and leaves the group."""
        with contextlib.suppress(RingcommError):  # closed before
            self.comm.abort("abort() of its process group was called")
        self.comm.close()

    def __del__(self) -> None:
        if hasattr(self, "comm"):
            self._leave(_GRACE)


@functools.cache
def _stand_in_class() -> Any:
    """Makes the class of the Backend that RingcommGroup registers with torch's C++."""

    class StandIn(_C10D.Backend):  # type: ignore[misc]
        @property
        def options(self) -> Any:
            return _C10D.Backend.Options("ringcomm")

        def getBackendName(self) -> str:  # noqa: N802 (torch's)
            return "ringcomm"

    # C++ looks up each property that a subclass does not define in the subclass again: an endless
    # recursion.
    for name in dir(_C10D.Backend):
        if "supports_" in name and isinstance(getattr(_C10D.Backend, name), property):
            setattr(StandIn, name, False)
    return StandIn


def world_comm() -> Communicator | None:
    """Returns the communicator of the default process group, if its backend is "ringcomm"."""
    group = dist.group.WORLD
    return group.comm if isinstance(group, RingcommGroup) else None


def default_comm() -> Communicator:
    """Returns the communicator of the default process group if its backend is "ringcomm", else
    ringcomm's default one. Raises NotInitializedError where there is neither."""
    return world_comm() or default_communicator()
