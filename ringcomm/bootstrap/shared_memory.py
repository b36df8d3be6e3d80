"""Shared memory for the ranks of one host: made by its first rank, opened by the others.

The first rank makes a file without a name (memfd) and announces its process and descriptor in a
round of the bring-up; the others open it under /proc, which the kernel permits only to the
same user. Nothing listens and nothing is left behind, however the processes end. In a further
round each rank reports whether it has opened the file.

Invariants: the file that is opened carries the random name that was announced; either all ranks of
the job get their host's memory, or none does, and one rank of each host says why; descriptors are
closed again unless they are returned.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import mmap
import os
import secrets
from collections.abc import Callable, Sequence

from .records import Record
from .rendezvous import Exchange
from .settings_exchange import Fields, exchange_round

MOST_RANKS = 64
"""Most ranks of one host that share memory; REGION_MAX_RANKS in the core."""
_PREFIX = "/memfd:ringcomm-"
_log = logging.getLogger("ringcomm")


@dataclasses.dataclass(frozen=True)
class Handle:
    """Announcement of a rank: the place of its file, or that it has none to offer."""

    willing: bool
    pid: int = 0
    fd: int = 0
    name: str = ""

    @classmethod
    def from_record(cls, _rank: int, record: Record) -> Handle:
        """Reads the fields of a blob. Raises BootstrapError."""
        return cls(
            bool(record.integer("willing", 0, 1)),
            record.integer("pid", 0, 2**31),
            record.integer("fd", 0, 2**31),
            record.text("name"),
        )

    def to_fields(self) -> Fields:
        """Returns the fields for a blob."""
        return {"willing": int(self.willing), "pid": self.pid, "fd": self.fd, "name": self.name}


def share(
    exchange: Exchange, deadline: float, rank: int, host_numbers: Sequence[int], willing: bool
) -> int | None:
    """Returns the descriptor of this host's file; None if no rank gets any. All ranks take part in
    its two rounds, unless the hosts have one rank each, more than MOST_RANKS, or unequally many.

    Args:
        host_numbers: by rank; ranks with equal numbers share a host.
        willing: False: this rank wants no shared memory, and so no rank gets any.
    """
    groups = [[r for r, n in enumerate(host_numbers) if n == number] for number in host_numbers]
    ours = groups[rank]
    if not 2 <= len(ours) <= MOST_RANKS or len(set(map(len, groups))) > 1:
        return None
    with contextlib.ExitStack() as files:
        fd, name = _make(files) if willing and rank == ours[0] else (None, "")
        mine = Handle(willing) if fd is None else Handle(willing, os.getpid(), fd, name)
        handles = exchange_round(exchange, deadline, mine.to_fields, Handle.from_record)
        all_willing, trouble = all(handle.willing for handle in handles), ""
        if all_willing:
            if fd is None:
                fd, trouble = _open(handles[ours[0]], files)
            trouble = trouble or _lack_of_room(len(ours))
        said: Callable[[], Fields] = lambda: {"trouble": trouble}  # noqa: E731
        troubles = exchange_round(exchange, deadline, said, lambda _, r: r.text("trouble"))
        first = next((i for i, text in enumerate(troubles) if text), None)
        if all_willing and first is None:
            files.pop_all()
            return fd
    if first is not None and rank == ours[0]:
        _log.warning(
            "ranks of one host share no memory and use its network instead: rank %d %s",
            first,
            troubles[first],
        )
    return None


def _make(files: contextlib.ExitStack) -> tuple[int | None, str]:
    """Makes a file, which ``files`` closes; returns its descriptor and its name in /proc, or None
    and "" on an error."""
    try:
        name = f"ringcomm-{secrets.token_hex(16)}"
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        files.callback(os.close, fd)
        return fd, os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return None, ""


def _open(handle: Handle, files: contextlib.ExitStack) -> tuple[int | None, str]:
    """Opens the host's file, which ``files`` closes; returns its descriptor and "", or None and the
    reason."""
    if not handle.name:
        return None, "could not get any from its first rank"
    source = f"/proc/{handle.pid}/fd/{handle.fd}"
    try:
        # Another file is not opened, as opening some has side effects.
        if handle.name.startswith(_PREFIX) and os.readlink(source) == handle.name:
            fd = os.open(source, os.O_RDWR | os.O_CLOEXEC)
            files.callback(os.close, fd)
            if os.readlink(f"/proc/self/fd/{fd}") == handle.name:
                return fd, ""
    except OSError as error:
        return None, f"cannot open that of process {handle.pid}: {error.strerror}"
    return None, f"finds another file than that of process {handle.pid}"


def _lack_of_room(ranks: int) -> str:
    """Tries to map as much memory as the core will; returns the reason why this process cannot,
    or "". Once the core maps it, it is too late to do without shared memory."""
    size = (ranks + 1 << 20) + ranks * (8 << 10)  # not less than the core's region has
    try:
        with open(os.memfd_create("ringcomm-room", os.MFD_CLOEXEC), "wb") as file:
            os.ftruncate(file.fileno(), size)
            mmap.mmap(file.fileno(), size).close()
    except OSError as error:
        return f"has no room for {size >> 20} MiB: {error.strerror}"
    return ""
