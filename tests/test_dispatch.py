"""How calls get into the core (dispatch.py): those that are run now have no Work, and nobody can
tell."""

from __future__ import annotations

import contextlib
import importlib
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from patience import PATIENCE, until
from ranks import World, run_ranks

from ringcomm import (
    AbortedError,
    CommTimeoutError,
    Communicator,
    Config,
    ConfigError,
    NotInitializedError,
    TensorError,
)
from ringcomm.core import native
from ringcomm.core.dispatch import plain_memory
from ringcomm.core.faces import view
from ringcomm.core.native import lib
from ringcomm.core.pipe import DeviceWork
from ringcomm.core.views import DeviceView
from ringcomm.core.work import Work

pytestmark = pytest.mark.usefixtures("nothing_left")


def _read_only() -> Any:
    array = np.ones(4)
    array.flags.writeable = False
    return array


def tensors(*expressions: str) -> pytest.MarkDecorator:
    """A test for each of these tensors; those of torch are made where there is PyTorch."""
    marks = {True: [pytest.mark.torch], False: []}
    return pytest.mark.parametrize(
        "expression",
        [pytest.param(text, marks=marks[text.startswith("torch.")]) for text in expressions],
    )


def made(expression: str) -> Any:
    names = {"np": np, "_read_only": _read_only}
    if expression.startswith("torch."):
        names["torch"] = importlib.import_module("torch")
        view(names["torch"].ones(1), writable=True)  # from the first View on they may be plain
    return eval(expression, names)


@tensors(
    "np.ones((3, 2))",
    "np.ones(0)",
    "np.ones(())",
    "np.ones(5, np.float16)",
    "torch.ones(3, 2)",
    "torch.ones(0)",
    "torch.ones((), dtype=torch.bfloat16)",
)
def test_dense_tensors_are_plain(expression: str) -> None:
    tensor = made(expression)
    found = plain_memory(tensor)
    assert found is not None
    dtype, _, count, _ = found
    assert (dtype, count) == (
        tensor.dtype,
        tensor.size if hasattr(tensor, "flags") else tensor.numel(),
    )


@tensors(
    "np.ones(6)[::2]",
    "np.ones((3, 2)).T",
    "_read_only()",
    "np.frombuffer(bytearray(9), np.float32, 2, 1)",  # not aligned
    "np.float32(1)",
    "np.ma.ones(3)",
    "[1.0, 2.0]",
    "bytearray(4)",
    "None",
    "torch.ones(3, 2).T",
    "torch.ones(3).to_sparse()",
    'torch.ones(3, device="meta")',
    "torch.nn.Parameter(torch.ones(3))",
    "torch.ones(4, requires_grad=True)",
    "torch._neg_view(torch.ones(3))",
)
def test_all_else_takes_a_view(expression: str) -> None:
    assert plain_memory(made(expression)) is None


@pytest.mark.parametrize("kind", ["np", pytest.param("torch", marks=pytest.mark.torch)])
def test_it_reduces_where_the_tensor_lies(kind: str) -> None:
    def body(comm: Communicator) -> None:
        for _ in range(3):  # the second time the checks are remembered
            tensor = made(f"{kind}.ones((3, 5))") * (comm.rank + 1)
            assert comm.allreduce(tensor) is tensor
            assert tensor.tolist() == [[6] * 5] * 3
            assert comm.allreduce(tensor, "avg", compression="bf16") is tensor
            assert tensor.tolist() == [[6] * 5] * 3
        assert not comm._in_flight

    run_ranks(3, body)


@pytest.mark.parametrize("kind", ["np", pytest.param("torch", marks=pytest.mark.torch)])
def test_it_broadcasts_where_the_tensor_lies(kind: str) -> None:
    def body(comm: Communicator) -> None:
        for root in (0, 2, 1, 2):  # the last is remembered
            tensor = made(f"{kind}.ones((3, 5))") * (comm.rank + 1)
            assert comm.broadcast(tensor, root) is tensor
            assert tensor.tolist() == [[root + 1] * 5] * 3
            assert comm.barrier() is None
        assert not comm._in_flight

    run_ranks(3, body)


def test_roots_that_are_refused() -> None:
    def body(comm: Communicator) -> None:
        ones = np.ones(4)
        comm.broadcast(ones, 1)
        root: Any
        for root in (True, 1.0, -1, 2, "sum", None, [1]):
            with pytest.raises(ConfigError, match="is not in a world of 2"):
                comm.broadcast(ones, root)
        assert comm.broadcast(ones, np.int64(1)) is ones
        comm.barrier()
        comm.close()
        with pytest.raises(NotInitializedError, match="is closed"):
            comm.broadcast(ones, 1)
        with pytest.raises(NotInitializedError, match="is closed"):
            comm.barrier()

    run_ranks(2, body)


def test_tensors_of_two_dtypes_are_refused() -> None:
    def body(comm: Communicator) -> None:
        src, dst = view(np.ones(4, np.float32), writable=False), view(np.zeros(4), writable=True)
        with pytest.raises(TensorError, match="of f32 and f64"):
            comm.run_collective(lib.RC_ALLREDUCE, src, dst, 4)

    run_ranks(2, body)


def is_inside(comm: Communicator) -> bool:
    """Whether the core has a call of this communicator."""
    return any(slot[0] for slot in list(comm._calls_in_core))


def on_alarm(comm: Communicator, act: Callable[[], object]) -> Callable[..., None]:
    """A handler that does so while a call is in the core, and till then asks to be called again."""

    def handle(*_: object) -> None:
        if is_inside(comm):
            act()
        else:
            signal.setitimer(signal.ITIMER_REAL, 0.01)

    return handle


def test_it_waits_for_a_late_rank() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            time.sleep(0.35)
        tensor = np.ones(7)
        assert comm.allreduce(tensor) is tensor
        assert tensor.tolist() == [2] * 7
        assert not comm._in_flight

    run_ranks(2, body)


def test_what_is_submitted_holds_the_memory() -> None:
    """Whoever drops the tensor, and the Work's result with it."""
    dropped = threading.Event()

    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            assert dropped.wait(PATIENCE)
        tensor = np.ones(10_000)
        lives = weakref.ref(tensor)
        work = comm.submit_in_place(tensor, lib.RC_ALLREDUCE, "sum", None)
        assert work is not None
        work.forget_result()
        del tensor
        assert comm.rank == 1 or lives() is not None
        dropped.set()
        work.wait(PATIENCE)
        assert until(lambda: lives() is None)

    run_ranks(2, body, engines="own")


def test_a_failure_while_it_waits_is_told() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            assert until(lambda: is_inside(world.comms[0]))
            comm.abort("enough")
            return
        with pytest.raises(AbortedError, match=r"allreduce\(f64\[7\]\) #0 .*enough"):
            comm.allreduce(np.ones(7))
        assert not comm._in_flight

    with World(2) as world:
        world.run(body)


def test_an_interrupt_loses_nothing() -> None:
    class InterruptError(Exception):
        pass

    def interrupt() -> None:
        raise InterruptError

    with World(2) as world:
        first, second = world.comms
        before = signal.signal(signal.SIGALRM, on_alarm(first, interrupt))
        try:
            tensor = np.ones(7)
            signal.setitimer(signal.ITIMER_REAL, 0.03)
            with pytest.raises(InterruptError):
                first.allreduce(tensor)
            (work,) = first._in_flight.values()
            assert not work.done()
            assert second.allreduce(np.ones(7)).tolist() == [2] * 7
            assert work.wait() is tensor
            assert tensor.tolist() == [2] * 7
            assert not first._in_flight
        finally:
            signal.signal(signal.SIGALRM, before)


def test_a_signal_handler_may_close_meanwhile() -> None:
    with World(2) as world:
        first = world.comms[0]
        before = signal.signal(signal.SIGALRM, on_alarm(first, first.close))
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.03)
            with pytest.raises(AbortedError, match="closed its communicator"):
                first.allreduce(np.ones(7))
            with pytest.raises(NotInitializedError):
                first.allreduce(np.ones(7))
        finally:
            signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("has_callback", [False, True])
def test_a_signal_handler_may_close_while_a_result_is_written(has_callback: bool) -> None:
    """It sees the whole result; and it waits for the thread of a callback, which waits for it."""
    seen: list[Any] = []
    with World(2, engines="own") as world:
        first, second = world.comms
        tensor = np.ones((7, 2))[:, 0]
        work = first.allreduce(tensor, async_op=True)
        second.allreduce(np.ones(7))
        (held,) = work.held
        write = held.finish

        def interrupted() -> None:
            held.finish = write
            if has_callback:
                work.call_back(lambda _: seen.append("called"), elsewhere=True)
            signal.raise_signal(signal.SIGUSR1)
            write()

        def close(*_: object) -> None:
            first.close()
            seen.append(tensor.tolist())

        held.finish = interrupted
        before = signal.signal(signal.SIGUSR1, close)
        try:
            assert work.wait() is tensor
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert seen == ["called"] * has_callback + [[2.0] * 7]


def test_a_signal_handler_may_close_while_an_engine_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make = native.Engine

    def interrupted(kernel_set: str) -> native.Engine:
        signal.raise_signal(signal.SIGUSR1)
        return make(kernel_set)

    with World(1) as world:
        before = signal.signal(signal.SIGUSR1, lambda *_: world.comms[0].close())
        try:
            monkeypatch.setattr(native, "Engine", interrupted)
            with Communicator.create(0, 1, config=Config(kernel_set="scalar")) as other:
                assert other.kernel_set == "scalar"
        finally:
            signal.signal(signal.SIGUSR1, before)


def test_a_close_waits_for_who_is_inside() -> None:
    for _ in range(20):
        with World(1) as world:
            comm, rounds = world.comms[0], []

            def reduce(comm: Communicator = comm, rounds: list[int] = rounds) -> None:
                ones = np.ones(3)
                with contextlib.suppress(NotInitializedError, AbortedError):
                    while True:
                        comm.allreduce(ones)
                        rounds.append(1)

            threads = [threading.Thread(target=reduce) for _ in range(3)]
            for thread in threads:
                thread.start()
            while len(rounds) < 30:
                time.sleep(1e-4)
            comm.close()
            for thread in threads:
                thread.join()
            assert not comm._calls_in_core


def test_another_thread_may_close_meanwhile() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 1:  # never calls it
            return

        def close() -> None:
            until(lambda: is_inside(comm))
            comm.close()

        closer = threading.Thread(target=close)
        closer.start()
        with pytest.raises(AbortedError, match="closed its communicator"):
            comm.allreduce(np.ones(7))
        closer.join()

    run_ranks(2, body)


def test_a_call_that_waits_to_be_submitted_is_in_flight_to_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread would ask the core for what it does not have."""
    waits, may_go = threading.Event(), threading.Event()

    class Pipe:
        def drain(self) -> None:
            waits.set()
            may_go.wait(PATIENCE)

    with Communicator.create(rank=0, world_size=1) as comm:
        monkeypatch.setattr(comm, "_pipe", Pipe())
        caller = threading.Thread(target=lambda: comm.allreduce(np.ones(9), async_op=True).wait())
        caller.start()
        assert waits.wait(PATIENCE)
        noted = dict(comm._in_flight)
        may_go.set()
        caller.join()
        monkeypatch.undo()
        assert noted == {}


def test_a_work_that_the_core_lacks_is_in_nobodys_list() -> None:
    with Communicator.create(rank=0, world_size=1) as comm:
        comm._in_flight[0] = Work(comm, "allreduce", (), None)
        try:
            assert comm.works_in_flight() == []
            assert not comm.is_idle()
        finally:
            comm._in_flight.clear()


def test_a_work_that_the_core_lacks_can_be_asked() -> None:
    with Communicator.create(rank=0, world_size=1) as comm:
        where = DeviceView(None, None, 0, "f32", (0,), 0, lambda: 0, list)
        for work in (
            Work(comm, "allreduce", (), None),
            DeviceWork(comm, "allreduce", (), None, where, None, None),
        ):
            assert not work.done()
            assert work.exception() is None
            assert (work.seq, work.root, work.elapsed) == (0, -1, 0.0)
            with pytest.raises(CommTimeoutError, match=r"allreduce #0 is still in flight"):
                work.wait(0)
