"""Programs that let go of a collective's memory while the core has it. Run by test_lifetimes.py
under guarded_memory.c, where a touch of memory that was freed ends the process.

    python lifetimes.py FOLDER       every road, each let go of in every way; builds in FOLDER

A road (lifetime_roads.py) is a way to start an asynchronous collective. Two ranks are threads. Rank
0 starts it and lets go, in one of the ways of LETS_GO; rank 1 starts its part only then, and checks
the result. So the core of rank 0 has still to read or write what was let go of.

Invariant: a line is printed before each case, so that the last one names the case that crashed;
the next ones then run in another process.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lifetime_roads import ROADS, Side, Started, TreeStarted
from patience import PATIENCE, until
from ranks import World

from ringcomm import CommTimeoutError, Communicator, RingcommError, TensorError
from ringcomm.fusion import Works
from ringcomm.torch import Options
from ringcomm.torch.group import RingcommGroup

MOST_FAILED = 20


# ---- ways to let go ----


def _churn(count: int) -> None:
    """Memory of the same size, made and written: where nothing guards, it takes the old place."""
    gc.collect()
    for _ in range(4):
        torch.full((2 * count,), 7.0)
        np.full(2 * count, 7.0, np.float32)


def _drop(started: Started) -> None:
    """Works and tensors."""
    count = max((getattr(t, "numel", lambda: 0)() for t in started.given), default=0)
    _let_go(started)
    _churn(count)


def _let_go(started: Started) -> None:
    started.works.clear()
    started.given.clear()
    started.results.clear()


def _drop_tensors(started: Started) -> None:
    started.given.clear()
    started.results.clear()
    _churn(1000)


def _drop_works(started: Started) -> None:
    started.works.clear()
    started.expected = None
    _churn(1000)


def _other_data(started: Started) -> None:
    for tensor in started.given:
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
            tensor.data = torch.zeros(1, dtype=tensor.dtype)
        elif hasattr(tensor, "delete"):
            _donate(tensor)
    started.expected = None
    _churn(1000)


def _donate(array: Any) -> None:
    """Gives JAX an array's memory for a result."""
    import jax

    jax.jit(lambda x: x + 1, donate_argnums=0)(array).block_until_ready()


def _set(started: Started) -> None:
    for tensor in started.given:
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
            if not tensor.requires_grad:
                tensor.set_()
        elif hasattr(tensor, "delete"):
            tensor.delete()
    started.expected = None
    _churn(1000)


def _expired(started: Started) -> None:
    for work in started.works:
        if hasattr(work, "seq") or isinstance(work, (Works, TreeStarted)):
            with contextlib.suppress(CommTimeoutError):
                work.wait(0.0)
    _drop(started)


def _raised(started: Started) -> None:
    def lose(lost: Started) -> None:
        raise KeyError(lost.works)

    with contextlib.suppress(KeyError):
        lose(dataclasses.replace(started))
    sys.exc_info()
    _drop(started)


def _forked(started: Started) -> None:
    child = os.fork()
    if child == 0:
        _drop(started)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    _drop(started)


def _refusal(move: Callable[[], object]) -> str:
    try:
        move()
    except TensorError as error:
        return str(error)
    return ""


def _resized(started: Started) -> None:
    """Is refused by name, while and as long as the collective is in flight."""
    used, resized = 0, False
    for tensor in started.given:
        if type(tensor) is torch.Tensor:
            storage = tensor.untyped_storage()
            for move in (
                lambda s=storage: s.resize_(0),
                lambda t=tensor: t.resize_(1 << 20),
                lambda s=storage: s.share_memory_(),
            ):
                refused = _refusal(move)
                used += "in flight" in refused
                resized = resized or not refused
    if resized:  # a tensor from which or to which something is copied
        started.expected = None
        started.results.clear()
    assert used or not any(type(tensor) is torch.Tensor for tensor in started.given)
    _churn(1000)


LETS_GO = {
    "works and tensors dropped": _drop,
    "tensors dropped": _drop_tensors,
    "works dropped": _drop_works,
    "other data": _other_data,
    "set to nothing": _set,
    "after a timeout": _expired,
    "after an exception": _raised,
    "after a fork": _forked,
    "resized": _resized,
}
ENDS = {"aborted": lambda comm: comm.abort("enough"), "closed": Communicator.close}


# ---- cases ----


def _meet(start: Callable[[Side], Started], count: int, memory: int, let_go: Any) -> None:
    """Rank 0 lets go before rank 1 has called; then the communicator goes on."""
    gone = threading.Event()

    def rank(comm: Communicator) -> None:
        side = Side(comm, count)
        if comm.rank == 1:
            assert gone.wait(PATIENCE)
        try:
            started = start(side)
            if comm.rank == 0:
                let_go(started)
        finally:
            gone.set()
        started.finish()
        del started
        whole = np.ones(3, np.float32)
        assert (comm.allreduce(whole) == 2).all()
        assert until(lambda: all(work.done() for work in list(comm._in_flight.values())))

    with World(2, memory=memory) as world:
        world.run(rank)


def _end(start: Callable[[Side], Started], count: int, memory: int, end: Any) -> None:
    """Rank 0 ends its communicator with the collective in flight, and drops all that it had."""
    gone = threading.Event()

    def rank(comm: Communicator) -> None:
        side = Side(comm, count)
        if comm.rank == 1:
            assert gone.wait(PATIENCE)
            with contextlib.suppress(RingcommError, RuntimeError):
                start(side).finish()
            return
        try:
            started = start(side)
            end(comm)
            _drop(started)
        finally:
            gone.set()

    with World(2, memory=memory) as world:
        world.run(rank)


def _while_it_waits(count: int, memory: int) -> None:
    """A synchronous call, whose tensor another thread takes away from it."""
    waits = threading.Event()

    def rank(comm: Communicator) -> None:
        x = torch.full((count,), float(comm.rank + 1))
        if comm.rank == 1:
            assert waits.wait(PATIENCE)
            assert (comm.allreduce(x) == 3).all()
            return
        caller = threading.Thread(target=comm.allreduce, args=(x,))
        caller.start()
        assert until(lambda: comm._calls_in_core or comm._in_flight)
        assert "in flight" in _refusal(lambda: x.untyped_storage().resize_(0))
        x.data = torch.zeros(1)
        _churn(count)
        waits.set()
        caller.join()

    with World(2, memory=memory) as world:
        world.run(rank)


def _closed_while_the_log_fails(count: int) -> None:
    """Rank 0 is interrupted as it closes with the collective in flight, and dropped with all that
    it had."""
    with World(2) as world:
        comm, other = world.comms.pop(0), world.comms[0]
        x = torch.ones(count)
        work = comm.allreduce(x, async_op=True)
        storages = [x.untyped_storage()]
        refused: list[str] = []

        def fail(_: Any) -> None:
            refused.append(_refusal(lambda: storages[0].resize_(0)))
            raise OSError("the log cannot be written")

        comm._log_end = fail  # type: ignore[method-assign]
        with contextlib.suppress(OSError):
            comm.close()
        assert "in flight" in refused[0]
        del comm, x, work
        storages.clear()
        _churn(count)
        with contextlib.suppress(RingcommError):
            other.allreduce(torch.ones(count))


def _interrupted_program(count: int) -> None:
    """An all-reduce of a program of JAX that is interrupted, by which XLA's memory is free."""
    import jax
    import jax.numpy as jnp

    import ringcomm.jax

    gone = threading.Event()

    def rank(comm: Communicator) -> None:
        if comm.rank == 1:
            assert gone.wait(PATIENCE)
            comm.allreduce_many([np.full(count, 2.0, np.float32)])
            return
        threads: list[int] = []

        def noted(*args: Any, **named: Any) -> Any:
            threads.append(threading.get_ident())
            return Communicator.allreduce_many(comm, *args, **named)

        comm.allreduce_many = noted  # type: ignore[method-assign]
        program = jax.jit(lambda leaf: ringcomm.jax.allreduce(leaf, comm=comm))

        def call() -> None:
            with contextlib.suppress(KeyboardInterrupt, RuntimeError):  # which JAX makes of it
                program(jnp.ones(count, jnp.float32)).block_until_ready()

        caller = threading.Thread(target=call)
        caller.start()
        assert until(lambda: bool(comm._in_flight))
        interrupt = ctypes.pythonapi.PyThreadState_SetAsyncExc
        interrupt(ctypes.c_ulong(threads[0]), ctypes.py_object(KeyboardInterrupt))
        caller.join()
        assert comm._in_flight
        _churn(count)
        gone.set()
        assert until(lambda: all(work.done() for work in list(comm._in_flight.values())))

    with World(2) as world:
        world.run(rank)


def _let_go_at_last() -> None:
    """Memory that was dropped in flight does not stay: later calls let go of it."""

    def rank(comm: Communicator) -> None:
        group = RingcommGroup(None, comm, Options())
        for _ in range(20):
            group.allreduce([torch.ones(10_000)], dist.AllreduceOptions())
        for _ in range(50):
            comm.allreduce(np.ones(3), async_op=True).wait()
        assert not comm._in_flight

    with World(2) as world:
        world.run(rank)


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    for name, start in ROADS.items():
        for how, let_go in LETS_GO.items():
            yield f"{name}: {how}", lambda s=start, g=let_go: _meet(s, 10_000, 0, g)
        for how, end in ENDS.items():
            yield f"{name}: {how}", lambda s=start, e=end: _end(s, 10_000, 0, e)
    for name in ("allreduce, broadcast and reduce of torch", "group: all_reduce, sum"):
        for count, memory in ((10, 0), (10, 2), (10_000, 2), (300_000, 0), (300_000, 2)):
            yield (
                f"{name}, {count} elements{', through memory' if memory else ''}: dropped",
                lambda s=ROADS[name], c=count, m=memory: _meet(s, c, m, _drop),
            )
    for count, memory in ((10_000, 0), (300_000, 2)):
        yield (
            f"a call that waits, {count} elements",
            lambda c=count, m=memory: _while_it_waits(c, m),
        )
    yield "closed while the log fails", lambda: _closed_while_the_log_fails(10_000)
    if importlib.util.find_spec("jax") is not None:
        yield "a program of JAX that is interrupted", lambda: _interrupted_program(10_000)
    yield "what was dropped is let go of", _let_go_at_last


def run_from(first: int) -> None:
    """Runs the cases from this number on."""
    torch.set_num_threads(1)
    gc.freeze()  # collections go through what the cases make, not through all of torch
    for number, (name, run) in enumerate(cases()):
        if number >= first:
            print(f"{number} {name}", flush=True)
            run()


def build_guard(folder: Path) -> dict[str, str]:
    """The environment in which memory is guarded."""
    source, guard = Path(__file__).with_name("guarded_memory.c"), folder / "guarded_memory.so"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", source, "-o", guard], check=True)
    return {**os.environ, "LD_PRELOAD": str(guard)}


def supervise(folder: Path) -> int:
    """Runs all cases guarded, beginning again behind each that fails; returns how many do."""
    guarded = build_guard(folder)
    failed = first = 0
    while failed < MOST_FAILED:
        child = subprocess.run(
            [sys.executable, __file__, "from", str(first)],
            stdout=subprocess.PIPE,
            text=True,
            env=guarded,
            check=False,
        )
        lines = child.stdout.splitlines()
        if child.returncode == 0:
            print(f"{first + len(lines)} cases, {failed} failed")
            break
        failed += 1
        last = lines[-1] if lines else f"{first} (before it began)"
        print(f"exit status {child.returncode} in {last}", flush=True)
        first = int(last.split()[0]) + 1
    return failed


if __name__ == "__main__":
    if sys.argv[1] == "from":
        run_from(int(sys.argv[2]))
    else:
        sys.exit(supervise(Path(sys.argv[1])))
