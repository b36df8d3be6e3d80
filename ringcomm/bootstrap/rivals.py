"""Detects two processes of one job that were both started with RANK=0.

A rank 0 that finds a port in use connects there as a client that claims rank 0: only a hub of the
same job, which has checked its proof, can answer that it has this rank already. Invariants: the
search delays rank 0 only if it cannot listen anywhere; any other program on the port is asked once.
"""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Sequence

from .dialer import Dial, Target
from .handshake import Client
from .handshake_params import Key, Outcome, RefusedError, Terms
from .join_failure import JoinError, Row, join_error
from .loop import Loop
from .same_user import vetting
from .sockets import show

HEADLINE = "two processes of this job say that they are rank 0: give each a RANK of its own"
_PATIENCE = 1.0  # seconds for a hub that waits for its members to answer


class RivalSearch:
    """Dials the targets; ``found`` is a row for the other rank 0 once it has answered."""

    def __init__(self, loop: Loop, key: Key, terms: Terms, targets: Sequence[Target]) -> None:
        self.found: Row | None = None
        claim = dataclasses.replace(terms, client_rank=0)
        self._dials = [
            Dial(
                loop,
                target,
                lambda sock: Client(key, claim, vetting(key, sock)),
                self._connected,
                self._refused,
            )
            for target in targets
        ]

    def stop(self) -> None:
        """Stops dialling."""
        for dial in self._dials:
            dial.stop()

    @staticmethod
    def _connected(_dial: Dial, sock: socket.socket) -> None:
        sock.close()  # no hub lets rank 0 in

    def _refused(self, dial: Dial, refusal: RefusedError) -> None:
        dial.stop()
        if refusal.proven and refusal.outcome == Outcome.DUPLICATE:
            there = show(dial.target.address, dial.target.port)
            self.found = Row(0, -1, there, refusal.outcome.text, str(refusal))


def find_rival(targets: Sequence[Target], key: Key, terms: Terms) -> JoinError | None:
    """Returns the error to raise if another rank 0 of this job listens at one of the targets."""
    loop = Loop()
    search = RivalSearch(loop, key, terms, targets)
    try:
        loop.run(lambda: search.found is not None, time.monotonic() + _PATIENCE)
    finally:
        search.stop()
        loop.close()
    return None if search.found is None else join_error(HEADLINE, [search.found])
