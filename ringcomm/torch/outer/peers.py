"""Peers: who takes part in a round, and over which communicator.

Invariants: between ``begin_round`` and the next one ``comm`` connects exactly the round's members.
"""

from __future__ import annotations

from typing import NoReturn, Protocol

from ...communicator import Communicator
from ...errors import PeerLostError, RingcommError

_REMEDY = "OuterStep(min_peers=...) goes on without a rank that is lost: docs/LOSING_A_RANK.md"


class Round(Protocol):
    """Who takes part in one round. Ranks are those of the whole job."""

    @property
    def left(self) -> tuple[int, ...]:
        """Ranks that were lost or late since the round before."""

    @property
    def joined(self) -> tuple[int, ...]:
        """Members that need the state."""


class Peers(Protocol):
    """What decides on that: ringcomm.membership.Membership, or FixedPeers."""

    @property
    def comm(self) -> Communicator:
        """The communicator of the round."""

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that it connects, in its order."""

    def begin_round(self, number: int, token: bytes = b"") -> Round:
        """Enters a round, and waits until it is known who does."""

    def end_round(self) -> None:
        """Returns once all members have all that the round brings; before it is used."""

    def lost(self, error: RingcommError) -> Round:
        """A collective of the round failed: who is left enters the same round anew. Raises the
        error where that cannot be."""


class EveryRound:
    """The round of peers that never change."""

    left: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()


class FixedPeers:
    """All ranks of a communicator, in every round; a failure is final."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.members = tuple(range(comm.world_size))

    def begin_round(self, number: int, token: bytes = b"") -> Round:
        """Nobody is waited for."""
        return EveryRound()

    def end_round(self) -> None:
        """A failure is final, so nobody needs to know that the others have succeeded."""

    def lost(self, error: RingcommError) -> NoReturn:
        """Raises the error; where a peer was lost, it says how to go on without one."""
        if isinstance(error, PeerLostError) and _REMEDY not in str(error):  # raised again, later
            error.args = (f"{error}. {_REMEDY}",)
        raise error
