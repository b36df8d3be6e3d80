"""Communicator: a group of ranks joined by lanes, and the collectives on it.

Invariants: arguments are checked (calls.py) before anything reaches the core, so a call that raises
ConfigError or TensorError has submitted nothing and the communicator stays usable. All ranks call
the same collectives in the same order. A failed collective fails the communicator: every later call
raises the first error. At the interpreter's end open communicators are closed: without a goodbye
the last bytes sent could be lost.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import hashlib
import logging
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np

from .bootstrap.join import Joined, join, regroup
from .bootstrap.keeper import LaneKeeper
from .bootstrap.system import typed_errors
from .collectives import Collectives
from .config import Config, names_arguments
from .core.calls import is_integer, naming
from .core.counters import Stats, read_counters
from .core.faces import torch as torch_face
from .core.lost_lanes import CoreLanes
from .core.native import release_engine, require_kernel_set
from .core.opening import open_handle
from .core.timeline import Timeline
from .core.work import Work
from .errors import ConfigError, MismatchError, RingcommError
from .summary import summary_of

_log = logging.getLogger("ringcomm")
_CLOSE_MS = 1000
_ABORT_MS = 100


class Communicator(Collectives):
    """A group of ranks. Made by ``ringcomm.init`` (the default one), ``Communicator.create`` or
    ``split``. Usable from any thread; also a context manager, which closes it, and on an exception
    aborts it on all ranks.

    All collectives take numpy arrays, torch CPU tensors and objects with the buffer protocol,
    ``__array_interface__`` or DLPack, of float16, bfloat16, float32, float64, int8, uint8, int32 or
    int64 and of any shape and strides. They also take tensors on a GPU, of torch, CuPy or with
    ``__cuda_array_interface__`` or DLPack, which must be contiguous: a call follows the current
    stream (by DLPack alone the default one), or that of ``cuda.stream``, which then waits for the
    result (DeviceWork). A communicator's GPU tensors are all on one GPU; a call's tensors are all
    there or all on the host, and follow one stream.

    Count and dtype are the same on all ranks. ``out``, where given, has the result's count and
    dtype; results made here are of the tensor's library. ``async_op``, ``timeout``, and the errors
    raised are those of ``allreduce``.

    Attributes:
        rank, world_size: this rank's number and the number of ranks.
        hosts: host name of every rank.
        rails: this rank's network ports in rail order (``.interface``, ``.address``).
        config: its settings.
        kernel_set: instruction set of the kernels.
        algorithms: chooser of all-reduce algorithms: the name that config.algorithm
            gives, else "model", with the speed of the links that it assumes, if that is known.
    """

    def __init__(self, joined: Joined, group_codec: str | None = None) -> None:
        """Opens a communicator on joined lanes, which it takes over.

        group_codec: codec of all-reduces of its torch process group, for the log.
        """
        if not isinstance(joined, Joined):
            raise ConfigError(
                "a Communicator is made by ringcomm.init(), Communicator.create() or split()"
            )
        mesh, config = joined.mesh, joined.config
        with contextlib.ExitStack() as undo:
            undo.callback(mesh.close)
            super().__init__(mesh, config)
            undo.callback(release_engine, config.kernel_set)
            model = f"model of {mesh.link_mbit} Mbit/s links" if mesh.link_mbit else "model"
            self.algorithms: str = model if config.algorithm == "auto" else config.algorithm
            self._joined = joined
            self._splits = 0
            self._began = time.monotonic()
            summary = self._startup_summary(joined, group_codec)
            if config.timeline:
                about = f"communicator of {self.world_size}, epoch {joined.epoch}"
                host, ports = self.hosts[self.rank], [rail.interface for rail in self.rails]
                self._timeline = Timeline(config.timeline, self.rank, host, about, ports)
                undo.callback(self._timeline.close)
            undo.callback(self._free_handle)
            lanes = list(mesh.lanes)
            self._handle = open_handle(mesh, config, joined.epoch, self.engine.handle)
            if mesh.keeping:
                core = CoreLanes(self._handle, lanes, self._timeline)
                with typed_errors():
                    self._keeper = LaneKeeper(mesh.keeping[0], core)
                mesh.keeping.clear()
            undo.pop_all()
        _alive.add(self)
        if summary:
            _log.info("%s", summary)

    @classmethod
    @names_arguments
    def create(
        cls,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        init_method: str | None = None,
        config: Config | None = None,
        timeout: float | None = None,
        mpi: Any = None,
        store: Any = None,
    ) -> Communicator:
        """Joins the ranks of a job; the arguments are those of ``ringcomm.init``."""
        settings = Config() if config is None else config
        if not isinstance(settings, Config):
            raise ConfigError(f"config={config!r}: give a ringcomm.Config, as Config(lanes=2)")
        require_kernel_set(settings.kernel_set)
        return cls(join(settings, rank, world_size, init_method, timeout, mpi, store))

    # ---- life cycle and state ----

    @naming("split() of Communicator")
    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Makes a communicator of the ranks that give the same color.

        Args:
            color: ranks of one color belong together; None takes part in none.
            key: the new ranks are ordered by key, then by rank.

        Returns:
            The new communicator with lanes of its own, or None for color None. All ranks must
            call it.

        Raises:
            ConfigError: color or key is no integer of 64 bits; nothing was sent.
            BootstrapError: the new lanes could not be made. Else as allreduce.
        """
        self._require_open()
        for name, value in (("color", 0 if color is None else color), ("key", key)):
            whole = is_integer(value) or isinstance(value, (bool, np.bool_))  # e.g. color=rank < 2
            if not whole or not -(2**63) <= int(value) < 2**63:
                raise ConfigError(f"{name}={value!r}: give an integer of 64 bits")
        self._splits += 1
        joined = regroup(
            dataclasses.replace(self._joined, config=self.config),
            _members(self, color, key),
            lambda part, seconds: self.allgather(
                np.frombuffer(part, np.uint8), timeout=seconds
            ).tobytes(),
            self._splits,
            failed=lambda: self.failure() is not None,
        )
        return None if joined is None else Communicator(joined)

    def stats(self) -> Stats:
        """Counters since the communicator was opened.

        Returns:
            works (completed), payload_bytes (sent, after compression), wire_bytes (sent over
            links, with headers), shared_bytes (of the payload, put into the memory that ranks of
            one host share), engine_cpu_s (CPU seconds of the engine's threads) and waiting_s (that
            threads have spent waiting for collectives), both of all communicators of this process;
            threads (that carry the traffic: 1 or 2); lanes: a list of peer, rail, lane, sent_bytes,
            received_bytes, sent_frames, received_frames, rate (bytes per second as measured, 0.0 if
            not), retransmits (of TCP segments), rtt_s (TCP's smoothed round trip), made (number of
            its last connection, from 1), is_lost (1: that is lost) and share (of this rank's sent
            bytes);
            rails: the sums over the lanes of each, as rail, interface, sent_bytes, received_bytes,
            retransmits, share.
        """
        self._require_open()
        with self._lock:
            self._require_open()
            return read_counters(self._handle, self.rails)

    def close(self, within: float = _CLOSE_MS / 1000) -> None:
        """Leaves the group: says goodbye and closes the lanes, within about a second, or the given
        seconds. Collectives still in flight fail, here and on the other ranks. Closing twice, or in
        a forked child, is harmless."""
        handle = self._take_handle()
        if handle is None:
            return
        try:
            self._log_end(handle)
        finally:  # after an interrupt, too, as the core still uses the memory of works in flight
            try:
                self._leave_and_free(handle, within)
            finally:
                _alive.discard(self)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None and self._handle is not None and not self.is_inherited:
            self.abort(f"{kind.__name__}: {error}")
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._handle is None else f"rank {self.rank} of {self.world_size}"
        return f"<ringcomm.Communicator {state}>"

    def set_timeout(self, seconds: float) -> None:
        """Sets the ``config.timeout`` of all later collectives, and of those of later splits."""
        self.config = self.config.replaced(timeout=seconds)
        self._prepared = {}  # each has the timeout

    # ---- logging ----

    def _startup_summary(self, joined: Joined, group_codec: str | None) -> str:
        """Returns rank 0's lines for the log: a summary for the first communicator of a process,
        one line for a later one."""
        if self.rank or not _log.isEnabledFor(logging.INFO):
            return ""
        if joined.epoch or _alive:
            return f"another communicator, {joined.job}: {self.world_size} ranks"
        return summary_of(joined, self.algorithms, self.kernel_set, group_codec)

    def _log_end(self, handle: Any) -> None:
        level = logging.DEBUG if self.rank else logging.INFO
        if _log.isEnabledFor(level):
            counted = read_counters(handle, self.rails)
            _log.log(
                level,
                "rank %d of %d closes after %.1f s: %d works, %d bytes sent over links, %d "
                "put into shared memory",
                self.rank,
                self.world_size,
                time.monotonic() - self._began,
                counted["works"],
                counted["wire_bytes"],
                counted["shared_bytes"],
            )


_alive: set[Communicator] = set()


@atexit.register
def _close_all() -> None:
    """Closes all communicators within the time that one may take. If works are in flight, or an
    exception such as Ctrl-C left a call, only the failure remains to be sent, and a peer that does
    not listen is not waited for."""
    deadline = time.monotonic() + _CLOSE_MS / 1000

    def close(comm: Communicator) -> None:
        left = deadline - time.monotonic()
        comm.close(left if comm.is_idle() else min(left, _ABORT_MS / 1000))

    with contextlib.ExitStack() as closing:  # the others, too, if one is interrupted
        for comm in [comm for comm in _alive if not comm.is_inherited]:
            closing.callback(close, comm)


def _user_of(start: int, stop: int) -> str:
    """Names the collective in flight that uses memory from start to stop; "" if none. Serves as
    user_of of the face of torch."""
    users = (comm.user_of(start, stop) for comm in list(_alive) if not comm.is_inherited)
    return next(filter(None, users), "")


torch_face.user_of = _user_of


def works_of_process() -> int:
    """Number of collectives that the open communicators of this process have completed."""
    return sum(comm.completed() for comm in list(_alive))


def gather_bytes(comm: Communicator, part: bytes) -> list[bytes]:
    """Returns the bytes of every rank, whose lengths may differ. A collective."""
    sizes = comm.allgather(np.array([len(part)])).ravel().tolist()
    rows = comm.allgather(np.frombuffer(part.ljust(max(sizes), b"\0"), np.uint8))
    return [bytes(row[:size]) for row, size in zip(rows, sizes, strict=True)]


def require_same(comm: Communicator, about: Sequence[object], what: str) -> None:
    """Raises MismatchError on all ranks unless all give the same. A collective.

    Args:
        what: names what is compared, for the message.
    """
    digest = np.frombuffer(hashlib.sha256(repr(about).encode()).digest(), np.uint8)
    if (comm.allgather(digest) != digest).any():
        more = f" and {len(about) - 3} more" if len(about) > 3 else ""
        raise MismatchError(
            f"the ranks have different {what}; rank {comm.rank} has {len(about)}: "
            f"{', '.join(map(str, about[:3]))}{more}"
        )


def _members(comm: Communicator, color: int | None, key: int) -> list[int]:
    """Returns the ranks of this rank's color in the order of their keys; empty for color None."""
    mine = np.array([color is not None, color or 0, key], dtype=np.int64)
    rows = comm.allgather(mine)
    same = [r for r in range(comm.world_size) if rows[r][0] and rows[r][1] == mine[1]]
    return sorted(same, key=lambda r: (int(rows[r][2]), r)) if mine[0] else []


__all__ = ["Communicator", "RingcommError", "Work"]
