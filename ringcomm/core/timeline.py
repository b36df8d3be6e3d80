"""A timeline of a process's works, as a file for chrome://tracing and ui.perfetto.dev.

Each work has the times of its call, of its first frame sent or received and of its end, and the
bytes that it has moved, by rail:

    allreduce(f32[1000000]) #7      |<--------------------------- >|
      waiting                       |<----->|
      on the wire                           |<-------------------->|   sent_bytes, rails, ...
      (or in shared memory)

A lane that is lost is an event, too, until it is made anew.

Events are nestable asynchronous ones of the Trace Event Format, as works overlap at will. Moments
are of the wall clock, so that the files of all ranks can be viewed together; within a host they
are exact to the microsecond, among hosts as far as their clocks agree.

Invariants: an event is with the operating system when the call returns, but for what comes while
the file is being written: that follows at once. The file is a complete JSON array after every
event: each one overwrites the end of the array and writes it anew,
and one that does not fit on the disk is taken back. So a process that is killed, or hangs, leaves
all events so far, works in flight included. The file never exceeds MOST_BYTES, and no symbolic
link is followed to it. An error while writing does not reach the job: it is logged once, and the
timeline ends there. Only an error while opening it is raised (ConfigError).
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import ConfigError
from .work import Work

MOST_BYTES = 256 << 20
_END = b"\n]\n"
_ROOM = 1000  # bytes kept free at the end of the file
_log = logging.getLogger("ringcomm")


def path_of(setting: str, rank: int) -> str:
    """Returns the file of a rank: ``{rank}`` becomes its number, which else goes before the
    ending."""
    if "{rank}" in setting:
        return setting.replace("{rank}", str(rank))
    stem, ending = os.path.splitext(setting)
    return f"{stem}.{rank}{ending}"


class _File:
    """File of one process's events. It outlives communicators, so that later ones append to it.

    Raises ConfigError if it cannot be opened.
    """

    def __init__(self, setting: str, rank: int) -> None:
        self.path = path_of(setting, rank)
        self.rank = rank
        self._lock = threading.Lock()
        self._changes: collections.deque[Callable[[], None]] = collections.deque()
        self._users = 0
        self._end = 0
        self._fd = -1
        self._offset_ns = time.time_ns() - time.monotonic_ns()
        try:
            if os.path.isfile(self.path):  # the file of the run before, which may have failed
                os.replace(self.path, self.path + ".old")
            self._open(os.O_CREAT | os.O_EXCL)
            self._put(b"[")
        except OSError as error:
            if self._fd >= 0:
                self._close()
                os.unlink(self.path)
            raise ConfigError(
                f"timeline={setting!r}: {self.path} cannot be written ({error.strerror}); give a "
                "file in a folder that is there"
            ) from None

    def _open(self, flags: int) -> None:
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o644)

    def use(self) -> None:
        """Counts a communicator that begins to write, and opens the file again if need be."""

        def use() -> None:
            self._users += 1
            if self._fd < 0 and self._end:
                self._guarded(lambda: self._open(0))

        self._change(use)

    def leave(self) -> None:
        """Discounts a communicator; closes the file after the last one."""

        def leave() -> None:
            self._users -= 1
            if not self._users:
                self._close()

        self._change(leave)

    def write(self, *events: dict[str, Any]) -> None:
        """Adds events, whose ``ns`` is a moment of time.monotonic_ns()."""
        for event in events:
            if "ns" in event:
                event["ts"] = (event.pop("ns") + self._offset_ns) / 1000
            event["pid"] = self.rank
        data = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events).encode()

        def write() -> None:
            if self._fd < 0:
                return
            if self._end + len(data) > MOST_BYTES - _ROOM:
                self._end_here(f"it has {MOST_BYTES >> 20} MiB")
                return
            separator = b",\n" if self._end > 1 else b"\n"
            self._guarded(lambda: self._put(separator + data))

        self._change(write)

    def _change(self, change: Callable[[], None]) -> None:
        """Makes a change, one at a time and in their order. It waits for nobody: within another
        change, as of a signal handler or of another thread, it is left to who makes that."""
        self._changes.append(change)
        while self._changes and self._lock.acquire(blocking=False):
            try:
                while self._changes:
                    self._changes.popleft()()
            finally:
                self._lock.release()

    def _put(self, data: bytes) -> None:
        """Appends data. Raises OSError if it does not fit, with the file as it was."""
        whole, done = data + _END, 0
        try:
            while done < len(whole):  # after a short write the next one raises the reason
                done += os.pwrite(self._fd, whole[done:], self._end + done)
        except OSError:
            with contextlib.suppress(OSError):  # the disk may be lost
                os.ftruncate(self._fd, self._end + len(_END))
                os.pwrite(self._fd, _END, self._end)
            raise
        self._end += len(data)

    def _guarded(self, write: Any) -> None:
        try:
            write()
        except OSError as error:
            self._end_here(str(error.strerror))

    def _end_here(self, why: str) -> None:
        _log.warning("the timeline %s ends here: %s", self.path, why)
        self._close()
        self._end = 0

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # it may report an earlier write's error
                os.close(fd)


_files: dict[str, _File] = {}
_opening = threading.Lock()


def _after_fork() -> None:
    global _opening
    _opening = threading.Lock()
    _files.clear()


os.register_at_fork(after_in_child=_after_fork)


class Timeline:
    """Events of one communicator.

    Args:
        setting: Config.timeline.
        rank, host: this rank. The process's first communicator names the file; later ones, as by
            split, write to the same.
        about: name of the communicator, for people.
        rails: its network ports' names, in rail order.

    Raises ConfigError if the file cannot be opened.
    """

    def __init__(
        self, setting: str, rank: int, host: str, about: str, rails: Sequence[str]
    ) -> None:
        with _opening:
            if setting not in _files:
                _files[setting] = _File(setting, rank)
            self._file = _files[setting]
        self._file.use()
        self._rails = [f"{number} {name}" for number, name in enumerate(rails)]
        self._category = about
        self._file.write(
            {
                "ph": "M",
                "name": "process_name",
                "args": {"name": f"rank {self._file.rank} on {host}, process {os.getpid()}"},
            },
            {"ph": "M", "name": "process_sort_index", "args": {"sort_index": self._file.rank}},
        )

    def submitted(self, work: Work) -> None:
        """Writes that a work was submitted to the core."""
        began = work.stats().submitted_ns or time.monotonic_ns()  # a flight may have none yet
        common = self._common(work)
        self._file.write(
            {"ph": "b", "name": work.name, "ns": began, **common},
            {"ph": "b", "name": "waiting", "ns": began, **common},
        )

    def finished(self, work: Work) -> None:
        """Writes that a work is over, well or not."""
        stats, error, common = work.stats(), work.exception(), self._common(work)
        args: dict[str, Any] = {
            "seq": work.seq,
            "sent_bytes": stats.sent_bytes,
            "shared_bytes": stats.shared_bytes,
            "rails": dict(zip(self._rails, stats.rail_bytes, strict=False)),
        }
        if error is not None:
            args["error"] = f"{type(error).__name__}: {error}"
        is_shared = stats.in_memory and stats.shared_bytes >= stats.sent_bytes
        where = "in shared memory" if is_shared else "on the wire"
        over = stats.finished_ns or time.monotonic_ns()
        started = min(stats.started_ns or over, over)
        self._file.write(
            {"ph": "e", "name": "waiting", "ns": started, **common},
            {"ph": "b", "name": where, "ns": started, **common},
            {"ph": "e", "name": where, "ns": over, **common},
            {"ph": "e", "name": work.name, "ns": over, "args": args, **common},
        )

    def lost(self, lane: str, why: str) -> None:
        """Writes that a lane is lost; the event ends with back()."""
        self._lane("b", lane, {"why": why})

    def back(self, lane: str) -> None:
        """Writes that a lost lane was made anew."""
        self._lane("e", lane, {})

    def _lane(self, phase: str, lane: str, args: dict[str, Any]) -> None:
        self._file.write(
            {
                "ph": phase,
                "name": f"lost: {lane}",
                "ns": time.monotonic_ns(),
                "cat": self._category,
                "id": lane,
                "tid": 0,
                "args": args,
            }
        )

    def close(self) -> None:
        """Ends the communicator's use of the file."""
        self._file.leave()

    def _common(self, work: Work) -> dict[str, Any]:
        """Returns the fields that all events of a work share. The number is set by one operation as
        the work may be over, on another thread, before submitted() was called."""
        number = vars(work).setdefault("trace_id", next(_numbers))
        return {"cat": self._category, "id": number, "tid": 0}


_numbers = itertools.count(1)
