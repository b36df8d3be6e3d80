"""Decides the members of a round from the knowledge of one rank. Pure: no socket, no clock.

Each rank that is ready has sent READY to all others, so each knows the same but for the time that a
message takes. The lowest ready rank of the newest formation decides. If it does not act, because it
was paused after its READY, the next one decides TAKEOVER_S later, and leaves it out. A READY of a
rank that is gone does not count.

    ready      a rank that waits in begin_round or lost
    awaited    a member of the formation that is not ready, and may still come
    blamed     a rank that an error of another's communicator named; awaited for SETTLE_S only
    gone       a rank whose process has ended: not awaited
    behind     a rank without which a newer formation went on, or that was started again: it
               decides nothing

Invariants: no round has fewer than min_peers members. With min_peers > world_size / 2 any two
formations share a member, so of two halves of a partition at most one continues, and the latest
history is in every formation; but that member may have been started again, and have forgotten the
other formation. Two of one epoch are told apart by their deciders: no history stands for both.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

SETTLE_S = 0.25
"""Seconds to wait for a rank that an error names and that lives: it may have seen the failure."""
TAKEOVER_S = 1.0
"""Seconds after which the next rank decides."""

History = tuple[int, int, int]
"""The last round that a rank has completed: epoch, number and origin. The largest is the latest."""
NONE_YET: History = (-1, -1, 0)
STARTED_AGAIN: History = (-2, -2, 0)


@dataclasses.dataclass(frozen=True)
class Ready:
    """READY message of a rank that waits for a round."""

    rank: int
    history: History
    number: int
    """Number of the round that it would begin, or repeat."""
    healthy: bool
    """True if its communicator works."""
    blames: tuple[int, ...]
    """Ranks that errors of its communicator name."""
    token: bytes
    at: float
    """Time since which it is ready, by the clock of the process that keeps this object."""
    serial: int = 0
    """Number of this READY in its process; the latest counts."""
    epoch: int = -1
    """Epoch of the formation that it belongs to; -1: none."""
    origin: int = 0
    """Process that decided on that formation, which tells it from another of its epoch."""
    seen: int = -1
    """Highest epoch that it knows of."""
    behind: bool = False


class Silent(NamedTuple):
    """A rank at whose address something took a connection and does not answer: the rank itself,
    which is in a round, or another program."""

    since: float
    """Time since which the rank has not been connected."""
    places: tuple[str, ...]
    """Addresses with ports that took a connection."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Constants of a membership; see Membership for their meaning."""

    rank: int
    world_size: int
    min_peers: int
    grace_s: float
    timeout: float


@dataclasses.dataclass(frozen=True)
class Knowledge(Limits):
    """Knowledge of a rank.

    Attributes:
        members: ranks of the formation that it belongs to.
        ready: READY messages by rank, its own among them.
        connected: other ranks whose process lives, or seems to.
        gone: by rank, the time since which a process is known to have ended or was never met.
        linger_until: time until which a rank that is just being let in is waited for.
        silent: ranks among the connected that only seem to live.
        process: number of this rank's process; see pack_intro in messages.py.
    """

    members: tuple[int, ...]
    ready: Mapping[int, Ready]
    connected: frozenset[int]
    gone: Mapping[int, float]
    linger_until: float = 0.0
    silent: Mapping[int, Silent] = dataclasses.field(default_factory=dict)
    process: int = 0


@dataclasses.dataclass(frozen=True)
class Wait:
    """Decision to wait until this time, unless a message arrives."""

    until: float


@dataclasses.dataclass(frozen=True)
class TooFew:
    """Decision to give up: not enough ranks are left."""

    text: str
    missing: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Go:
    """Decision to begin a round: its members and their roles."""

    epoch: int
    number: int
    is_new: bool
    """True if they have to form a communicator; else that of this epoch is used on."""
    members: tuple[int, ...]
    serials: tuple[int, ...]
    """Serial of each member's READY that was counted."""
    tokens: tuple[bytes, ...]
    left: tuple[int, ...]
    joined: tuple[int, ...]
    leader: int
    """Rank with the latest history."""
    origin: int = 0
    """Process that decided on the formation."""


def decide(known: Knowledge, now: float) -> Go | Wait | TooFew:
    """Returns the decision of known.rank at the time now."""
    living = {
        rank: one for rank, one in known.ready.items() if now < known.gone.get(rank, math.inf)
    }
    known = dataclasses.replace(known, ready=living)
    deciders = _deciders(known)
    if known.rank not in deciders:
        return _wait_for_others(known, now)
    due = _due(known)
    if due is None:
        return _wait_for_enough(known, now)
    position = deciders.index(known.rank)
    act_at = due + position * TAKEOVER_S
    if now < act_at:
        return Wait(act_at)
    chosen = sorted(set(known.ready) - set(deciders[:position]))
    return _go(known, chosen if len(chosen) >= known.min_peers else sorted(known.ready))


def _deciders(known: Knowledge) -> list[int]:
    """Returns the ranks that may decide, in the order in which they do."""
    able = [ready for ready in known.ready.values() if not ready.behind]
    newest = max((ready.epoch for ready in able), default=0)
    return sorted(ready.rank for ready in able if ready.epoch == newest)


def _due(known: Knowledge) -> float | None:
    """Returns the earliest time to begin the round; None if too few are ready."""
    ready = sorted(one.at for one in known.ready.values())
    if len(ready) < known.min_peers:
        return None
    enough = max(ready[known.min_peers - 1], _began(known))
    settled = max((_settled_at(known, rank) for rank in known.members), default=enough)
    return max(min(enough + known.grace_s, max(enough, settled)), known.linger_until)


def _began(known: Knowledge) -> float:
    """Returns the time since which the round is waited for. Ranks that it lets in may have waited
    for all of the round before."""
    return min(known.ready[rank].at for rank in _deciders(known))


def _settled_at(known: Knowledge, rank: int) -> float:
    """Returns the time from which a member is not awaited any more."""
    if rank in known.ready:
        return known.ready[rank].at
    return min(known.gone.get(rank, math.inf), _blamed_at(known, rank) + SETTLE_S)


def _blamed_at(known: Knowledge, rank: int) -> float:
    return min((one.at for one in known.ready.values() if rank in one.blames), default=math.inf)


def _go(known: Knowledge, chosen: list[int]) -> Go:
    ready = [known.ready[rank] for rank in chosen]
    latest = max(one.history for one in ready)
    leader = next(one for one in ready if one.history == latest)
    mine = known.ready[known.rank]
    present = (mine.epoch, mine.origin)
    goes_on = tuple(chosen) == tuple(sorted(known.members)) and all(
        one.healthy and (one.epoch, one.origin) == present and not one.behind for one in ready
    )
    return Go(
        mine.epoch if goes_on else max(one.seen for one in ready) + 1,
        leader.number,
        not goes_on,
        tuple(chosen),
        tuple(one.serial for one in ready),
        tuple(one.token for one in ready),
        tuple(sorted(set(known.members) - set(chosen))),
        tuple(one.rank for one in ready if one.history != latest),
        leader.rank,
        mine.origin if goes_on else known.process,
    )


# ---- decisions to wait or to give up ----


def _wait_for_enough(known: Knowledge, now: float) -> Wait | TooFew:
    """Waits for min_peers: for living ranks, which may be slow, up to the timeout of a collective,
    for ended ones, which may be started again, up to the grace time."""
    first = _began(known)
    awaited = {rank for rank in known.connected if now < _settled_at(known, rank)}
    if len(awaited | known.ready.keys()) >= known.min_peers:
        until = first + max(known.grace_s, known.timeout)
    else:
        until = max([first, *known.gone.values()]) + known.grace_s
    return Wait(until) if now < until else _too_few(known, now)


def _wait_for_others(known: Knowledge, now: float) -> Wait | TooFew:
    """Waits, on a rank that is behind, for the end of the others' round; gives up if no other is
    in one."""
    behind = {rank: ready.at for rank, ready in known.ready.items() if ready.behind}
    if known.connected - known.silent.keys() - behind.keys():
        return Wait(math.inf)
    silent_since = (one.since for one in known.silent.values())
    since = max(*behind.values(), *known.gone.values(), *silent_since, known.ready[known.rank].at)
    until = since + (max(known.grace_s, known.timeout) if known.silent else known.grace_s)
    return Wait(until) if now < until else _left_alone(known, now)


def _left_alone(known: Knowledge, now: float) -> TooFew:
    others = tuple(rank for rank in range(known.world_size) if rank != known.rank)
    mine = known.ready[known.rank]
    why = (
        "has been started again"
        if mine.history == STARTED_AGAIN
        else "came late, and the others have gone on without it"
    )
    states = "; ".join(_state(known, rank, mine.at, now) for rank in others)
    found = "has answered" if known.silent else "is left to learn the latest state from"
    remedy = (
        "If it is a member in a longer round, give a longer timeout; if another program has the "
        "port, end it, or start all again from a checkpoint"
        if known.silent
        else "If they have finished, they have the result; else start all again from a checkpoint"
    )
    return TooFew(f"rank {known.rank} {why}, and no rank {found}: {states}. {remedy}", others)


def _too_few(known: Knowledge, now: float) -> TooFew:
    missing = tuple(rank for rank in range(known.world_size) if rank not in known.ready)
    states = "; ".join(_state(known, rank, _began(known), now) for rank in missing)
    here = ", ".join(map(str, sorted(known.ready)))
    return TooFew(
        f"{len(known.ready)} of at least {known.min_peers} ranks are here (rank {here}): {states}. "
        "Start what is missing again with rejoin=True, or all from a checkpoint",
        missing,
    )


def _state(known: Knowledge, rank: int, first: float, now: float) -> str:
    if rank in known.ready and rank in known.connected:
        return f"rank {rank} is behind as well"
    if rank in known.silent:
        since, places = known.silent[rank]
        return (
            f"what listens at {', '.join(places)}, where rank {rank} may be, has not answered for "
            f"{now - max(since, first):.1f} s"
        )
    if rank in known.connected:
        blamed = " and does not answer" if _blamed_at(known, rank) < math.inf else ""
        return f"rank {rank} lives{blamed}, and has not come for {now - first:.1f} s"
    return f"rank {rank} has been gone for {now - known.gone.get(rank, first):.1f} s"
