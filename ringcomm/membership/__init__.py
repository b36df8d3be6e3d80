"""Rounds that outlive a peer: agreement on the members, and a communicator among exactly those.

For others: Membership and its Round.

    decision     the members of a round, from the knowledge of one rank (pure)
    messages     encoding of the messages between members
    control      a connection to each other rank, and which ranks live
    listening    addresses at which members listen
    formation    exchange between members that make a communicator
    agreement    one rank's part in agreeing on the members: sends, receives and decides
    member       Membership: the rounds of one rank, and its communicator

Messages, on a connection with an authenticated rank:

    INTRO   both, first                its process, and where each rank listens
    READY   each member to all         epoch, history, round; its communicator works; ranks blamed
    GO      the decider to all         the round's members; of a new epoch: form a communicator
    BLOB    a member to the decider    its part of a step of the bring-up
    ALL     the decider to members     all parts of the step
    FAILED  the decider to members     the formation failed

The lowest rank that is ready decides. A rank that is not in a GO of a new epoch is behind, and
comes back at the end of the others' round.
"""

from __future__ import annotations

from .member import Membership, Round

__all__ = ["Membership", "Round"]
