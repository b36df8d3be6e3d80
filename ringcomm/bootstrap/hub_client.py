"""The other ranks' end of the rendezvous: finds the hub, then sends one blob a round.

All candidate ports of the master address are tried side by side, in order of preference; the first
that proves to be this job's hub wins. Invariants: after open_member() there is one blocking
socket and nothing else; every wait has a deadline; nothing is allocated from a length that the
hub sends beyond what a world of this size can need.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterable

from ..config import Config
from ..errors import BootstrapError
from .dialer import Dial, Target
from .handshake_params import Key, Outcome, RefusedError, Terms
from .hub import ALL, BLOB, FAILED, HEADER
from .join_failure import LEFT, MAX_ROWS, Lost, Row, join_error
from .launch import Identity
from .loop import READ, Loop
from .meeting import resolve
from .records import LENGTH, MAX_BYTES, Record, split_blobs
from .secret import Secret, check_exposed
from .sockets import end_when_silent, peer_of, show, tune
from .system import describe

_STAGGER = 0.1  # seconds between starting to try one candidate port and the next
_RESOLVE_PAUSE = 0.5
_VERDICT_PATIENCE = 1.5  # seconds past our own deadline for the hub to send the missing ranks


def open_member(
    identity: Identity,
    config: Config,
    secret: Secret | None,
    key: Key,
    terms: Terms,
    deadline: float,
) -> Member:
    """Joins rank 0's hub.

    Raises ConfigError if the address needs a secret and there is none, BootstrapError with a
    table at the deadline, or as soon as the hub itself says that this rank cannot join.
    """
    addresses = _resolve_by(identity, deadline)
    check_exposed(addresses, secret, config.insecure)
    hub = _Search(identity, addresses, key, terms).run(deadline)
    end_when_silent(hub, config.peer_timeout)
    return Member(identity, hub)


def _resolve_by(identity: Identity, deadline: float) -> list[str]:
    """Resolves the master address; retries until the deadline, as the name may appear only when
    rank 0's host is up."""
    while True:
        try:
            return resolve(identity.master_addr)
        except OSError as error:
            if time.monotonic() + _RESOLVE_PAUSE >= deadline:
                why = f"the name cannot be resolved: {describe(error)}"
                row = Row(0, identity.rank, identity.master_addr, why)
                raise join_error("rank 0 was not found", [row]) from None
            time.sleep(_RESOLVE_PAUSE)


class _Search:
    """Dials every candidate port until one proves to be the hub."""

    def __init__(
        self, identity: Identity, addresses: Iterable[str], key: Key, terms: Terms
    ) -> None:
        self._identity = identity
        self._began = now = time.monotonic()
        self._found: socket.socket | None = None
        self._verdict: RefusedError | None = None
        self._loop = Loop()
        targets = [Target(a, port) for port in identity.master_ports for a in addresses]
        self._dials = [
            Dial(
                self._loop,
                target,
                key,
                terms,
                self._connected,
                self._refused,
                now + position * _STAGGER,
            )
            for position, target in enumerate(targets)
        ]

    def run(self, deadline: float) -> socket.socket:
        """Returns the socket of the hub. Raises BootstrapError."""
        try:
            self._loop.run(lambda: bool(self._found or self._verdict), deadline)
        finally:
            for dial in self._dials:
                dial.stop()
            self._loop.close()
        if self._found is not None:
            return self._found
        headline = f"rank 0 was not found within {time.monotonic() - self._began:.1f} s"
        if self._verdict is not None:
            headline = f"rank 0 refused rank {self._identity.rank}"
        raise join_error(headline, self._rows())

    def _connected(self, dial: Dial, sock: socket.socket) -> None:
        if self._found is None:
            self._found = sock
        else:
            sock.close()

    def _refused(self, dial: Dial, refusal: RefusedError) -> None:
        # Only the hub of our own job ends the search; other refusals may be another job's. We
        # may also have reached the hub at two of its addresses, and be our own duplicate.
        if refusal.proven and (
            refusal.outcome == Outcome.UNEXPECTED_PEER
            or (refusal.outcome == Outcome.DUPLICATE and not any(d.shaking for d in self._dials))
        ):
            self._verdict = refusal

    def _rows(self) -> list[Row]:
        """Returns one row for each address and state; ports with the same state share it."""
        ports: dict[tuple[str, str, str], list[int]] = {}
        for dial in self._dials:
            fared = (dial.target.address, dial.state, dial.detail)
            ports.setdefault(fared, []).append(dial.target.port)
        rows = []
        for (address, state, detail), alike in ports.items():
            shown = show(address, alike[0])
            if len(alike) > 1:
                shown += f" (and {len(alike) - 1} more ports)"
            rows.append(Row(0, self._identity.rank, shown, state, detail))
        return rows


class Member:
    """Rendezvous of a rank other than 0."""

    def __init__(self, identity: Identity, sock: socket.socket) -> None:
        self._rank = identity.rank
        self._world = identity.world_size
        self._sock = sock
        self._address = peer_of(sock)
        self._round = 0
        tune(sock)

    def allgather(self, blob: bytes, deadline: float) -> list[bytes]:
        """Sends this rank's blob and receives all blobs; see rendezvous.Exchange."""
        self._round += 1
        left_ms = max(0, min(int(1000 * (deadline - time.monotonic())), 2**32 - 1))
        try:
            self._arm(deadline)
            # Rank 0 may have sent FAILED already, and left.
            with contextlib.suppress(ConnectionError):
                self._sock.sendall(HEADER.pack(BLOB, self._round, left_ms, len(blob)) + blob)
            return self._answer(deadline + _VERDICT_PATIENCE)
        except TimeoutError:
            raise self._lost("no answer") from None
        except BootstrapError:
            raise
        except OSError as error:
            raise self._lost(f"the connection broke: {error.strerror}") from error

    def alarm(self, loop: Loop, ring: Callable[[], None], _lost: Lost) -> None:
        """Rings when rank 0 sends or closes: between two rounds it does so only if the bring-up
        has failed."""

        def look() -> None:
            loop.forget(self._sock)
            ring()

        loop.watch(self._sock, READ, look)

    def close(self) -> None:
        """Leaves the rendezvous."""
        self._sock.close()

    def _answer(self, deadline: float) -> list[bytes]:
        kind, number, _, size = HEADER.unpack(self._receive(HEADER.size, deadline))
        limit = self._world * (LENGTH.size + MAX_BYTES)
        if number != self._round or size > limit:
            raise self._lost("sent what no ringcomm sends")
        payload = self._receive(size, deadline)
        if kind == FAILED:
            record = Record.unpack("rank 0", payload)
            rows = [Row.from_record(r, self._world) for r in record.records("rows", MAX_ROWS)]
            raise join_error(record.text("headline"), rows)
        blobs = split_blobs(payload, self._world) if kind == ALL else None
        if blobs is None:
            raise self._lost("sent what no ringcomm sends")
        return blobs

    def _lost(self, state: str) -> BootstrapError:
        return join_error(
            "rank 0 was lost during the bring-up", [Row(0, self._rank, self._address, state)]
        )

    def _receive(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._arm(deadline)
            part = self._sock.recv(min(size - len(data), MAX_BYTES))
            if not part:
                raise self._lost(LEFT)
            data += part
        return bytes(data)

    def _arm(self, deadline: float) -> None:
        self._sock.settimeout(max(0.001, deadline - time.monotonic()))
