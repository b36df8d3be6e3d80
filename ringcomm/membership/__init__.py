"""Rounds that outlive a peer: who takes part, and a communicator among exactly those.

    decision     who takes part, from what a rank knows (pure)
    messages     what members say to each other
    control      a connection to each other rank, and who lives
    places       where members listen
    formation    how members meet to make a communicator
    agreement    how a rank comes to know who takes part: what it says, hears and decides
    member       Membership: the rounds of one rank, and its communicator

Messages, on a connection with an authenticated rank:

    INTRO   both, first                which process it is, and where each rank listens
    READY   each member to all         epoch, history, round; its communicator works; whom it blames
    GO      the decider to all         the round's members; of a new epoch: form a communicator
    BLOB    a member to the decider    its part of a step of the bring-up
    ALL     the decider to members     all parts of the step
    FAILED  the decider to members     the formation came to nothing

The lowest rank that is ready decides. Who is not in a GO of a new epoch is behind, and comes back
at the end of the others' round.
"""

from __future__ import annotations

from .member import Membership, Round

__all__ = ["Membership", "Round"]
