"""Works: several in flight, waited for in any order, timed out, dropped, far ahead of other ranks.

The last is about the credit that bounds what a rank keeps for collectives that it has not called
yet (csrc/net/link.h): the bound must hold nobody up who could go on.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from types import FrameType
from typing import Any

import numpy as np
import pytest
import reference
from patience import PATIENCE, PROMPT, until
from ranks import World, run_ranks
from tensors import elements, inputs, same

from ringcomm import CommTimeoutError, Communicator, Config, ConfigError, Work
from ringcomm.core import dispatch, native

pytestmark = pytest.mark.usefixtures("nothing_left")


# ---- waiting ----


@pytest.mark.parametrize("engines", ["shared", "own"])
def test_many_in_flight_waited_for_in_any_order(engines: str) -> None:
    def body(comm: Communicator) -> None:
        order = np.random.default_rng(comm.rank)
        for _ in range(5):
            counts = [1, 70_000, 0, 256, 12_345, 3, 40_000, 1]
            tensors = [elements("f32", count, comm.rank) for count in counts]
            works = [comm.allreduce(t, async_op=True) for t in tensors]
            assert [w.seq for w in works] == list(range(works[0].seq, works[0].seq + 8))
            for index in order.permutation(8):
                assert works[index].wait() is tensors[index]
                expected = reference.allreduce(inputs("f32", counts[index], 3), "f32", "sum")
                assert same(tensors[index], expected)

    run_ranks(3, body, config=Config(segment_bytes=4096, timeout=20.0), engines=engines)


def test_a_work_says_how_it_is() -> None:
    looked = threading.Event()

    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            assert looked.wait(PATIENCE)
        began = time.monotonic()
        work = comm.allreduce(np.ones(5, np.float32), async_op=True)
        assert isinstance(work, Work)
        assert work.name == "allreduce(f32[5])"
        if comm.rank == 0:
            assert not work.done()
            assert work.exception() is None
            assert work.elapsed == 0.0
            assert repr(work) == "<ringcomm.Work allreduce(f32[5]) #0 in flight>"
            looked.set()
        assert work.wait().tolist() == [2] * 5
        assert work.done()
        assert work.exception() is None
        assert 0.0 < work.elapsed <= time.monotonic() - began + 0.01
        assert repr(work) == "<ringcomm.Work allreduce(f32[5]) #0 done>"
        assert work.wait().tolist() == [2] * 5

    run_ranks(2, body)


def test_a_wait_may_time_out_and_go_on() -> None:
    waited = threading.Event()

    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            assert waited.wait(PATIENCE)
        tensor = np.ones(3)
        work, memory = comm.allreduce(tensor, async_op=True), weakref.ref(tensor)
        if comm.rank == 0:
            work.forget_result()
            del tensor
            for timeout in (0.0, 0.05, 0.15):
                began = time.monotonic()
                with pytest.raises(CommTimeoutError, match="still in flight") as caught:
                    work.wait(timeout)
                assert timeout <= time.monotonic() - began < timeout + PROMPT
                assert (caught.value.seq, caught.value.elapsed) == (0, timeout)
                assert memory() is not None
            assert not work.done()
            waited.set()
        result = work.wait(PATIENCE)
        assert comm.rank == 0 or result.tolist() == [2, 2, 2]

    run_ranks(2, body, engines="own")


def test_any_number_is_a_time_to_wait() -> None:
    def body(comm: Communicator) -> None:
        for seconds in (30, np.float32(30), np.int64(30)):
            assert comm.allreduce(np.ones(1), timeout=seconds)[0] == 2
            assert comm.allreduce(np.ones(1), async_op=True).wait(seconds)[0] == 2
        work = comm.allreduce(np.ones(1), async_op=True)
        for nonsense in (float("nan"), "1"):
            with pytest.raises(ConfigError, match="give seconds, or None"):
                work.wait(nonsense)
        assert work.wait(float("inf"))[0] == 2

    run_ranks(2, body)


def test_a_call_that_times_out_fails_the_communicator_and_names_the_absent() -> None:
    called = threading.Event()

    def body(comm: Communicator) -> None:
        if comm.rank == 2:
            return
        if comm.rank == 0:  # the less patient one comes last, so one rank is absent
            assert called.wait(PATIENCE)
        began = time.monotonic()
        work = comm.allreduce(np.ones(3), async_op=True, timeout=30 if comm.rank else 0.3)
        called.set()
        with pytest.raises(CommTimeoutError) as caught:
            work.wait()
        assert time.monotonic() - began < 0.3 + PROMPT
        assert comm.rank or time.monotonic() - began > 0.25
        assert isinstance(caught.value, TimeoutError)
        assert caught.value.seq == 0
        assert 0.25 < caught.value.elapsed < 0.3 + PROMPT
        assert caught.value.rank == 2
        assert "rank 2 has not called it" in str(caught.value)
        with pytest.raises(CommTimeoutError):
            comm.barrier()

    # each call is announced, as all deadlines come before the first heartbeats
    run_ranks(3, body, config=Config(timeout=30.0, heartbeat=20.0, peer_timeout=60.0))


def test_a_failed_work_keeps_its_error() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            work = comm.allreduce(np.ones(3), async_op=True, timeout=0.2)
            with pytest.raises(CommTimeoutError):
                work.wait()
            error = work.exception()
            assert isinstance(error, CommTimeoutError)
            assert "failed" in repr(work)
            with pytest.raises(CommTimeoutError) as again:
                work.wait()
            assert again.value is error

    with World(2) as ranks:
        ranks.run(body)


def test_callbacks_come_after_the_result() -> None:
    def body(comm: Communicator) -> None:
        seen: list[tuple[int, float]] = []
        over = threading.Event()

        def on_done(work: Work) -> None:
            assert work.done()
            seen.append((work.seq, float(work.wait()[0])))
            if len(seen) == 20:
                over.set()

        for number in range(20):
            comm.allreduce(np.full(100, float(number)), async_op=True, on_done=on_done)
        assert over.wait(PATIENCE)
        assert sorted(seen) == [(number, 2.0 * number) for number in range(20)]

    run_ranks(2, body)
    run_ranks(2, body, engines="own")


def test_a_callback_that_has_to_be_elsewhere_is_told_of_what_is_over() -> None:
    """Those before it have been told by then."""

    def body(comm: Communicator) -> None:
        first, second = threading.Event(), threading.Event()
        work = comm.allreduce(np.ones(3), async_op=True)
        for told in (first, second):
            work.call_back(lambda _, told=told: told.set(), elsewhere=True)  # type: ignore[misc]
            assert told.wait(PATIENCE)

    run_ranks(2, body)


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_callback_that_raises_keeps_no_other_from_being_called(
    kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def body(comm: Communicator) -> None:
        def bad(work: Work) -> None:
            raise kind("from a callback")

        over = threading.Event()
        comm.allreduce(np.ones(3), async_op=True, on_done=bad)
        comm.allreduce(np.ones(3), async_op=True, on_done=lambda work: over.set())
        assert over.wait(PATIENCE)

    run_ranks(2, body)
    # Another communicator of this process may keep the threads that call back; one of them may have
    # been relieved in a callback that raised, and log it after the last callback.
    assert until(lambda: len(caplog.records) == 2, PATIENCE)
    assert all(kind.__name__ in str(record.exc_info) for record in caplog.records)


def test_an_interrupted_call_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the core takes the call: it goes on with the tensor, which is held, and calls
    back."""

    class Interrupting:
        """The core, in which a signal arrives once."""

        def __getattr__(self, name: str) -> Any:
            return getattr(native.lib, name)

        def rc_submit(self, *arguments: Any) -> int:
            result = native.lib.rc_submit(*arguments)
            if threading.current_thread().name == "rank 0":
                monkeypatch.undo()
                raise KeyboardInterrupt
            return int(result)

    checked, over = threading.Event(), threading.Event()

    def body(comm: Communicator) -> None:
        tensor = np.ones(50_000)
        if comm.rank == 1:
            assert checked.wait(PATIENCE)
            assert comm.allreduce(tensor)[0] == 2
            return
        gone = weakref.ref(tensor)
        monkeypatch.setattr(dispatch, "lib", Interrupting())
        try:
            comm.allreduce(tensor, async_op=True, on_done=lambda work: over.set())
        except KeyboardInterrupt:
            del tensor
        gc.collect()
        assert gone() is not None
        checked.set()
        assert over.wait(PATIENCE)
        assert until(lambda: gone() is None)

    run_ranks(2, body)


def test_what_a_work_lets_go_of_may_ask_it_whether_it_is_over() -> None:
    """A finalizer, which runs in whichever thread drops the last reference."""
    asked: list[bool] = []

    def body(comm: Communicator) -> None:
        given = np.ones(5, np.float32)
        work = comm.allreduce(given, out=np.empty(5, np.float32), async_op=True)
        weakref.finalize(given, lambda: asked.append(work.done()))
        del given
        assert work.wait().tolist() == [2] * 5

    run_ranks(2, body)
    assert asked == [True, True]


# ---- one rank far ahead ----


@pytest.mark.parametrize(
    ("n", "count", "elems", "rest_waits", "engines"),
    [
        (2, 300, 1 << 14, True, "own"),
        (3, 300, 1 << 14, False, "shared"),
        (3, 50, 1 << 18, True, "own"),
        (2, 50, 1 << 18, False, "shared"),
    ],
)
def test_a_rank_far_ahead(n: int, count: int, elems: int, rest_waits: bool, engines: str) -> None:
    """Rank 0 submits everything while the others sleep: what they keep for later is bounded by the
    credit, and neither that bound nor their own pace may bring the ring to a halt."""

    def body(comm: Communicator) -> None:
        tensors = [np.full(elems, float(comm.rank + i), np.float32) for i in range(count)]
        if comm.rank > 0:
            time.sleep(0.3)
        if comm.rank > 0 and rest_waits:
            for tensor in tensors:
                comm.allreduce(tensor)
        else:
            for work in [comm.allreduce(tensor, async_op=True) for tensor in tensors]:
                work.wait()
        for i, tensor in enumerate(tensors):
            assert tensor[0] == tensor[-1] == n * i + n * (n - 1) / 2

    run_ranks(n, body, engines=engines)


# ---- many, and threads ----


def test_communicators_are_used_from_several_threads() -> None:
    """Each rank runs two communicators in two threads of its own, at once."""
    with World(3) as first, World(3, lanes=2) as second:

        def body(rank: int, world: World, out: list[Any]) -> None:
            comm = world.comms[rank]
            for i in range(200):
                x = comm.allreduce(np.full(500, float(i), np.float32))
                if x[0] != 3 * i:
                    out.append((rank, i, x[0]))
            out.append("over")

        found: list[Any] = []
        threads = [
            threading.Thread(target=body, args=(rank, world, found), daemon=True)
            for rank in range(3)
            for world in (first, second)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert found == ["over"] * 6


def test_a_call_while_another_thread_looks_for_what_is_over() -> None:
    """A call comes in before every instruction of the look, as another thread's can."""
    with World(2) as world:
        here, there = world.comms
        got, works = np.zeros(1, np.float32), []

        def call() -> None:
            works.append(here.recv(got, 1, async_op=True))

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            if frame.f_code.co_name != "_reap_finished_works":
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                call()
            return trace

        before = sys.gettrace()
        call()
        sys.settrace(trace)
        try:
            call()
        finally:
            sys.settrace(before)
        assert len(works) > 10
        for _ in works:
            there.send(np.ones(1, np.float32), 0)
        for work in works:
            work.wait()
