"""Exchange of a few bytes between ranks that know only their number, over several carriers.

    Exchange.allgather(blob) -> every rank's blob, in rank order

Carriers: our own TCP hub (hub.py, hub_client.py), a torch Store, an mpi4py communicator, or any
function that gathers equal-sized bytes (a parent communicator). torch and mpi4py are never
imported here; their objects come from the caller.

Death of a rank is noticed as follows: the hub sees its connection end, and tells all; a parent
communicator fails; in a Store and in MPI only the lanes that were made show it (ExitWatch),
and the rank that notices tells the others through the Store.

Invariants: allgather() returns or raises by about its deadline; all ranks make the same calls in
the same order; blobs are bytes in and bytes out, never pickled; received blobs are checked for
size only, records.py checks their content.
"""

from __future__ import annotations

import datetime
import hashlib
import secrets
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..config import Config
from ..errors import BootstrapError, RingcommError
from .handshake_params import Key, Role, Terms, job_hash
from .hub import Hub, find_rival
from .hub_client import open_member
from .join_failure import FAILED_HEADLINE, MAX_ROWS, NEVER_CAME, Lost, Row, join_error
from .launch import Identity
from .loop import LOOK_EVERY, Loop
from .meeting import open_listeners, ports_in_use
from .records import MAX_BYTES, Record, pack
from .secret import Secret

_WAIT_SLICE, _FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 0.0005, 0.02  # seconds
_LENGTH = struct.Struct("<Q")

EXIT_GRACE = 0.5
"""Seconds for which a rank must have seemed to be gone until it counts as gone."""


class Exchange(Protocol):
    """Carries blobs between ranks while they are being joined."""

    def allgather(self, blob: bytes, deadline: float) -> list[bytes]:
        """Sends this rank's blob to all and returns every rank's blob, in rank order.

        deadline is a time.monotonic(). Raises BootstrapError naming the ranks that are missing.
        """

    def alarm(self, loop: Loop, ring: Callable[[], None], lost: Lost) -> None:
        """Arranges that ring() is called in this loop as soon as the next allgather is known to
        fail, for as long as the loop runs.

        lost returns the ranks that seem to have left, for carriers that cannot see it themselves.
        Later allgathers ask it, too, and end with an error if it names ranks.
        """

    def close(self) -> None:
        """Releases the exchange's resources without waiting for another rank."""


def open_tcp(
    identity: Identity, config: Config, secret: Secret | None, deadline: float
) -> Exchange:
    """Opens our own rendezvous at identity's master address: the hub on rank 0, else a member.

    Raises ConfigError (no secret off loopback, port in use, not this host's address) before
    anything listens, BootstrapError if rank 0 is not found by the deadline. A connected rank is
    lost if no packet from its host arrives for peer_timeout.
    """
    job = job_hash(identity.job)
    key = Key.derive(secret, job, config.insecure)
    terms = Terms(Role.RENDEZVOUS, job, identity.world_size, identity.rank, server_rank=0)
    if identity.rank != 0:
        return open_member(identity, config, secret, key, terms, deadline)
    listeners, taken = open_listeners(identity, config, secret)
    if not listeners:
        raise find_rival(taken, key, terms) or ports_in_use(identity)
    return Hub(listeners, key, terms, taken, config.peer_timeout)


class ExitWatch:
    """Detects that a rank has left, where nothing but its lanes shows it.

    The connected lanes have ended, or nothing listens any more where the rank offered to. Both can
    be so for a moment: a dialer that tries again has closed its first lane, and a rank that has
    joined and left already has closed all. So it counts after EXIT_GRACE seconds.

    Args:
        lost: returns a row for each rank that seems to have left; one that it no longer names is
            forgotten.
    """

    def __init__(self, lost: Lost) -> None:
        self._lost = lost
        self._since: dict[int, float] = {}

    def rows(self) -> list[Row]:
        """Returns a row for each rank that has left."""
        now = time.monotonic()
        rows = self._lost()
        self._since = {row.rank: self._since.get(row.rank, now) for row in rows}
        return [row for row in rows if now - self._since[row.rank] >= EXIT_GRACE]


class StoreExchange:
    """Exchange over an object with torch.distributed.Store's ``set``, ``get`` and ``wait``.

    A rank that comes writes a random number, its visit, under ``prefix/visits/rank``. Parts are
    under ``prefix/meeting/round/rank``, where meeting is a digest of all ranks' visits. So nobody
    takes a part of an earlier attempt, of whatever rank, for one of this. ``prefix/latest`` is the
    visit of the rank that came last: the others then follow it into another meeting, until round 1
    is complete.
    """

    def __init__(self, store: Any, rank: int, world_size: int, prefix: str = "ringcomm") -> None:
        self._store = store
        self._rank = rank
        self._world = world_size
        self._prefix = prefix
        self._meeting = ""
        self._latest = b""
        self._round = 0
        self._exits: ExitWatch | None = None

    def allgather(self, blob: bytes, deadline: float) -> list[bytes]:
        """Puts the blob into the store and waits for all others; see Exchange."""
        self._round += 1
        began = time.monotonic()
        if self._round == 1:
            visit = secrets.token_bytes(8)
            self._call("set", self._visit_key(self._rank), visit)
            self._call("set", self._latest_key, visit)
            self._all_have(self._visit_key, began, deadline)
        is_complete = False
        while not is_complete:
            if self._round == 1:
                self._latest = self._get(self._latest_key)
                visits = b"".join(self._get(self._visit_key(r)) for r in range(self._world))
                self._meeting = hashlib.sha256(visits).hexdigest()[:16]
            self._call("set", self._key(self._rank), blob)
            is_complete = self._all_have(self._key, began, deadline)
        blobs = [self._get(self._key(rank)) for rank in range(self._world)]
        for rank, part in enumerate(blobs):
            if len(part) > MAX_BYTES:
                raise BootstrapError(f"what rank {rank} put in the store is too long", rank=rank)
        return blobs

    def close(self) -> None:
        """Does nothing: the store is the caller's."""

    def alarm(self, loop: Loop, ring: Callable[[], None], lost: Lost) -> None:
        """Rings once a rank seems to have left, by its lanes or by another rank's word."""
        self._exits = exits = ExitWatch(lost)
        loop.repeat(LOOK_EVERY, lambda: ring() if exits.rows() or self._others_say() else None)

    def _others_say(self) -> bool:
        return hasattr(self._store, "check") and bool(self._call("check", [self._left_key]))

    @property
    def _left_key(self) -> str:
        return f"{self._prefix}/{self._meeting}/left"

    @property
    def _latest_key(self) -> str:
        return f"{self._prefix}/latest"

    def _visit_key(self, rank: int) -> str:
        return f"{self._prefix}/visits/{rank}"

    def _raise_if_left(self) -> None:
        """Raises JoinError if a rank has left, after telling the other ranks through the store."""
        if self._exits is None:
            return
        rows = self._exits.rows()
        if rows:
            fields = [row.to_fields() for row in rows[:MAX_ROWS]]
            self._call("set", self._left_key, pack({"rows": fields}))
        elif self._others_say():
            record = Record.unpack("the store", self._get(self._left_key))
            rows = [Row.from_record(r, self._world) for r in record.records("rows", MAX_ROWS)]
        if rows:
            raise join_error(FAILED_HEADLINE, rows)

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{self._meeting}/{self._round}/{rank}"

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._store, method)(*arguments)
        except Exception as error:
            raise BootstrapError(f"the store failed in {method}(): {error}") from error

    def _get(self, key: str) -> bytes:
        return bytes(self._call("get", key))

    def _all_have(self, key_of: Callable[[int], str], began: float, deadline: float) -> bool:
        """Waits for such a key of every rank; returns False if a rank comes anew before round 1 is
        complete. Raises BootstrapError naming those that have none by the deadline."""
        for rank in range(self._world):
            pause, look_at = 0.0, time.monotonic() + LOOK_EVERY
            while not self._has(key_of(rank), pause, deadline):
                now = time.monotonic()
                if now >= deadline:
                    raise self._missing(key_of, rank, now - began)
                if now >= look_at:
                    self._raise_if_left()
                    if self._round == 1 and self._latest not in (b"", self._get(self._latest_key)):
                        return False
                    look_at = now + LOOK_EVERY
                pause = min(2 * pause or _FIRST_PAUSE, _LONGEST_PAUSE)
        return True

    def _has(self, key: str, pause: float, deadline: float) -> bool:
        """Looks for a key: by check() after a pause, since torch logs a warning for each wait()
        that times out; else by wait(), in slices short enough for Ctrl-C to be handled."""
        if hasattr(self._store, "check"):
            time.sleep(pause)
            return bool(self._call("check", [key]))
        began = time.monotonic()
        patience = max(0.001, min(_WAIT_SLICE, deadline - began))
        try:
            self._store.wait([key], datetime.timedelta(seconds=patience))
        except Exception as error:
            # Stores have no common error for a timeout, but a broken one fails at once.
            if time.monotonic() - began < patience / 2:
                raise BootstrapError(f"the store failed in wait(): {error}") from error
            return False
        return True

    def _missing(self, key_of: Callable[[int], str], first: int, waited: float) -> BootstrapError:
        later = range(first + 1, self._world)
        absent = [first] + [r for r in later if not self._has(key_of(r), 0.0, 0.0)]
        state = NEVER_CAME if self._round == 1 else "came, but stopped answering"
        rows = [Row(rank, -1, "", state) for rank in absent]
        here = self._world - len(absent)
        return join_error(
            f"only {here} of {self._world} ranks were in the store within {waited:.1f} s", rows
        )


class GatherExchange:
    """Exchange over a function that gathers equally many bytes from all ranks of a larger group.

    Args:
        gather: called as ``gather(part, seconds)``, returns the parts of all ranks of the group
            concatenated in order; raises if that takes longer.
        members: the group's ranks that make up this world, in order of their new ranks.
        rounds: allgathers that every world of this group makes, two calls of gather each. close()
            makes the remaining ones, so that worlds whose bring-up ended early, and ranks
            that belong to none, do not keep the others waiting. 0: close() does nothing.
        failed: returns True if gather is known to raise from now on.
    """

    def __init__(
        self,
        gather: Callable[[bytes, float], bytes],
        members: Sequence[int],
        rounds: int = 0,
        patience: float = 30.0,
        failed: Callable[[], bool] = lambda: False,
    ) -> None:
        self._gather = gather
        self._members = list(members)
        self._rounds_left = rounds
        self._patience = patience
        self._failed = failed
        self.exits = ExitWatch(list)  # nobody has left

    def allgather(self, blob: bytes, deadline: float) -> list[bytes]:
        """Gathers the lengths of the blobs, then the blobs padded to the longest; see Exchange."""
        self._rounds_left -= 1
        lengths = self._call(_LENGTH.pack(len(blob)), deadline)
        sizes = [size for (size,) in _LENGTH.iter_unpack(lengths)]
        longest = max(sizes, default=0)
        if longest > MAX_BYTES or len(sizes) <= max(self._members, default=-1):
            raise BootstrapError("the ranks' parts have impossible sizes")
        parts = self._call(blob.ljust(longest, b"\0"), deadline) if longest else b""
        if len(parts) != longest * len(sizes):
            raise BootstrapError("the ranks' parts have impossible sizes")
        return [parts[r * longest : r * longest + sizes[r]] for r in self._members]

    def alarm(self, loop: Loop, ring: Callable[[], None], lost: Lost) -> None:
        """Rings once gather is known to fail, or a rank's lanes show that it has left."""
        self.exits = exits = ExitWatch(lost)
        loop.repeat(LOOK_EVERY, lambda: ring() if exits.rows() or self._failed() else None)

    def close(self) -> None:
        """Makes the remaining rounds and ignores their results and errors."""
        while self._rounds_left > 0:
            try:
                self.allgather(b"", time.monotonic() + self._patience)
            except RingcommError:
                return

    def _call(self, part: bytes, deadline: float) -> bytes:
        return bytes(self._gather(part, max(0.001, deadline - time.monotonic())))


def mpi_exchange(comm: Any) -> GatherExchange:
    """Makes an exchange over an mpi4py communicator, with buffers only: nothing is pickled."""
    size = int(comm.Get_size())

    def gather(part: bytes, seconds: float) -> bytes:
        mine, everyone = bytearray(part), bytearray(len(part) * size)
        give_up = time.monotonic() + seconds
        request = comm.Iallgather(mine, everyone)
        pause = 0.0
        while not request.Test():
            rows = exchange.exits.rows()
            if rows or time.monotonic() >= give_up:
                # Keeps the buffers: MPI may still write there, as no collective can be cancelled.
                _abandoned.append((request, mine, everyone))
                if rows:
                    raise join_error(FAILED_HEADLINE, rows)
                raise BootstrapError(
                    f"not all {size} ranks of the MPI communicator joined within {seconds:.1f} s"
                )
            time.sleep(pause)
            pause = min(pause + 0.0001, 0.005)
        return bytes(everyone)

    exchange = GatherExchange(gather, range(size))
    return exchange


_abandoned: list[tuple[Any, bytearray, bytearray]] = []
