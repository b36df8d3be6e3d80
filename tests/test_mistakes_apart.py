"""What two ranks get wrong between them: none hangs, and what they are told names their own calls.

A row is a mistake: what either rank does, and what either is told, as the class of an error and a
pattern in its text; None: nothing. Both go on with a barrier, as a program would; a rank that has
an error closes its communicator, as one does whose process ends.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from ranks import run_ranks

from ringcomm import (
    AbortedError,
    CommTimeoutError,
    Communicator,
    Config,
    ConfigError,
    ErrorFeedback,
    FeedbackStore,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    TensorError,
)

pytestmark = pytest.mark.usefixtures("nothing_left")

SHORT, LONG = 0.25, 15.0  # seconds that collectives have: where nothing else tells, and elsewhere
Body = Callable[[Any], Any]  # of a Communicator, which mistakes need not use as it is typed
Told = tuple[type[Exception] | tuple[type[Exception], ...], str] | None


class Row(NamedTuple):
    """A mistake of two ranks."""

    name: str
    does: tuple[Body, Body]
    told: tuple[Told, Told]
    timeout: float = LONG


def x(count: int = 4, dtype: Any = np.float32) -> Any:
    return np.ones(count, dtype)


def allreduce(comm: Communicator) -> Any:
    return comm.allreduce(x())


def nothing(_: Communicator) -> None: ...


IN_ORDER = "all ranks must make the same calls in the same order"
GONE = (PeerLostError, r"rank \d has shut down without taking part in it")
IN_FLIGHT = r"rank \d closed its communicator with collectives in flight"
ENDED = ((PeerLostError, AbortedError), f"{GONE[1]}|{IN_FLIGHT}")  # as it comes


def differ(name: str, zero: Body, one: Body, *calls: str) -> Row:
    """Both are told what either has called."""
    first, second = (rf"rank {rank} called {call}" for rank, call in enumerate(calls))
    told = MismatchError, rf"({first}.*{second}|{second}.*{first}).*{IN_ORDER}"
    return Row(name, (zero, one), (told, told))


def alone(name: str, zero: Body, kind: type[Exception], text: str, one: Body = allreduce) -> Row:
    """Rank 0 is refused before anything is sent; rank 1 learns that it has gone."""
    return Row(name, (zero, one), ((kind, text), GONE))


def both(name: str, body: Body, kind: type[Exception], text: str) -> Row:
    """Both are refused."""
    return Row(name, (body, body), ((kind, text), (kind, text)))


def late(name: str, zero: Body, one: Body, first: str, second: str) -> Row:
    """Nothing but the timeout tells."""
    told = (CommTimeoutError, first), (CommTimeoutError, second)
    return Row(name, (zero, one), told, SHORT)


def in_turn(*bodies: Body) -> Body:
    return lambda c: [body(c) for body in bodies]


def at_once(*counts: int) -> Body:
    return lambda c: [
        work.wait() for work in [c.allreduce(x(count), async_op=True) for count in counts]
    ]


def many(*tensors: Any, **settings: Any) -> Body:
    return lambda c: c.allreduce_many([np.array(one) for one in tensors], **settings)


def calls_back(comm: Communicator, body: Body) -> None:
    """``body`` in a callback, whose exception it raises."""
    raised: list[BaseException | None] = []

    def callback(_: Any) -> None:
        try:
            body(comm)
        except BaseException as error:
            raised.append(error)
        else:
            raised.append(None)

    comm.allreduce(x(), async_op=True, on_done=callback).wait()
    while not raised:
        time.sleep(0.001)
    if raised[0] is not None:
        raise raised[0]


# ---- collectives ----

COLLECTIVES = [
    differ(
        "sizes",
        lambda c: c.allreduce(x(4)),
        lambda c: c.allreduce(x(5)),
        r"allreduce\(f32\[4\], op=sum\)",
        r"allreduce\(f32\[5\], op=sum\)",
    ),
    differ(
        "large sizes",
        lambda c: c.allreduce(x(400_000)),
        lambda c: c.allreduce(x(500_000)),
        r"allreduce\(f32\[400000\]",
        r"allreduce\(f32\[500000\]",
    ),
    differ(
        "an empty tensor",
        lambda c: c.allreduce(x(0)),
        allreduce,
        r"allreduce\(f32\[0\]",
        r"allreduce\(f32\[4\]",
    ),
    differ(
        "dtypes",
        allreduce,
        lambda c: c.allreduce(x(4, np.float64)),
        r"allreduce\(f32\[4\]",
        r"allreduce\(f64\[4\]",
    ),
    differ("ops", allreduce, lambda c: c.allreduce(x(), "max"), ".*op=sum", ".*op=max"),
    differ(
        "codecs",
        allreduce,
        lambda c: c.allreduce(x(), compression="bf16"),
        r"allreduce\(f32\[4\], op=sum\)",
        ".*compression=bf16",
    ),
    differ(
        "roots of a broadcast",
        lambda c: c.broadcast(x(), 0),
        lambda c: c.broadcast(x(), 1),
        r"broadcast\(f32\[4\], root=0\)",
        r"broadcast\(f32\[4\], root=1\)",
    ),
    differ(
        "each waits for the other's broadcast",
        lambda c: c.broadcast(x(), 1),
        lambda c: c.broadcast(x(), 0),
        r"broadcast\(f32\[4\], root=1\)",
        r"broadcast\(f32\[4\], root=0\)",
    ),
    differ(
        "roots of a gather",
        lambda c: c.gather(x(), 1),
        lambda c: c.gather(x(), 0),
        "gather.*root=1",
        "gather.*root=0",
    ),
    differ("collectives", allreduce, lambda c: c.broadcast(x()), "allreduce", "broadcast"),
    differ("a barrier", allreduce, lambda c: c.barrier(), "allreduce", r"barrier\(\)"),
    differ(
        "a barrier and an empty tensor",
        lambda c: c.barrier(),
        lambda c: c.allreduce(x(0)),
        r"barrier\(\)",
        r"allreduce\(f32\[0\]",
    ),
    differ(
        "little and much",
        lambda c: c.allreduce(x(1)),
        lambda c: c.allreduce(x(1 << 21)),
        r"allreduce\(f32\[1\]",
        r"allreduce\(f32\[2097152\]",
    ),
    differ(
        "a reduce to all and to each its part",
        lambda c: c.allreduce(x(6)),
        lambda c: c.reduce_scatter(x(6)),
        "allreduce",
        "reduce_scatter",
    ),
    differ(
        "a second call",
        in_turn(allreduce, lambda c: c.allreduce(x(8))),
        in_turn(allreduce, lambda c: c.allreduce(x(9))),
        r"allreduce\(f32\[8\]",
        r"allreduce\(f32\[9\]",
    ),
    differ(
        "a broadcast that was sent long ago",
        lambda c: c.broadcast(x(8)),
        in_turn(lambda _: time.sleep(0.1), lambda c: c.broadcast(x(9))),
        r"broadcast\(f32\[8\]",
        r"broadcast\(f32\[9\]",
    ),
    differ(
        "the order",
        in_turn(lambda c: c.broadcast(x()), allreduce),
        in_turn(allreduce, lambda c: c.broadcast(x())),
        "broadcast",
        "allreduce",
    ),
    differ(
        "the order of asynchronous ones",
        at_once(4, 5),
        at_once(5, 4),
        r"allreduce\(f32\[4\]",
        r"allreduce\(f32\[5\]",
    ),
    differ("one call more", in_turn(allreduce, allreduce), allreduce, "allreduce", "barrier"),
    differ(
        "a loop that is longer on a rank",
        at_once(*[4] * 20),
        at_once(*[4] * 19),
        "allreduce",
        "barrier",
    ),
    differ("rank 0 that calls alone", allreduce, nothing, "allreduce", "barrier"),
    differ(
        "a Work that nobody waits for",
        lambda c: c.allreduce(x(), async_op=True),
        nothing,
        "allreduce",
        "barrier",
    ),
    differ(
        "sizes of a scatter",
        lambda c: c.scatter(np.ones((2, 4), np.float32)),
        lambda c: c.scatter(None, out=x(5)),
        r"scatter\(f32\[4\]",
        r"scatter\(f32\[5\]",
    ),
    differ(
        "a callback that calls a collective",
        lambda c: calls_back(c, allreduce),
        allreduce,
        "allreduce",
        "barrier",
    ),
    # allreduce_many
    differ(
        "sizes of several",
        many(x(4), x(8)),
        many(x(4), x(9)),
        r"allreduce\(f32\[12\].* in allreduce_many\(\)",
        r"allreduce\(f32\[13\].* in allreduce_many\(\)",
    ),
    differ("several and none", many(x(4), x(8)), many(), r".* in allreduce_many\(\)", "barrier"),
    differ(
        "codecs of several",
        many(x(4), x(8), compression="fp16"),
        many(x(4), x(8)),
        ".*compression=fp16",
        r".*op=sum\) in allreduce_many\(\)",
    ),
]


# ---- arguments that one rank has wrong ----

ARGUMENTS = [
    alone(
        "an out= of another size",
        lambda c: c.allreduce(x(), out=x(5)),
        TensorError,
        "give one of its size and dtype, or none",
    ),
    alone(
        "a root outside of the world",
        lambda c: c.broadcast(x(), 2),
        ConfigError,
        "give root= a rank from 0 to 1",
        lambda c: c.broadcast(x(), 1),
    ),
    both("rows that cannot be shared out", lambda c: c.alltoall(x(3)), TensorError, "divide by 2"),
]

# ---- messages ----

MESSAGES = [
    Row(
        "a message of another size",
        (lambda c: c.send(x(4), 1), lambda c: c.recv(x(5), 0)),
        (
            (MismatchError, r"send/recv\(f32\[4\]\)"),
            (MismatchError, r"send/recv\(f32\[5\]\), rank 0 called send/recv\(f32\[4\]\)"),
        ),
    ),
    *(
        Row(
            name,
            (
                in_turn(
                    lambda _, late=late_send: time.sleep(late), lambda c, n=sent: c.send(x(n), 1)
                ),
                lambda c, n=received: c.recv(x(n), 0),
            ),
            (
                (MismatchError, rf"send/recv\(f32\[{sent}\]\)"),
                (
                    MismatchError,
                    rf"\(f32\[{received}\]\), rank 0 called send/recv\(f32\[{sent}\]\)",
                ),
            ),
        )
        for name, sent, received, late_send in (
            ("a message to who waits for another size", 9, 8, 0.1),
            ("a large message", 1 << 21, 1 << 20, 0),
            ("a message of nothing", 0, 8, 0),
            ("a message where nothing is expected", 8, 0, 0),
        )
    ),
    late(
        "two receives",
        lambda c: c.recv(x(), 1),
        lambda c: c.recv(x(), 0),
        f"no send by rank . within {SHORT:g} s",
        "no send by rank . within",
    ),
    late(
        "tags",
        lambda c: c.send(x(), 1, tag=1),
        lambda c: c.recv(x(), 0, tag=2),
        "rank 1 has not called it|no send by rank 0",
        "no send by rank 0|has not called it",
    ),
    late(
        "a receive and a collective",
        lambda c: c.recv(x(), 1),
        allreduce,
        "no send by rank 1",
        "rank 0 has not called it|no send by rank 1",
    ),
    late(
        "a receive that nobody sends to",
        lambda c: c.recv(x(), None),
        nothing,
        "no send by any rank",
        "rank 0 has not called it|no send by any rank",
    ),
]

# ---- its life ----


def raises(_: Communicator) -> None:
    raise ZeroDivisionError("of the program's own")


LIVES = [
    Row("an exception in between", (raises, allreduce), ((ZeroDivisionError, "own"), GONE)),
    *(
        Row(f"{name} that has left", (body, raises), (GONE, (ZeroDivisionError, "own")))
        for name, body in (
            ("a large all-reduce with one", lambda c: c.allreduce(x(1 << 21))),
            ("a broadcast from one", lambda c: c.broadcast(x(), 1)),
            ("a barrier with one", nothing),
            ("a receive from one", lambda c: c.recv(x(), 1)),
            ("a large message to one", lambda c: c.send(x(1 << 22), 1)),
        )
    ),
    Row(
        "an exception beside a collective in flight",
        (in_turn(lambda c: c.allreduce(x(), async_op=True), raises), in_turn(allreduce, allreduce)),
        ((ZeroDivisionError, "own"), ENDED),
    ),
    Row(
        "a closed communicator",
        (in_turn(lambda c: c.close(), allreduce), allreduce),
        ((NotInitializedError, "the communicator is closed"), GONE),
    ),
    Row(
        "aborted",
        (in_turn(lambda c: c.abort("enough"), allreduce), allreduce),
        ((AbortedError, "enough"), (AbortedError, "rank 0 aborted: enough")),
    ),
    Row(
        "a rank that comes too late",
        (lambda c: c.allreduce(x(), timeout=0.2), in_turn(lambda _: time.sleep(0.5), allreduce)),
        (
            (CommTimeoutError, "rank 1 has not called it"),
            (CommTimeoutError, "rank 0 gave up waiting for this rank"),
        ),
    ),
    Row(
        "a split that a rank leaves out",
        (lambda c: c.split(0), raises),
        (
            (PeerLostError, r"split\(\) of Communicator: .*rank 1 has shut down"),
            (ZeroDivisionError, "own"),
        ),
    ),
]

# ---- feedback ----


def used(comm: Communicator, *counts: int) -> ErrorFeedback:
    """An ErrorFeedback that tensors of these sizes were rounded with."""
    feedback = ErrorFeedback()
    for count in counts:
        comm.allreduce(x(count), compression="int4", feedback=feedback)
    return feedback


def stored(comm: Communicator, *names: str) -> FeedbackStore:
    store = FeedbackStore()
    for name in names:
        comm.allreduce(x(4000), compression="int4", feedback=store[name])
    return store


def shares_feedback(comm: Communicator) -> None:
    feedback = ErrorFeedback()
    for _ in range(2):
        comm.allreduce(x(), compression="int4", feedback=feedback, async_op=True)


def other_sizes(comm: Communicator) -> None:
    store = FeedbackStore()
    alone = comm.split(comm.rank)
    assert alone is not None
    with alone:
        alone.allreduce(x(1000 + comm.rank), compression="int4", feedback=store["w"])
    store.gather_state_dict(comm)


FEEDBACK = [
    both(
        "feedback of another tensor",
        lambda c: used(c, 4000, 5000),
        ConfigError,
        "feedback is of 4000 elements, .*each tensor needs its own",
    ),
    Row(
        "feedback of two in flight",
        (shares_feedback, in_turn(lambda _: time.sleep(0.1), allreduce)),
        ((ConfigError, "give each tensor its own"), (Exception, f"{ENDED[1]}|{IN_ORDER}")),
    ),
    both(
        "other names",
        lambda c: stored(c, "ab"[c.rank]).gather_state_dict(c),
        MismatchError,
        "the ranks have different residuals to save",
    ),
    both(
        "other sizes",
        other_sizes,
        MismatchError,
        "the ranks have different residuals to save",
    ),
]


def outcome(comm: Communicator, row: Row) -> BaseException | None:
    try:
        row.does[comm.rank % 2](comm)
        comm.barrier()
    except Exception as error:
        comm.close()
        return error
    return None


def outcomes(row: Row, n: int = 2, memory: int = 0) -> list[BaseException | None]:
    config = Config(timeout=row.timeout)
    return run_ranks(n, lambda comm: outcome(comm, row), config=config, memory=memory)


def require_told(row: Row, errors: list[BaseException | None]) -> None:
    for rank, (told, error) in enumerate(zip(row.told, errors, strict=True)):
        if told is None:
            assert error is None
        else:
            assert isinstance(error, told[0]), repr(error)
            assert re.search(told[1], str(error)), str(error)
            by_torch = told[0] is RuntimeError  # which has no rank
            if not by_torch and (told == GONE or IN_ORDER in told[1]):
                assert error.rank == 1 - rank, repr(error)


OVER_LINKS = [*COLLECTIVES, *ARGUMENTS, *MESSAGES, *LIVES, *FEEDBACK]
IN_MEMORY = [*COLLECTIVES, *LIVES]
THIRD = ("sizes", "roots of a broadcast", "a barrier", "the order", "a second call")
OF_THREE = [row for row in COLLECTIVES if row.name in THIRD]


@pytest.mark.parametrize("row", OVER_LINKS, ids=[row.name for row in OVER_LINKS])
def test_a_mistake_of_two_ranks(row: Row) -> None:
    require_told(row, outcomes(row))


@pytest.mark.parametrize("row", IN_MEMORY, ids=[row.name for row in IN_MEMORY])
def test_a_mistake_of_two_ranks_that_share_memory(row: Row) -> None:
    require_told(row, outcomes(row, memory=2))


@pytest.mark.parametrize("row", OF_THREE, ids=[row.name for row in OF_THREE])
def test_a_mistake_of_the_second_rank_of_three(row: Row) -> None:
    """All three are told of it."""
    for error in outcomes(row, 3):
        assert isinstance(error, MismatchError), repr(error)
        assert re.search("rank 1 called", str(error)), str(error)
        assert re.search("rank [02] called", str(error)), str(error)
