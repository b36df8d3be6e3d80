"""Peers: the members of a round, and their communicator.

Invariants: between ``begin_round`` and the next one ``comm`` connects exactly the round's members.
"""

from __future__ import annotations

from typing import NoReturn, Protocol

from ...communicator import Communicator
from ...errors import PeerLostError, RingcommError

_REMEDY = "OuterStep(comm=Membership()) goes on without a rank that is lost: docs/LOSING_A_RANK.md"


class Change(Protocol):
    """Ranks that have left and joined since the round before, by their numbers in the job."""

    @property
    def left(self) -> tuple[int, ...]:
        """Ranks that were lost or late since the round before."""

    @property
    def joined(self) -> tuple[int, ...]:
        """Members that must be given the state."""


class Peers(Protocol):
    """Decides on the members of rounds: ringcomm.membership.Membership, or FixedPeers."""

    @property
    def comm(self) -> Communicator:
        """Communicator of the round."""

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks that the communicator connects, in its order."""

    def begin_round(self, number: int, token: bytes = b"") -> Change:
        """Enters a round, and waits until its members are known."""

    def end_round(self) -> None:
        """Returns when all members have all results of the round; called before these are used."""

    def lost(self, error: RingcommError) -> Change:
        """Enters the same round anew with the remaining ranks, after a collective of it failed.
        Raises the error if that is impossible."""


class NoChange:
    """Change between two rounds of peers that never change."""

    left: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()


class FixedPeers:
    """Makes all ranks of a communicator the members of every round; a failure is final."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.members = tuple(range(comm.world_size))

    def begin_round(self, number: int, token: bytes = b"") -> Change:
        """Returns at once."""
        return NoChange()

    def end_round(self) -> None:
        """Does nothing: a failure is final, so no rank needs to know that the others have
        succeeded."""

    def lost(self, error: RingcommError) -> NoReturn:
        """Raises the error; if a peer was lost, its text names Membership."""
        if isinstance(error, PeerLostError) and _REMEDY not in str(error):  # it may be raised twice
            error.args = (f"{error}. {_REMEDY}",)
        raise error
