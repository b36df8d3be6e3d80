"""Log of refused connections: one line per address per minute.

Invariants: no byte that a stranger sent is logged; memory is bounded however many addresses come;
safe from any thread, since the ranks of one process share the log.
"""

from __future__ import annotations

import collections
import logging
import threading
import time

_log = logging.getLogger("ringcomm")

QUIET = 60.0
"""Seconds between two lines about one address."""
_MAX_ADDRESSES = 255
_OTHERS = "more addresses"
"""Stands for all addresses that come while the table is full."""


class StrangerLog:
    """Counts refused connections per address and logs them sparingly."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: collections.OrderedDict[str, list[float]] = collections.OrderedDict()

    def note(self, address: str, why: str, level: int = logging.INFO) -> None:
        """Logs or counts a connection from address that was turned away."""
        now = time.monotonic()
        with self._lock:
            if not self._has_room(address, now):
                address = _OTHERS
            entry = self._seen.pop(address, None) or [now - QUIET, 0.0]
            self._seen[address] = entry
            if now - entry[0] < QUIET:
                entry[1] += 1
                return
            more = int(entry[1])
            entry[:] = [now, 0.0]
        since = f" (and {more} more since the last such line)" if more else ""
        _log.log(level, "turned away a connection from %s: %s%s", address, why, since)

    def _has_room(self, address: str, now: float) -> bool:
        """True if the address has an entry or can get one, after removing the oldest if its line
        is a minute old."""
        if address in self._seen or len(self._seen) < _MAX_ADDRESSES:
            return True
        longest = next(known for known in self._seen if known != _OTHERS)
        if now - self._seen[longest][0] < QUIET:
            return False
        del self._seen[longest]
        return True


LOG = StrangerLog()
"""Log of strangers that all communicators of the process share."""
