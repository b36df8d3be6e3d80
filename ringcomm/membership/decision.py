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
class Terms:
    """Constants of a membership; see Membership for their meaning."""

    rank: int
    world_size: int
    min_peers: int
    grace_s: float
    timeout: float


@dataclasses.dataclass(frozen=True)
class View(Terms):
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


def decide(view: View, now: float) -> Go | Wait | TooFew:
    """Returns the decision of view.rank at the time now."""
    living = {rank: one for rank, one in view.ready.items() if now < view.gone.get(rank, math.inf)}
    view = dataclasses.replace(view, ready=living)
    deciders = _deciders(view)
    if view.rank not in deciders:
        return _wait_for_others(view, now)
    due = _due(view)
    if due is None:
        return _wait_for_enough(view, now)
    position = deciders.index(view.rank)
    act_at = due + position * TAKEOVER_S
    if now < act_at:
        return Wait(act_at)
    chosen = sorted(set(view.ready) - set(deciders[:position]))
    return _go(view, chosen if len(chosen) >= view.min_peers else sorted(view.ready))


def _deciders(view: View) -> list[int]:
    """Returns the ranks that may decide, in the order in which they do."""
    able = [ready for ready in view.ready.values() if not ready.behind]
    newest = max((ready.epoch for ready in able), default=0)
    return sorted(ready.rank for ready in able if ready.epoch == newest)


def _due(view: View) -> float | None:
    """Returns the earliest time to begin the round; None if too few are ready."""
    ready = sorted(one.at for one in view.ready.values())
    if len(ready) < view.min_peers:
        return None
    enough = max(ready[view.min_peers - 1], _began(view))
    settled = max((_settled_at(view, rank) for rank in view.members), default=enough)
    return max(min(enough + view.grace_s, max(enough, settled)), view.linger_until)


def _began(view: View) -> float:
    """Returns the time since which the round is waited for. Ranks that it lets in may have waited
    for all of the round before."""
    return min(view.ready[rank].at for rank in _deciders(view))


def _settled_at(view: View, rank: int) -> float:
    """Returns the time from which a member is not awaited any more."""
    if rank in view.ready:
        return view.ready[rank].at
    return min(view.gone.get(rank, math.inf), _blamed_at(view, rank) + SETTLE_S)


def _blamed_at(view: View, rank: int) -> float:
    return min((one.at for one in view.ready.values() if rank in one.blames), default=math.inf)


def _go(view: View, chosen: list[int]) -> Go:
    ready = [view.ready[rank] for rank in chosen]
    latest = max(one.history for one in ready)
    leader = next(one for one in ready if one.history == latest)
    mine = view.ready[view.rank]
    present = (mine.epoch, mine.origin)
    goes_on = tuple(chosen) == tuple(sorted(view.members)) and all(
        one.healthy and (one.epoch, one.origin) == present and not one.behind for one in ready
    )
    return Go(
        mine.epoch if goes_on else max(one.seen for one in ready) + 1,
        leader.number,
        not goes_on,
        tuple(chosen),
        tuple(one.serial for one in ready),
        tuple(one.token for one in ready),
        tuple(sorted(set(view.members) - set(chosen))),
        tuple(one.rank for one in ready if one.history != latest),
        leader.rank,
        mine.origin if goes_on else view.process,
    )


# ---- decisions to wait or to give up ----


def _wait_for_enough(view: View, now: float) -> Wait | TooFew:
    """Waits for min_peers: for living ranks, which may be slow, up to the timeout of a collective,
    for ended ones, which may be started again, up to the grace time."""
    first = _began(view)
    awaited = {rank for rank in view.connected if now < _settled_at(view, rank)}
    if len(awaited | view.ready.keys()) >= view.min_peers:
        until = first + max(view.grace_s, view.timeout)
    else:
        until = max([first, *view.gone.values()]) + view.grace_s
    return Wait(until) if now < until else _too_few(view, now)


def _wait_for_others(view: View, now: float) -> Wait | TooFew:
    """Waits, on a rank that is behind, for the end of the others' round; gives up if no other is
    in one."""
    behind = {rank: ready.at for rank, ready in view.ready.items() if ready.behind}
    if view.connected - view.silent.keys() - behind.keys():
        return Wait(math.inf)
    silent_since = (one.since for one in view.silent.values())
    since = max(*behind.values(), *view.gone.values(), *silent_since, view.ready[view.rank].at)
    until = since + (max(view.grace_s, view.timeout) if view.silent else view.grace_s)
    return Wait(until) if now < until else _left_alone(view, now)


def _left_alone(view: View, now: float) -> TooFew:
    others = tuple(rank for rank in range(view.world_size) if rank != view.rank)
    mine = view.ready[view.rank]
    why = (
        "has been started again"
        if mine.history == STARTED_AGAIN
        else "came late, and the others have gone on without it"
    )
    states = "; ".join(_state(view, rank, mine.at, now) for rank in others)
    found = "has answered" if view.silent else "is left to learn the latest state from"
    remedy = (
        "If it is a member in a longer round, give a longer timeout; if another program has the "
        "port, end it, or start all again from a checkpoint"
        if view.silent
        else "If they have finished, they have the result; else start all again from a checkpoint"
    )
    return TooFew(f"rank {view.rank} {why}, and no rank {found}: {states}. {remedy}", others)


def _too_few(view: View, now: float) -> TooFew:
    missing = tuple(rank for rank in range(view.world_size) if rank not in view.ready)
    states = "; ".join(_state(view, rank, _began(view), now) for rank in missing)
    here = ", ".join(map(str, sorted(view.ready)))
    return TooFew(
        f"{len(view.ready)} of at least {view.min_peers} ranks are here (rank {here}): {states}. "
        "Start what is missing again with rejoin=True, or all from a checkpoint",
        missing,
    )


def _state(view: View, rank: int, first: float, now: float) -> str:
    if rank in view.ready and rank in view.connected:
        return f"rank {rank} is behind as well"
    if rank in view.silent:
        since, places = view.silent[rank]
        return (
            f"what listens at {', '.join(places)}, where rank {rank} may be, has not answered for "
            f"{now - max(since, first):.1f} s"
        )
    if rank in view.connected:
        blamed = " and does not answer" if _blamed_at(view, rank) < math.inf else ""
        return f"rank {rank} lives{blamed}, and has not come for {now - first:.1f} s"
    return f"rank {rank} has been gone for {now - view.gone.get(rank, first):.1f} s"
