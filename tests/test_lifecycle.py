"""The ends of things: close, Ctrl-C, the interpreter's exit, forked children, and what is left."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import time
from pathlib import Path

import pytest
from faults import deadlines, endings, forks
from faults.job import Job, Nursery
from patience import PATIENCE, PROMPT
from ports import free_port

# ---- close ----


def test_close_with_works_in_flight(nursery: Nursery) -> None:
    with Job(nursery, 3) as job:
        job.start(deadlines.closed_in_flight)
        job.expect_all("ready")
        job.go(1)
        since = job.expect(1, "closing")["at"]
        for kind in (None, None):  # the second time is harmless
            event = job.expect(1, "closed")
            assert event["kind"] is kind, event
            assert event["took"] < PROMPT
        for event in job.expect_all("failed"):
            assert event["kind"] == "AbortedError", event
            assert event["rank"] == 1
            assert "closed its communicator with collectives in flight" in event["text"]
            assert event["at"] - since < PROMPT
        for event in job.expect_all("works"):
            assert event["errors"] == ["AbortedError"] * 3
        assert job.expect(1, "later")["kind"] == "NotInitializedError"
        for event in job.expect_all("later", [0, 2]):
            assert event["kind"] == "AbortedError"
        for event in job.expect_all("closed", [0, 2]):
            assert event["took"] < PROMPT
        job.finish()


def test_callbacks_are_called_on_close(nursery: Nursery) -> None:
    with Job(nursery, 2) as job:
        job.start(deadlines.called_back_on_close)
        event = job.expect(0, "closed")
        assert event["kind"] is None, event
        assert event["took"] < PROMPT
        assert job.expect(0, "called")["errors"] == ["AbortedError"] * 20
        job.go(1)
        job.finish()


def test_close_while_other_threads_call(nursery: Nursery) -> None:
    with Job(nursery, 2) as job:
        job.start(deadlines.closed_under_threads, rounds=10)
        job.expect_all("survived")
        job.finish()


# ---- Ctrl-C ----


@pytest.mark.parametrize(
    "call",
    ["allreduce", "barrier", "wait", "wait with a timeout", "while another thread drives"],
)
def test_ctrl_c(nursery: Nursery, call: str) -> None:
    with Job(nursery, 3) as job:
        job.start(deadlines.interrupted, call=call)
        job.expect(0, "waiting")
        time.sleep(0.25)
        since = job.signal(0, signal.SIGINT)
        event = job.expect(0, "failed")
        assert event["kind"] == "KeyboardInterrupt", event
        assert event["at"] - since < PROMPT, f"heard after {event['at'] - since:.2f} s"
        for event in job.expect_all("failed", [1, 2]):
            assert event["kind"] == "AbortedError", event
            assert event["rank"] == 0
            assert event["at"] - since < PROMPT
        ended = job.wait_exit(0)
        assert ended.code == -signal.SIGINT
        assert ended.at - since < PROMPT, f"gone after {ended.at - since:.2f} s"
        job.finish([1, 2])


@pytest.mark.parametrize("where", ["waiting", "making its Work"])
def test_ctrl_c_does_not_wait_for_a_peer_that_does_not_listen(nursery: Nursery, where: str) -> None:
    with Job(nursery, 2) as job:
        job.start(deadlines.interrupted_with_much_to_send, where=where)
        job.expect_all("waiting")
        since = job.signal(1, signal.SIGSTOP)
        job.go(0)
        if where == "waiting":
            time.sleep(0.25)
            since = job.signal(0, signal.SIGINT)
        ended = job.wait_exit(0)
        assert ended.code == -signal.SIGINT
        assert ended.at - since < PROMPT, f"gone after {ended.at - since:.2f} s"
        job.signal(1, signal.SIGCONT)
        job.go(1)
        assert job.expect(1, "failed")["kind"] in ("AbortedError", "PeerLostError")
        job.finish([1])


def test_ctrl_c_in_close_beside_a_stopped_peer(nursery: Nursery) -> None:
    with Job(nursery, 2) as job:
        job.start(endings.interrupted_in_close)
        job.expect_all("waiting")
        job.signal(1, signal.SIGSTOP)
        job.go(0)
        job.expect(0, "closing")
        time.sleep(0.25)
        since = job.signal(0, signal.SIGINT)
        event = job.expect(0, "failed")
        assert event["kind"] == "KeyboardInterrupt", event
        assert event["at"] - since < PROMPT, f"heard after {event['at'] - since:.2f} s"
        assert "closed" in job.expect(0, "state")["text"]
        job.finish([0])


def test_waiting_on_after_ctrl_c(nursery: Nursery) -> None:
    with Job(nursery, 2) as job:
        job.start(deadlines.survives_an_interrupt)
        job.expect(0, "waiting")
        time.sleep(0.1)
        job.signal(0, signal.SIGINT)
        assert job.expect(0, "failed")["kind"] == "KeyboardInterrupt"
        job.go(1)
        assert job.expect(0, "over")["kind"] is None
        assert job.expect(0, "right")["right"]
        job.finish()


# ---- fork ----


def test_a_forked_child_cannot_use_it(nursery: Nursery) -> None:
    with Job(nursery, 2) as job:
        job.start(forks.use_in_child)
        event = job.expect(0, "inherited")
        assert not event["initialized"]
        assert event["world_size"] == 2
        assert event["maps"] == 0  # nothing of the memory that the ranks share
        for name in (
            "allreduce",
            "async",
            "barrier",
            "recv",
            "split",
            "stats",
            "abort",
            "wait",
            "done",
            "exception",
        ):
            event = job.expect(0, name)
            assert event["kind"] == "NotInitializedError", event
            assert "forked child" in event["text"]
            assert "spawn" in event["text"]
            assert event["took"] < PROMPT
        for name in ("close", "shutdown"):
            assert job.expect(0, name)["kind"] is None
        assert job.expect(0, "child")["code"] == 0
        job.go(1)
        for event in job.expect_all("parent"):
            assert event["right"]
        job.finish()


def test_children_can_make_a_world_of_their_own(nursery: Nursery) -> None:
    with Job(nursery, 2) as job:
        job.start(forks.own_world_of_children, port=free_port())
        for event in [*job.expect_all("child"), *job.expect_all("parent")]:
            assert event["right"], event
            assert event.get("code", 0) == 0
        job.finish()


def test_children_come_and_go(nursery: Nursery) -> None:
    with Job(nursery, 2) as job:
        job.start(forks.many_children)
        for event in job.expect_all("parent"):
            assert event["right"]
        for rank in (0, 1):
            for _ in range(6):
                assert job.expect(rank, "allreduce")["kind"] == "NotInitializedError"
            for _ in range(3):
                assert job.expect(rank, "codes")["codes"] == [0, 0]
        job.finish()


@pytest.mark.parametrize("how", ["fork", "exec"])
def test_a_child_does_not_keep_its_killed_parent_alive(nursery: Nursery, how: str) -> None:
    with Job(nursery, 3) as job:
        job.start(forks.outlived_by_child, how=how)
        child = job.expect(1, "left behind")["child"]
        job.expect_all("ready")  # none is still in the barrier of its bring-up
        since = job.signal(1, signal.SIGKILL)
        try:
            for event in job.expect_all("failed", [0, 2]):
                assert event["kind"] == "PeerLostError", event
                assert event["rank"] == 1
                assert event["at"] - since < PROMPT, f"known after {event['at'] - since:.2f} s"
            os.kill(child, 0)  # it still lives
        finally:
            os.kill(child, signal.SIGKILL)
        job.finish([0, 2])


# ---- what is left ----


def check_nothing_left(nursery: Nursery, ending: str, rounds: int) -> None:
    with Job(nursery, 2) as job:
        job.start(endings.again_and_again, ending=ending, rounds=rounds)
        for rank in (0, 1):
            before = job.expect(rank, "before")
            after = job.expect(rank, "after")
            for kind in ("fds", "threads", "shm", "maps"):
                assert after[kind] == before[kind], f"{kind} of rank {rank}"
            if ending == "in order":  # large tensors of failed works make malloc's holdings jump
                assert after["grown"] < 2 << 20, f"{after['grown'] >> 10} KiB more memory"
        job.finish()


def test_a_hundred_lives_leave_nothing(nursery: Nursery) -> None:
    check_nothing_left(nursery, "in order", 100)


@pytest.mark.parametrize("ending", list(endings.ENDINGS)[1:])
def test_no_ending_leaves_anything(nursery: Nursery, ending: str) -> None:
    check_nothing_left(nursery, ending, 3 if ending == "without a world" else 8)


# ---- descriptors that the program closes ----


@pytest.mark.parametrize("reused", [False, True])
def test_descriptors_closed_by_the_program(nursery: Nursery, reused: bool) -> None:
    with Job(nursery, 2) as job:
        job.start(endings.descriptors_closed_under_it, reused=reused)
        event = job.expect(1, "failed")
        assert event["kind"] == "PeerLostError", event
        event = job.expect(0, "failed")
        assert "RingcommError" in event["kinds"], event
        assert "another part of this process closed descriptors of ringcomm" in event["text"], event
        assert event["rank"] == 0
        event = job.expect(0, "over")
        assert event["used"] < 0.5, event
        assert not any(event["sizes"]), event
        job.finish()


# ---- exit ----


@pytest.mark.parametrize("how", ["plainly", "with callbacks", "with a thread that waits"])
def test_exit_with_works_in_flight(nursery: Nursery, how: str) -> None:
    with Job(nursery, 2) as job:
        job.start(endings.exit_at_once, how=how)
        since = job.expect(0, "leaving")["at"]
        took = job.wait_exit(0).at - since
        assert took < PROMPT, f"gone after {took:.2f} s"
        job.go(1)
        job.finish()


def test_an_interrupted_exit_closes_every_communicator(nursery: Nursery) -> None:
    with Job(nursery, 2) as job:
        job.start(endings.interrupted_exit)
        for _ in range(2):
            event = job.expect(1, "failed")
            assert event["kind"] == "AbortedError", event
            assert "closed its communicator with collectives in flight" in event["text"]
        job.finish(quietly=False)


def test_exit_beside_a_stopped_peer(nursery: Nursery) -> None:
    """What was sent cannot be got rid of, so the whole patience is used, and no more."""
    with Job(nursery, 2) as job:
        job.start(endings.exit_at_once, how="to a peer that does not read")
        job.expect(0, "waiting")
        job.signal(1, signal.SIGSTOP)
        job.go(0)
        since = job.expect(0, "leaving")["at"]
        took = job.wait_exit(0).at - since
        assert took < PROMPT, f"gone after {took:.2f} s"
        job.finish([0])


# ---- strangers ----


def _listeners(pids: list[int]) -> set[int]:
    """Ports on which these processes listen on the loopback."""
    theirs = set()
    for fd in (fd for pid in pids for fd in Path(f"/proc/{pid}/fd").iterdir()):
        with contextlib.suppress(OSError):  # closed meanwhile
            theirs.add(os.readlink(fd))
    with open("/proc/net/tcp") as file:
        rows = [line.split() for line in file.readlines()[1:]]
    loopback = [
        row[1]
        for row in rows
        if row[3] == "0A" and row[1].startswith("0100007F") and f"socket:[{row[9]}]" in theirs
    ]
    return {int(address.split(":")[1], 16) for address in loopback}


def _knock(port: int, words: bytes) -> bool:
    """Says something to a port and leaves without an answer. False if nobody listens."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as sock:
            if not words:  # a reset instead of an orderly end
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.sendall(words)
    except OSError:
        return False
    return True


NOISE = [b"", b"x", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes(range(256)) * 64, b"\0" * 160]


def test_strangers_before_and_after(nursery: Nursery) -> None:
    """A job whose last rank is late is knocked at meanwhile, in a storm while the ranks join, and
    while its collectives run."""
    with Job(nursery, 3) as job:
        job.start(endings.sum_on_and_on, ranks=[0, 1])
        pids = [job.pid(0), job.pid(1)]
        deadline = time.monotonic() + PATIENCE
        while not (ports := _listeners(pids)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert ports, job.story()
        for port in ports:
            for words in NOISE * 5:
                assert _knock(port, words)
        silent = [socket.create_connection(("127.0.0.1", port)) for port in ports for _ in range(2)]
        job.start(endings.sum_on_and_on, ranks=[2])
        pids.append(job.pid(2))
        while not job.has_said(2, "ready") and time.monotonic() < deadline:
            ports |= (now := _listeners(pids))
            for port in now:
                _knock(port, NOISE[port % len(NOISE)])
        job.expect_all("ready")
        answered = [_knock(port, words) for port in ports for words in NOISE]
        assert not any(answered), "it listens on"
        job.go(0)
        for event in job.expect_all("over"):
            assert event["right"], event
            assert event["rounds"] > 0
        for sock in silent:
            sock.close()
        job.finish(quietly=False)
