"""Backend "ringcomm" of torch.distributed: a process group whose collectives are ringcomm's.

torch calls one method per collective, with lists of tensors and an options object, and gets a
Work: reducing.py, moving.py and messaging.py define them, and stand_in.py leads them past torch's
hooks. This file has a group's names, what torch asks of it, and its end.

Invariants: every method of torch's interface exists under both of its names, where releases differ.
The group closes its communicator when torch shuts it down, or when it is no longer referenced.
"""

from __future__ import annotations

import contextlib
import datetime
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..api import default_communicator
from ..bootstrap.join import join_through_store
from ..communicator import Communicator
from ..config import Config, variable_of
from ..core.native import require_kernel_set
from ..errors import (
    CommTimeoutError,
    ConfigError,
    NotInitializedError,
    PeerLostError,
    RingcommError,
    warn_caller,
)
from . import detail, stand_in
from .messaging import Messaging
from .moving import Moving
from .options import Options
from .reducing import Reducing
from .works import RingWork, seconds_of

_Base: Any = dist.ProcessGroup
_C10D: Any = torch._C._distributed_c10d
_PrefixStore: Any = dist.PrefixStore  # type: ignore[attr-defined]
_OURS = ("cpu", "cuda")
SHRINK_ABORT = 1  # torch's flag: end what is in flight
_CLOSE_S = 0.1  # seconds for a goodbye to ranks that may be dead
_GRACE = 0.5  # seconds to wait for a message, which is never over if its peer does not take it


def connect(
    store: Any, rank: int, size: int, timeout: datetime.timedelta, options: Options, name: str
) -> Communicator:
    """Joins the ranks of a group through their store.

    Args:
        timeout: limit of each collective, and of waiting here for all ranks.
        name: the group's, the same on all ranks.

    Raises:
        ConfigError: (a ValueError) the settings cannot work.
        BootstrapError: a rank did not come, or could not be reached; its table names the ranks.
    """
    if options.config.sources()["timeout"] == variable_of("timeout"):
        warn_caller(
            f"{variable_of('timeout')} does not count here: give torch's "
            "init_process_group(timeout=...)"
        )
    config = options.config.replaced("torch", timeout=seconds_of(timeout) or 0.001)
    require_kernel_set(config.kernel_set)
    joined = join_through_store(config, rank, size, store, f"torch:{name}", timeout.total_seconds())
    return Communicator(joined, options.compression or "none")


class RingcommGroup(Reducing, Moving, Messaging, _Base):  # type: ignore[misc]
    """A process group, as ``dist.init_process_group("ringcomm")`` and ``new_group`` make it.

    Attributes:
        comm: its ringcomm.Communicator, with methods that torch lacks (``stats()``, ``rails``).
        options: its Options.
        collectives: how many have been called.
        is_alone: True where no hook, recorder or other backend has to do with a collective.
    """

    # Flags that torch's Python reads from a group's backend, by the names of all releases.
    supports_abort_hooks = True
    supports_coalescing = False
    supports_time_estimate = _supports_time_estimate = supports_window = False

    def __init__(
        self,
        store: Any,
        comm: Communicator | None,
        options: Options,
        others: Mapping[str, str] = {},
        torchs: Any = None,
        place: tuple[int, int] = (0, 1),
    ) -> None:
        """Makes a group around a communicator.

        Args:
            others: names of the backends of device types that are not ringcomm's.
            torchs: a process group of torch's own with these.
            place: rank and number of ranks until ``reconfigure`` is called, without a communicator.
        """
        self._place = place if comm is None else (comm.rank, comm.world_size)
        super().__init__(*self._place)
        self._comm = comm
        self._options = options
        self._store = store
        self._torchs = torchs
        self._others = {type: torchs._get_backend(torch.device(type)) for type in others}
        self._name = self._desc = ""
        self._coalescing = None
        self._undelivered = set()
        self._detailed = detail.is_on()
        self._checks_nan = detail.checks_nan()
        self.collectives = 0
        self._ended: RingcommError | None = None
        self._abort_hooks: dict[int, Callable[[], None]] = {}
        self._handle = f"ringcomm:{self._place[0]:06}:{uuid.uuid4().hex}"
        self._shrinks = 0
        self._seconds = (options if comm is None else comm).config.timeout
        self._hooks: set[tuple[str, int]] = set()  # kind and number of torch's
        if stand_in.ASKS_BACKENDS:
            self._register_backends(others)
        if torchs is not None and detail.is_recorded():
            self._recorder = _C10D.FlightRecorderHook.attach(torchs)
        self._note_company()

    def _register_backends(self, others: Mapping[str, str]) -> None:
        """Registers a StandIn, and the Backends of others' devices, with torch's C++."""
        kind = _Base.BackendType.CUSTOM
        self._set_default_backend(kind)
        backend = stand_in.stand_in_class()(weakref.ref(self), *self._place)
        for device in _OURS:
            if device not in self._others:
                self._register_backend(torch.device(device), kind, backend)
        for device, name in others.items():
            kind = dist.Backend.backend_type_map.get(name, _Base.BackendType.CUSTOM)
            self._register_backend(torch.device(device), kind, self._others[device])

    # ---- the way of a collective ----

    def _note_company(self) -> None:
        """Notes who has to do with a collective, which otherwise goes straight to its method."""
        by_torch = self._checks_nan or detail.is_recorded() or bool(self._hooks)
        self._is_watched = stand_in.ASKS_BACKENDS and by_torch
        self.is_alone = not (self._others or self._is_watched or self._abort_hooks)

    def elsewhere(self, args: Sequence[Any]) -> Any:
        """Returns the group that carries these tensors, if another backend serves their device."""
        return self._torchs if self._others and stand_in.place_of(args) in self._others else None

    def goes_by_torch(self, name: str, args: Sequence[Any]) -> bool:
        """Returns whether a collective passes torch's dispatcher, for its hooks."""
        return (
            self._is_watched and stand_in.is_torchs(name, args) and stand_in.place_of(args) in _OURS
        )

    def run(self, name: str, method: Callable[..., Any], args: Any, named: Any) -> RingWork:
        """Runs a collective or message of this group, counts it, and runs the abort hooks if it
        fails with the group."""
        if name not in stand_in.MESSAGES:
            self.collectives += 1
        if not self._abort_hooks:
            return method(self, *args, **named)  # type: ignore[no-any-return]
        try:
            work: RingWork = method(self, *args, **named)
        except RingcommError:
            self._run_abort_hooks()
            raise
        if not work.is_settled:
            work.deliver(lambda _: self._run_abort_hooks())
        return work

    def _start_coalescing(self, device: Any) -> None:
        other = self._get_backend(device)
        if other is self:
            super()._start_coalescing(device)
        else:
            other._start_coalescing()

    def _end_coalescing(self, device: Any) -> Any:
        other = self._get_backend(device)
        return super()._end_coalescing(device) if other is self else other._end_coalescing()

    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing  # as C++ calls them

    # ---- hooks ----

    def _change_hooks(self, method: str, hook_id: int, *hook: Callable[[Any], None]) -> None:
        """Calls torch's method of this name for all groups that carry the tensors."""
        change = self._hooks.add if hook else self._hooks.discard
        change((method.rpartition("register_")[2], hook_id))
        self._note_company()
        for group in filter(None, (super(), self._torchs)):
            getattr(group, method)(hook_id, *hook)

    def register_pre_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Has torch call a function before each collective."""
        self._change_hooks("register_pre_hook", hook_id, hook)

    def register_post_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Has torch call a function after each collective has been submitted."""
        self._change_hooks("register_post_hook", hook_id, hook)

    def unregister_pre_hook(self, hook_id: int) -> None:
        """Ends what ``register_pre_hook`` began."""
        self._change_hooks("unregister_pre_hook", hook_id)

    def unregister_post_hook(self, hook_id: int) -> None:
        """Ends what ``register_post_hook`` began."""
        self._change_hooks("unregister_post_hook", hook_id)

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Has a function called when a collective fails with the group, and before ``abort()``;
        perhaps more than once, by any thread."""
        self._abort_hooks[hook_id] = hook
        self._note_company()

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Ends what ``register_abort_hook`` began."""
        self._abort_hooks.pop(hook_id, None)
        self._note_company()

    def _run_abort_hooks(self, fails: bool = False) -> None:
        if fails or self._failure() is not None:
            for hook in list(self._abort_hooks.values()):
                hook()

    def _failure(self) -> RingcommError | None:
        try:
            return None if self._comm is None else self._comm.failure()
        except NotInitializedError:  # closed
            return self._ended

    def get_error(self) -> Any:
        """Returns torch's ErrorType of the state that the group is in: SUCCESS; TIMEOUT; if other
        ranks are the cause, REMOTE_ERROR; else COMM_ERROR."""
        failure, kinds = self._failure(), _C10D.ErrorType
        if failure is None:
            return kinds.SUCCESS
        if isinstance(failure, CommTimeoutError):
            return kinds.TIMEOUT
        if isinstance(failure, PeerLostError) or failure.rank not in (None, self.comm.rank):
            return kinds.REMOTE_ERROR
        return kinds.COMM_ERROR

    # ---- names ----

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
        return self._place[0]

    def size(self) -> int:
        """Number of ranks."""
        return self._place[1]

    getRank = rank  # noqa: N815
    getSize = size  # noqa: N815

    def supports_tensor_alloc(self, _device: Any = None) -> bool:
        """Returns whether the group allocates memory for tensors to communicate: it does not."""
        return False

    def get_group_store(self) -> Any:
        """Store that the group was made with."""
        return self._store

    @property
    def supports_splitting(self) -> bool:
        """Whether ``split_group`` works: not with other Backends, for which new_group makes new
        ones."""
        return not self._others

    @property
    def supports_reconfigure(self) -> bool:
        """Whether ``reconfigure`` and ``shrink`` work: for torch from 2.14 on, and as splitting."""
        return stand_in.ASKS_BACKENDS and not self._others

    supports_shrinking = supports_reconfigure

    @property
    def _device_types(self) -> list[torch.device]:
        types = {"cpu": None, **({"cuda": None} if torch.cuda.is_available() else {})}
        return [torch.device(one) for one in {**types, **self._others}]

    def _get_backend(self, device: Any) -> Any:
        return self._others.get(torch.device(device).type, self)

    def _get_sequence_number_for_group(self) -> int:
        """Returns how many collectives have been called, which is the same on all ranks."""
        return self.collectives

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: collectives are counted from 0 on every rank."""

    def eager_connect_single_device(self, _device: Any = None) -> None:
        """Does nothing: all ranks are connected when a group is made."""

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Sets the timeout of collectives called from here on."""
        seconds = seconds_of(timeout)
        if seconds is None:
            raise ValueError(f"timeout={timeout}: give one above 0")
        if self._comm is not None:
            self._comm.set_timeout(seconds)
        for other in self._others.values():
            other.set_timeout(timeout)
        self._seconds = seconds

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
        self._require_no_others("split_group")
        if self.comm.rank not in new_ranks:
            return None
        name = group_name or f"{self._name}/{','.join(map(str, new_ranks))}"
        group = self._part(name, new_ranks, timeout, opts)
        group.setGroupName(name)
        group.setGroupDesc(group_desc or "undefined")
        return group

    def _part(self, name: str, ranks: Sequence[int], timeout: Any, opts: Any) -> RingcommGroup:
        """Joins these ranks of the group, all of which call it, this one among them."""
        store, options = _PrefixStore(f"{name}/", self._store), options_of(opts or self._options)
        rank = list(ranks).index(self._place[0])
        timeout = timeout or datetime.timedelta(seconds=self._seconds)
        comm = connect(store, rank, len(ranks), timeout, options, name)
        return RingcommGroup(store, comm, options)

    def _require_no_others(self, what: str) -> None:
        if self._others:
            raise ConfigError(
                f"{what}: this process group has several backends; give "
                "dist.new_group(ranks, backend=...)"
            )

    # ---- other ranks than before ----

    def get_reconfigure_handle(self) -> str:
        """Returns the name of this process for ``reconfigure``, which the others must get by
        another way."""
        return self._handle

    def reconfigure(self, opts: Any) -> RingWork:
        """Leaves the ranks that the group has, dead or alive, and joins those that are named. Each
        of these calls it, and meets the others at the group's store.

        Args:
            opts: torch's ReconfigureOptions: ``uuid``, a number that the group has not had;
                ``handles``, of all ranks, this one among them: a list in the order of ranks, or a
                set; ``timeout``, to wait for them, and from then on the group's.

        Raises:
            ConfigError: the own handle is not among them; or the group has several backends.
            BootstrapError: a rank did not come, or could not be reached. The group has no ranks
                then, until another call.
        """
        self._require_no_others("reconfigure")
        handles = opts.handles if isinstance(opts.handles, list) else sorted(opts.handles)
        if self._handle not in handles:
            raise ConfigError(f"reconfigure: this rank's handle, {self._handle}, is not among them")
        timeout = opts.timeout or datetime.timedelta(seconds=self._seconds)
        self._leave(_GRACE, _CLOSE_S)
        self._comm = self._ended = None
        name = f"{self._name}/reconfigured/{opts.uuid}"
        store = _PrefixStore(f"{name}/", self._store)
        rank, size = handles.index(self._handle), len(handles)
        self._comm = connect(store, rank, size, timeout, self._options, name)
        self._seconds = self._comm.config.timeout
        self._place, self.collectives = (rank, size), 0
        return RingWork.finished([])

    def shrink(self, ranks_to_exclude: Sequence[int], flags: int = 0, opts: Any = None) -> Any:
        """Makes a group of all ranks but some, dead or alive, and returns the Backend by which
        ``dist.shrink_group`` builds a ProcessGroup of torch's own around it. All ranks that stay
        call it. Raises as ``reconfigure``."""
        self._require_no_others("shrink_group")
        if flags & SHRINK_ABORT:
            self.abort()
        self._shrinks += 1
        stay = [one for one in range(self.size()) if one not in ranks_to_exclude]
        group = self._part(f"{self._name}/shrunk/{self._shrinks}", stay, None, opts)
        return stand_in.stand_in_class()(lambda: group, *group._place)

    # ---- the end ----

    def shutdown(self) -> None:
        """Waits for collectives in flight, each until its timeout as others may be late, and leaves
        the group. Messages in flight fail after half a second. Called by destroy_process_group."""
        self._leave(self._seconds)

    def _leave(self, patience: float, within: float = 1.0) -> None:
        """Waits for works in flight, and closes the communicator within some seconds more."""
        if self._comm is None:
            return
        began = time.monotonic()
        for work in self._comm.works_in_flight():
            until = began + (_GRACE if work.is_message else patience)
            with contextlib.suppress(RingcommError):
                work.wait(max(0.0, until - time.monotonic()))
        self._close(within)

    def _close(self, within: float = 1.0) -> None:
        self._ended = self._failure()
        if self._comm is not None:
            for delivered in () if self._comm.is_inherited else list(self._undelivered):
                delivered.is_completed()
            self._comm.close(within)
        while self._others:
            self._others.popitem()[1].shutdown()

    _shutdown = shutdown

    def abort(self) -> None:
        """Fails all collectives here and on the other ranks, and leaves the group."""
        self._run_abort_hooks(fails=True)
        while self._others:
            self._others.popitem()[1].abort()
        with contextlib.suppress(RingcommError):  # closed before, or without ranks
            self.comm.abort("abort() of its process group was called")
        self._close()

    def __del__(self) -> None:
        if getattr(self, "_comm", None) is not None:
            self._leave(_GRACE)


stand_in.lead_through_torch(RingcommGroup)


def options_of(given: Any) -> Options:
    """Returns the options of a new group: an Options, those of a Config, or for None those of the
    default group, or of the environment. Raises ConfigError for anything else."""
    if isinstance(given, Options):
        return given
    if isinstance(given, Config):
        options = Options()
        options.config = given
        return options
    if given is not None:
        raise ConfigError(f"pg_options: give a ringcomm.torch.Options, not {type(given).__name__}")
    default = group_behind(dist.group.WORLD)
    return Options() if default is None else default.options


def group_behind(group: Any) -> RingcommGroup | None:
    """Returns the RingcommGroup that carries the host's tensors of a process group, which is this
    one itself but for one that ``dist.shrink_group`` has made; None if another backend does."""
    if group is None or isinstance(group, RingcommGroup):
        return group
    with contextlib.suppress(RuntimeError):  # no backend for the CPU
        backend = group._get_backend(torch.device("cpu"))
        if stand_in.ASKS_BACKENDS and isinstance(backend, stand_in.stand_in_class()):
            return backend.group()  # type: ignore[no-any-return]
    return None


def world_comm() -> Communicator | None:
    """Returns the communicator of the default process group, if its backend is "ringcomm"."""
    group = group_behind(dist.group.WORLD)
    return None if group is None else group.comm


def default_comm() -> Communicator:
    """Returns the communicator of the default process group if its backend is "ringcomm", else
    ringcomm's default one. Raises NotInitializedError where there is neither."""
    return world_comm() or default_communicator()
