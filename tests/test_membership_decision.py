"""Who takes part in a round, decided with a clock of the test's own; and what is said between
ranks, over real connections, where a rank falls silent at the worst moment."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import PATIENCE, until

from ringcomm import BootstrapError, PeerLostError
from ringcomm.bootstrap.handshake import Client
from ringcomm.bootstrap.handshake_params import Key, job_hash
from ringcomm.bootstrap.join_failure import MUTE, NO_ANSWER
from ringcomm.bootstrap.records import join_blobs, split_blobs
from ringcomm.bootstrap.secret import Secret
from ringcomm.bootstrap.sockets import listen
from ringcomm.membership import messages
from ringcomm.membership.agreement import Agreement
from ringcomm.membership.control import Control
from ringcomm.membership.decision import (
    SETTLE_S,
    STARTED_AGAIN,
    TAKEOVER_S,
    Go,
    Knowledge,
    Limits,
    Ready,
    Silent,
    TooFew,
    Wait,
    decide,
)
from ringcomm.membership.formation import Formation

GRACE = 30.0
TCP_REPAIR = 19
"""Option of a socket that is taken from its kernel, and put into another one."""


def ready(rank: int, at: float = 0.0, **fields: Any) -> Ready:
    values: dict[str, Any] = {
        "history": (0, 7, 0),
        "number": 8,
        "healthy": True,
        "blames": (),
        "token": b"",
        "serial": 1,
        "epoch": 0,
        "seen": 0,
        **fields,
    }
    return Ready(rank, at=at, **values)


def seen_by(
    rank: int, world: int, *those: Ready, gone: dict[int, float] | None = None, **fields: Any
) -> Knowledge:
    gone = gone or {}
    others = set(range(world)) - {rank}
    values: dict[str, Any] = {
        "min_peers": world // 2 + 1,
        "grace_s": GRACE,
        "timeout": 300.0,
        "members": tuple(range(world)),
        "connected": frozenset(others - set(gone)),
        **fields,
    }
    return Knowledge(rank, world, ready={one.rank: one for one in those}, gone=gone, **values)


def go(outcome: object) -> Go:
    assert isinstance(outcome, Go), outcome
    return outcome


# ---- who, and when ----


def test_all_there_goes_on_with_what_there_is() -> None:
    one = go(decide(seen_by(0, 3, *(ready(r, token=bytes([r])) for r in range(3))), 0.0))
    assert not one.is_new
    assert (one.epoch, one.number, one.members) == (0, 8, (0, 1, 2))
    assert one.tokens == (b"\0", b"\1", b"\2")
    assert one.left == one.joined == ()


def test_a_late_rank_is_waited_for_since_enough_are_ready() -> None:
    view = seen_by(0, 5, ready(0, 1.0), ready(1, 2.0), ready(2, 40.0), ready(3, 41.0))
    assert decide(view, 41.0) == Wait(40.0 + GRACE)
    one = go(decide(view, 40.0 + GRACE))
    assert (one.is_new, one.epoch, one.members, one.left) == (True, 1, (0, 1, 2, 3), (4,))


def test_who_has_died_is_not_waited_for() -> None:
    view = seen_by(0, 3, ready(0, 1.0), ready(1, 2.0), gone={2: 5.0})
    assert go(decide(view, 5.0)).left == (2,)
    assert isinstance(decide(dataclasses.replace(view, gone={2: 9.0}), 8.0), Wait)


def test_who_is_blamed_has_a_moment() -> None:
    view = seen_by(0, 3, ready(0, 3.0, healthy=False, blames=(2,)), ready(1, 3.1))
    assert decide(view, 3.2) == Wait(3.0 + SETTLE_S)
    assert go(decide(view, 3.0 + SETTLE_S)).left == (2,)
    there = dataclasses.replace(view, ready={**view.ready, 2: ready(2, 3.2)})
    assert go(decide(there, 3.2)).members == (0, 1, 2)


def test_who_is_no_member_is_not_waited_for_and_is_let_in() -> None:
    both = [ready(rank, epoch=4, history=(4, 7, 0)) for rank in (0, 1)]
    view = seen_by(0, 3, *both, members=(0, 1))
    assert not go(decide(view, 0.0)).is_new
    back = ready(2, epoch=2, seen=9, behind=True, history=(2, 3, 0), number=4)
    one = go(decide(dataclasses.replace(view, ready={**view.ready, 2: back}), 0.0))
    assert (one.is_new, one.epoch, one.number) == (True, 10, 8)
    assert (one.members, one.joined, one.left) == ((0, 1, 2), (2,), ())
    assert one.leader in (0, 1)


def test_who_is_at_the_door_is_waited_for_a_moment() -> None:
    view = seen_by(0, 3, ready(0), ready(1), members=(0, 1), linger_until=0.25)
    assert decide(view, 0.0) == Wait(0.25)
    assert isinstance(decide(view, 0.25), Go)


def test_the_same_ranks_form_anew_where_one_communicator_is_broken() -> None:
    one = go(decide(seen_by(0, 3, ready(0), ready(1, healthy=False), ready(2)), 0.0))
    assert (one.is_new, one.members, one.left, one.joined) == (True, (0, 1, 2), (), ())


def test_the_next_rank_takes_over_and_leaves_out_who_did_not_act() -> None:
    those = [ready(rank) for rank in range(4)]
    assert decide(seen_by(1, 4, *those), 0.0) == Wait(TAKEOVER_S)
    one = go(decide(seen_by(1, 4, *those), TAKEOVER_S))
    assert (one.members, one.left) == ((1, 2, 3), (0,))
    # With too few without it there is nothing to lose.
    assert go(decide(seen_by(2, 4, *those), 2 * TAKEOVER_S)).members == (0, 1, 2, 3)


def test_the_latest_history_leads() -> None:
    """Rank 0 repeats a round that the others have completed in the same formation; rank 1's is of
    an older one."""
    those = [
        ready(0, history=(3, 6, 0), number=7, healthy=False),
        ready(1, history=(2, 9, 0), number=10),
        ready(2, history=(3, 7, 0), number=8),
    ]
    one = go(decide(seen_by(0, 3, *(dataclasses.replace(r, epoch=3) for r in those)), 0.0))
    assert (one.leader, one.joined, one.number) == (2, (0, 1), 8)


def test_formations_of_one_epoch_are_told_apart() -> None:
    """Rank 0 has been in another one than ranks 1 and 2, and made as many rounds."""
    those = [ready(rank, epoch=1, history=(1, 7, 3), origin=3) for rank in (1, 2)]
    mine = ready(0, epoch=1, history=(1, 7, 2), origin=2)
    view = seen_by(0, 3, mine, *those, members=(0, 1), gone={}, process=4)
    one = go(decide(view, 0.0))
    assert (one.leader, one.joined, one.is_new, one.origin) == (1, (0,), True, 4)
    assert go(decide(dataclasses.replace(view, ready={0: mine, 1: those[0]}), 0.0)).is_new


# ---- who may not decide ----


def test_who_is_behind_decides_nothing() -> None:
    mine = ready(1, behind=True)
    alone = seen_by(1, 2, mine, min_peers=1)
    assert decide(alone, 1e6) == Wait(math.inf)
    deserted = dataclasses.replace(alone, connected=frozenset(), gone={0: 100.0})
    assert decide(deserted, 100.0 + GRACE - 1) == Wait(100.0 + GRACE)
    assert isinstance(decide(deserted, 100.0 + GRACE), TooFew)


def test_who_was_started_again_does_not_decide_for_others() -> None:
    mine = ready(0, epoch=-1, behind=True, history=STARTED_AGAIN)
    assert decide(seen_by(0, 3, mine, ready(1), members=()), 1e6) == Wait(math.inf)
    view = seen_by(1, 3, mine, ready(1), gone={2: 0.0})
    assert go(decide(view, 0.0)).joined == (0,)


def test_a_member_of_an_older_formation_waits_for_one_of_the_newest() -> None:
    view = seen_by(0, 3, ready(0, epoch=1), ready(1, epoch=2))
    assert decide(view, 1e6) == Wait(math.inf)


# ---- too few ----


def test_too_few_wait_for_who_lives_as_a_collective_would() -> None:
    view = seen_by(0, 3, ready(0, 5.0))
    assert decide(view, 6.0) == Wait(5.0 + 300.0)
    outcome = decide(view, 305.0)
    assert isinstance(outcome, TooFew)
    assert outcome.missing == (1, 2)
    assert "rank 1 lives, and has not come for 300.0 s" in outcome.text


@pytest.mark.parametrize("min_peers", [1, 3])
def test_who_has_waited_for_long_to_be_let_in_hastens_nobody(min_peers: int) -> None:
    long = ready(3, -900.0, behind=True, epoch=-1, history=STARTED_AGAIN)
    view = seen_by(0, 4, ready(0, 5.0), long, members=(0, 1, 2), min_peers=min_peers)
    until = 5.0 + (GRACE if min_peers == 1 else 300.0)
    assert decide(view, 5.0) == Wait(until)
    assert isinstance(decide(view, until), Go if min_peers == 1 else TooFew)


def test_too_few_wait_the_grace_time_for_who_may_be_started_again() -> None:
    view = seen_by(0, 3, ready(0, 5.0), gone={1: 7.0, 2: 9.0})
    assert decide(view, 10.0) == Wait(9.0 + GRACE)
    outcome = decide(view, 9.0 + GRACE)
    assert isinstance(outcome, TooFew)
    assert "1 of at least 2 ranks are here (rank 0)" in outcome.text
    assert "rank 1 has been gone for 32.0 s; rank 2 has been gone for 30.0 s" in outcome.text


@pytest.mark.parametrize(
    ("mine", "why"),
    [
        (ready(1, 5.0, behind=True), "came late, and the others have gone on without it"),
        (ready(1, 5.0, epoch=-1, behind=True, history=STARTED_AGAIN), "has been started again"),
    ],
)
def test_who_is_behind_and_left_alone_is_told_so(mine: Ready, why: str) -> None:
    """Though as many as it takes have said that they are ready, those that ended among them."""
    view = seen_by(1, 2, ready(0, 3.0, epoch=1), mine, gone={0: 6.0}, min_peers=1)
    assert decide(view, 7.0) == Wait(6.0 + GRACE)
    outcome = decide(view, 6.0 + GRACE)
    assert isinstance(outcome, TooFew)
    assert outcome.missing == (0,)
    assert outcome.text == (
        f"rank 1 {why}, and no rank is left to learn the latest state from: rank 0 has been "
        "gone for 30.0 s. If they have finished, they have the result; else start all again from a "
        "checkpoint"
    )


def test_who_is_behind_waits_for_the_silent_no_longer_than_for_a_collective() -> None:
    """Something has taken the connection to rank 0, and may be no member."""
    mine = ready(1, 5.0, epoch=-1, behind=True, history=STARTED_AGAIN)
    doors = {0: Silent(2.0, ("10.0.0.1:29400",))}
    view = seen_by(1, 3, mine, members=(), gone={2: 0.0}, silent=doors)
    assert decide(view, 6.0) == Wait(5.0 + 300.0)
    outcome = decide(view, 305.0)
    assert isinstance(outcome, TooFew)
    assert "what listens at 10.0.0.1:29400, where rank 0 may be, has not answered for 300.0 s" in (
        outcome.text
    )
    linked = dataclasses.replace(view, connected=frozenset({0, 2}), gone={})
    assert decide(linked, 1e6) == Wait(math.inf)


def test_all_were_started_again() -> None:
    """None of them has the state, so they do not wait for each other without end."""
    those = [
        ready(rank, float(rank), epoch=-1, behind=True, history=STARTED_AGAIN) for rank in range(2)
    ]
    view = seen_by(0, 3, *those, members=(), gone={2: 0.5})
    assert decide(view, 2.0) == Wait(1.0 + GRACE)
    outcome = decide(view, 1.0 + GRACE)
    assert isinstance(outcome, TooFew)
    assert "no rank is left to learn the latest state from: rank 1 is behind as well; rank 2" in (
        outcome.text
    )


# ---- of any state ----


@st.composite
def any_state(draw: st.DrawFn) -> tuple[Knowledge, float]:
    world = draw(st.integers(2, 6))
    rank = draw(st.integers(0, world - 1))
    moments = st.floats(0.0, 100.0)
    those = {rank} | draw(st.sets(st.integers(0, world - 1)))
    others = set(range(world)) - {rank}
    gone = {one: draw(moments) for one in draw(st.sets(st.sampled_from(sorted(others)))) - those}
    states = [
        ready(
            one,
            draw(moments),
            epoch=draw(st.integers(0, 2)),
            behind=draw(st.booleans()),
            blames=tuple(draw(st.sets(st.integers(0, world - 1)))),
            healthy=draw(st.booleans()),
            history=draw(st.tuples(*[st.integers(0, 2)] * 3)),
        )
        for one in those
    ]
    view = seen_by(rank, world, *states, gone=gone)
    return view, draw(st.floats(0.0, 1000.0))


@settings(max_examples=150)
@given(any_state())
def test_whatever_the_state(case: tuple[Knowledge, float]) -> None:
    """No round of too few; none without who decided; all members were ready; waiting is to a time
    that is still to come, and comes to an end unless this rank may not decide."""
    view, now = case
    outcome = decide(view, now)
    if isinstance(outcome, Go):
        assert view.rank in outcome.members
        assert view.min_peers <= len(outcome.members)
        assert set(outcome.members) <= set(view.ready)
        assert outcome.leader in outcome.members
        assert outcome.leader not in outcome.joined
        assert outcome.is_new or outcome.members == view.members
    elif isinstance(outcome, Wait):
        assert outcome.until > now
        if outcome.until < math.inf:
            assert not isinstance(decide(view, outcome.until), Wait) or view.gone


# ---- what is said ----


def test_messages_survive_the_wire() -> None:
    fields = {"blames": (0, 1), "token": b"\xff\0", "behind": True, "history": STARTED_AGAIN}
    one = ready(2, 10.0, origin=5, **fields)
    assert messages.read_ready(2, messages.pack_ready(one, 12.0), 3, 112.0) == (
        dataclasses.replace(one, at=110.0)
    )
    view = seen_by(0, 3, ready(0), ready(1, healthy=False), ready(2), process=6)
    first = go(decide(view, 0.0))
    assert messages.read_go("rank 0", messages.pack_go(first), 3) == first
    book = {0: [("127.0.0.1", 5)], 2: [("::1", 6), ("10.0.0.1", 7)]}
    assert messages.read_book("rank 0", messages.pack_book(book), 3) == book
    assert messages.read_intro("rank 0", messages.pack_intro(7, book), 3) == (7, book)
    many = range(1000)
    longest = dataclasses.replace(
        first, members=tuple(many), serials=(2**62,) * 1000, tokens=(b"\xff" * 256,) * 1000
    )
    assert messages.read_go("rank 0", messages.pack_go(longest), 1000) == longest
    book = {rank: [("fd07:1:2:3:4:5:6:7", 65535)] * 8 for rank in many}
    assert messages.read_intro("rank 0", messages.pack_intro(7, book), 1000) == (7, book)
    blobs = [b"a", b"", b"ccc"]
    epoch, step, rest = messages.read_part(0, messages.pack_part(3, 2, join_blobs(blobs)))
    assert (epoch, step, split_blobs(rest, 3)) == (3, 2, blobs)


@pytest.mark.parametrize(
    "payload", [b"", b"{}", b"[]", b"\xff", b'{"members":[{"rank":9}]}', b"{" * 5000]
)
def test_what_is_malformed_is_refused(payload: bytes) -> None:
    for read in (
        lambda: messages.read_ready(1, payload, 3, 0.0),
        lambda: messages.read_go("rank 1", payload, 3),
        lambda: messages.read_book("rank 1", payload, 3),
        lambda: messages.read_intro("rank 1", payload, 3),
        lambda: messages.read_failed("rank 1", payload, 3),
    ):
        with pytest.raises(BootstrapError, match="rank 1"):
            read()


def test_an_older_formation_may_blame_who_is_not_in_this_one() -> None:
    first = go(decide(seen_by(0, 3, ready(0), ready(1), gone={2: 0.0}), 0.0))
    formation = Formation(cast(Any, None), 1, 0, first)
    late = messages.pack_failed(first.epoch - 1, (2,), "rank 2 does not answer")
    formation.receive(0, messages.Kind.FAILED, late, 3)
    formation._raise_trouble()


def test_a_step_that_is_complete_counts_though_the_formation_failed_behind_it() -> None:
    """Else a rank whose own part has failed would not learn how many others could do theirs."""
    epoch, blobs = 1, [b"{}", b'{"error":"no carrier"}']

    def run(until: Callable[[], bool], _deadline: float) -> bool:
        formation.receive(0, messages.Kind.ALL, messages.pack_part(epoch, 1, join_blobs(blobs)), 2)
        formation.receive(0, messages.Kind.FAILED, messages.pack_failed(epoch, (1,), "late"), 2)
        return until()

    control = SimpleNamespace(
        loop=SimpleNamespace(run=run), send=lambda *_: None, is_linked=lambda _: True
    )
    view = seen_by(0, 2, ready(0), ready(1, healthy=False))
    formation = Formation(cast(Any, control), 1, 0, go(decide(view, 0.0)))
    assert (formation.allgather(b"{}", 0.0), formation.unable) == (blobs, {1})
    with pytest.raises(BootstrapError, match="late"):
        formation.allgather(b"{}", 0.0)


# ---- over connections ----


def agreement(limits: Limits, job: bytes, secret: Secret | None = None) -> Agreement:
    """One over real connections, which listens on loopback."""
    listener, key = listen("127.0.0.1"), Key.derive(secret, job)
    return Agreement(
        limits,
        [listener.getsockname()[:2]],
        partial(Control, limits.rank, limits.world_size, key, job, [listener], limits.grace_s),
    )


class Ranks:
    """Agreements of one job, each driven by its own thread. Close it."""

    def __init__(self, world: int, min_peers: int = 2, grace_s: float = 3.0) -> None:
        job = job_hash("test")
        self.all = [
            agreement(Limits(rank, world, min_peers, grace_s, 6.0), job) for rank in range(world)
        ]
        books = [one.own_places for one in self.all]
        self.run({rank: lambda one: one.meet_all(books, PATIENCE) for rank in range(world)})

    def run(self, what: dict[int, Callable[[Agreement], Any]]) -> dict[int, Any]:
        """Each rank's function at once; results or errors by rank."""
        results: dict[int, Any] = {}

        def body(rank: int) -> None:
            try:
                results[rank] = what[rank](self.all[rank])
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in what]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        return results

    def close(self) -> None:
        for one in self.all:
            one.close()


@pytest.fixture
def ranks(nothing_left: None) -> Iterator[Ranks]:
    made = Ranks(3)
    yield made
    made.close()


def comes(rank: int, **fields: Any) -> Callable[[Agreement], Go]:
    """Comes to a round, and enters it without a formation."""

    def body(one: Agreement) -> Go:
        one.catch_up()
        one.send_ready(ready(rank, time.monotonic(), **fields))
        made = one.wait().go
        one.entered(made)
        return made

    return body


def test_a_ready_has_its_consequence_once(ranks: Ranks) -> None:
    """Rank 1 has repeated its READY just before it heard the GO that counts it, and comes to the
    next round late: the copy does not stand for it."""
    ranks.run({rank: comes(rank, number=1) for rank in range(3)})
    copy = messages.pack_ready(ready(1, time.monotonic(), serial=1), time.monotonic())
    for other in (0, 2):
        ranks.all[1]._control.send(other, messages.Kind.READY, copy)

    def comes_late(one: Agreement) -> Go:
        time.sleep(0.3)
        return comes(1, number=2)(one)

    made = ranks.run({0: comes(0, number=2), 1: comes_late, 2: comes(2, number=2)})
    assert made[0] == made[1] == made[2], made
    assert (made[0].serials, made[0].is_new) == ((2, 2, 2), False)


def test_the_decider_is_silent_behind_its_ready(ranks: Ranks) -> None:
    """Another decides, without it. When it wakes up it is behind, and comes to the next round."""
    ranks.all[0].send_ready(ready(0, time.monotonic()))
    made = ranks.run({rank: comes(rank) for rank in (1, 2)})
    assert made[1] == made[2]
    assert (made[1].members, made[1].left) == ((1, 2), (0,))
    late = ranks.all[0]
    assert until(lambda: late.catch_up() or late.behind)  # else the others may be gone again
    later = ranks.run({0: lambda one: one.wait().go, 1: comes(1), 2: comes(2)})
    assert later[0] == later[1] == later[2]
    assert (later[0].members, later[0].is_new) == ((0, 1, 2), True)


def forms(rank: int, **fields: Any) -> Callable[[Agreement], Go]:
    """Comes to a round by a new communicator, and again where the members do not meet."""

    def body(one: Agreement) -> Go:
        began = time.monotonic()
        while True:
            one.send_ready(ready(rank, began, **fields))
            formation = one.wait()
            try:
                formation.allgather(b"{}", time.monotonic() + PATIENCE)
            except BootstrapError as error:
                one.failed(formation, (), str(error))
                fields["healthy"] = False
            else:
                one.entered(formation.go)
                return formation.go

    return body


def test_a_go_that_reaches_only_some(ranks: Ranks) -> None:
    """Rank 0 dies between two GOs: rank 2, which has its, comes back from a round that fails."""
    control: Any = ranks.all[0]._control
    say = control.send
    control.send_all = lambda kind, payload: [
        say(rank, kind, payload) for rank in (1, 2) if kind != messages.Kind.GO or rank == 2
    ]

    def dies(one: Agreement) -> Go:
        first = comes(0)(one)
        one.close()
        return first

    def repeats(one: Agreement) -> Go:
        assert comes(2)(one).members == (0, 1, 2)
        return forms(2, healthy=False, blames=(0,))(one)

    made = ranks.run({0: dies, 1: forms(1), 2: repeats})
    assert made[1] == made[2]
    assert (made[1].members, made[1].left) == ((1, 2), (0,))


def test_a_late_decider_knows_since_when_others_wait(nothing_left: None) -> None:
    """Rank 0 comes when two thirds of the grace time are over, rank 3 not at all: the wait does not
    start anew, or rank 1 would take over and leave rank 0 out."""

    def comes_late(one: Agreement) -> Go:
        time.sleep(2.0)
        return comes(0)(one)

    ranks = Ranks(4)
    made = ranks.run({0: comes_late, 1: comes(1), 2: comes(2)})
    ranks.close()
    assert made[0] == made[1] == made[2]
    assert (made[0].members, made[0].left) == ((0, 1, 2), (3,))


def test_too_few_over_connections(nothing_left: None) -> None:
    ranks = Ranks(3, grace_s=0.5)
    ranks.all[0].close()
    ranks.all[1].close()
    [outcome] = ranks.run({2: comes(2)}).values()
    ranks.close()
    assert isinstance(outcome, PeerLostError)
    assert "1 of at least 2 ranks are here (rank 2)" in str(outcome)


def test_two_ranks_that_look_for_each_other_stay_connected(nothing_left: None) -> None:
    """Both dial at once: neither closes what the other keeps."""
    job, give_up = job_hash("test"), time.monotonic() + PATIENCE
    for _ in range(6):
        both = [agreement(Limits(rank, 2, 2, 3.0, 6.0), job) for rank in range(2)]
        books = [messages.read_book("", one.own_places, 2) for one in both]

        def linked(both: list[Agreement] = both) -> bool:
            return all(one._control.is_linked(1 - rank) for rank, one in enumerate(both))

        def looks(rank: int, both: list[Agreement] = both, books: Any = books) -> None:
            both[rank].look_for(books[1 - rank])
            while not linked() and time.monotonic() < give_up:
                both[rank]._control.loop.run(linked, time.monotonic() + 0.05)
            both[rank]._control.loop.run(lambda: False, time.monotonic() + 0.1)

        threads = [threading.Thread(target=looks, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stayed = linked()
        for one in both:
            one.close()
        assert stayed


def test_a_dial_learns_that_its_connection_is_forgotten(nothing_left: None) -> None:
    """The kernel of the other end let it in, and gave it up while the network was dark."""
    one = agreement(Limits(1, 2, 2, 3.0, 6.0), job_hash("test"))
    taken: list[socket.socket] = []

    def let_in() -> bool:
        one.catch_up()
        with contextlib.suppress(BlockingIOError):
            taken.append(listener.accept()[0])
        return bool(taken)

    with contextlib.closing(one), listen("127.0.0.1") as listener:
        one.look_for({0: [listener.getsockname()[:2]]})
        assert until(let_in)
        with taken.pop() as first:
            assert until(lambda: one.catch_up() or one._control.silent)
            assert first.recv(1)
            try:
                first.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)  # its close says nothing
            except PermissionError:
                pytest.skip("the kernel does not let us forget a connection")
        assert until(let_in), "it waits for ever for an answer"
        taken.pop().close()


def test_nobody_takes_the_place_of_who_lives(ranks: Ranks) -> None:
    """A second process of rank 1 is refused as long as the first one's connection stands."""
    job = job_hash("test")
    second = agreement(Limits(1, 3, 2, 1.0, 2.0), job)
    places = messages.read_book("rank 0", ranks.all[0].own_places, 3)
    second.look_for(places)
    try:
        assert until(
            lambda: (
                ranks.all[0].catch_up(),
                second.catch_up(),
                "already rank 1" in second._control.troubles()[0],
            )[2]
        )
        ranks.all[1].close()
        assert until(
            lambda: (ranks.all[0].catch_up(), second.catch_up(), second._control.is_linked(0))[2]
        )
    finally:
        second.close()


def test_a_forked_child_listens_nowhere(nothing_left: None) -> None:
    """Not even where accepting rests, as descriptors had run out."""
    one = agreement(Limits(0, 3, 2, 1.0, 2.0), job_hash("test"))
    (listener,) = one._control._acceptor._listeners
    one._control._acceptor._pause(listener, PATIENCE)
    child = os.fork()
    if child == 0:
        os._exit(0 if listener.fileno() < 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    one.close()


def test_a_stranger_slows_one_round_at_most(ranks: Ranks) -> None:
    """One that says nothing slows none. One that has greeted is waited for once, and then again
    only after another rank was let in."""
    ranks.all[2].close()
    ranks.run({rank: comes(rank) for rank in (0, 1)})
    one = ranks.all[0]
    acceptor = one._control._acceptor
    with socket.create_connection(one._book[0][0]) as stranger:
        assert until(lambda: (one.catch_up(), acceptor.pending)[1])

        def lingers() -> bool:
            one._linger_until = 0.0
            one.send_ready(ready(0))
            return one._linger_until > 0.0

        assert not lingers()
        client = Client(acceptor._key, dataclasses.replace(acceptor._terms, client_rank=2))
        stranger.sendall(client.first())
        assert until(lambda: (one.catch_up(), acceptor.greeted)[1])
        assert [lingers(), lingers()] == [True, False]
        one._introduce(2)
        assert [lingers(), lingers()] == [True, False]


@pytest.mark.parametrize("secret", [None, Secret(bytes(range(40)))])
def test_strangers_are_kept_out(ranks: Ranks, secret: Secret | None) -> None:
    """A process of another job, and one with a secret that is not the job's."""
    job = job_hash("another" if secret is None else "test")
    stranger = agreement(Limits(1, 3, 2, 1.0, 2.0), job, secret)
    stranger.look_for(messages.read_book("rank 0", ranks.all[0].own_places, 3))
    try:
        silent = (NO_ANSWER, MUTE)
        assert until(
            lambda: (
                ranks.all[0].catch_up(),
                stranger.catch_up(),
                stranger._control.troubles()[0] not in silent,
            )[2]
        )
        assert not stranger._control.is_linked(0)
        made = ranks.run({rank: comes(rank) for rank in range(3)})
        assert made[0] == made[1] == made[2]
        assert not made[0].is_new
    finally:
        stranger.close()
