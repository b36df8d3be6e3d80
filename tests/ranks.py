"""Worlds to test in: ranks as threads of this process, or as processes of their own.

    run_ranks(4, lambda comm: comm.allreduce(x()))         a world for one function
    with World(4, lanes=2, rails=2) as world:              a world for many
        world.run(first); world.run(second)
    run_processes(2, "import ringcomm; ringcomm.init()")   real processes under torchrun's variables

A thread world joins its ranks by loopback sockets made here, which takes a millisecond, or by the
library's own bring-up (bring_up="tcp"). Its ranks share the process's engine, as communicators of
one process do, or have one each (engines="own"), as ranks in processes do.

Invariants: the first exception of any rank is raised again, and aborts the others so that none is
left waiting; every communicator is closed, whatever happened; nothing waits without a limit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from patience import PATIENCE
from ports import free_port

from ringcomm import Communicator, Config, NotInitializedError
from ringcomm.bootstrap.join import Joined
from ringcomm.bootstrap.mesh_result import LaneSocket, Mesh, RailInfo
from ringcomm.bootstrap.sockets import set_congestion, tune

ROOT = Path(__file__).resolve().parent.parent


class OwnEngine(str):
    """A kernel_set that equals no other, so that its communicator gets an engine to itself."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other


# ---- threads ----


def loopback_meshes(n: int, lanes: int, rails: int, congestion: Sequence[str]) -> list[Mesh]:
    """What a bring-up of n ranks on one host would give them."""
    ports = [RailInfo(rail, "lo", "127.0.0.1", 0) for rail in range(rails)] if n > 1 else []
    hosts = [socket.gethostname()] * n
    meshes = [Mesh(rank, n, hosts, [0] * n, ports, [], rank, n, n) for rank in range(n)]
    with socket.create_server(("127.0.0.1", 0), backlog=16) as listener:
        for low, high in itertools.combinations(range(n), 2):
            for rail, lane in itertools.product(range(rails), range(lanes)):
                dialed = socket.create_connection(listener.getsockname(), timeout=5)
                accepted, _ = listener.accept()
                for here, there, sock in ((low, high, accepted), (high, low, dialed)):
                    tune(sock)
                    set_congestion(sock, congestion)
                    meshes[here].lanes.append(LaneSocket(there, rail, lane, sock.detach(), 0.0))
    return meshes


def share_memory(meshes: Sequence[Mesh], ranks_per_host: int) -> None:
    """Gives all ranks memory of their host, on which so many in succession are; two or more."""
    if len(meshes) == 1 or ranks_per_host == 1:
        return
    for first in range(0, len(meshes), ranks_per_host):
        fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        for mesh in meshes[first : first + ranks_per_host]:
            mesh.shared.append(os.dup(fd))
        os.close(fd)
    for mesh in meshes:
        mesh.host_numbers[:] = [rank // ranks_per_host for rank in range(len(meshes))]


class World:
    """Ranks as threads of this process; a context manager, which closes it.

    Args:
        n: world size.
        lanes, rails: lanes per rail, and rails (all on the loopback).
        config: settings; ``lanes`` overrides its own.
        engines: "shared" or "own".
        bring_up: "sockets" made here, or the library's own ("tcp").
        memory: so many ranks in succession are a host and share memory; True: all of them; 0: they
            do not. (With "tcp", as the config has it.)

    Attributes:
        comms: the communicators by rank.
    """

    def __init__(
        self,
        n: int,
        *,
        lanes: int = 1,
        rails: int = 1,
        config: Config | None = None,
        engines: str = "shared",
        bring_up: str = "sockets",
        memory: int = 0,
    ) -> None:
        assert engines in ("shared", "own")
        assert bring_up in ("sockets", "tcp")
        base = dataclasses.replace(config or Config(timeout=30.0), lanes=lanes)
        configs = [base] * n
        if engines == "own":
            configs = [
                dataclasses.replace(base, kernel_set=OwnEngine(base.kernel_set)) for _ in range(n)
            ]
        self.comms: list[Communicator] = []
        if bring_up == "tcp":
            self._bring_up(configs, rails)
            return
        meshes = loopback_meshes(n, lanes, rails, base.congestion)
        if memory:
            share_memory(meshes, n if memory is True else memory)
        try:
            for mesh, settings in zip(meshes, configs, strict=True):
                self.comms.append(Communicator(Joined(mesh, settings, None, "test")))
        except BaseException:
            for mesh in meshes:
                mesh.close()
            self.close()
            raise

    def _bring_up(self, configs: Sequence[Config], rails: int) -> None:
        n, address = len(configs), f"tcp://127.0.0.1:{free_port()}"

        def create(rank: int) -> Communicator:
            settings = dataclasses.replace(configs[rank], interfaces=("lo",) * rails)
            return Communicator.create(rank, n, init_method=address, config=settings)

        outcomes = _in_threads(create, list(range(n)), 60.0, lambda: None)
        self.comms = [outcome for outcome in outcomes if isinstance(outcome, Communicator)]
        _raise_first(outcomes, self.close)

    def run(self, fn: Callable[[Communicator], Any], timeout: float = PATIENCE) -> list[Any]:
        """Calls fn(comm) on every rank at once; returns what the ranks returned."""
        outcomes = _in_threads(fn, self.comms, timeout, self._abort)
        _raise_first(outcomes, lambda: None)
        return outcomes

    def _abort(self) -> None:
        for comm in self.comms:
            with contextlib.suppress(NotInitializedError):  # closed by the test
                comm.abort("another rank's test failed")

    def close(self) -> None:
        """Closes all ranks at once, as they would be by a job that ends."""
        closed = _in_threads(Communicator.close, self.comms, PATIENCE, lambda: None)
        _raise_first(closed, lambda: None)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclasses.dataclass
class _Raised:
    error: BaseException
    when: float


class _HangError(AssertionError):
    """A rank that did not return in time."""


def _in_threads(
    fn: Callable[[Any], Any], arguments: Sequence[Any], timeout: float, abort: Callable[[], None]
) -> list[Any]:
    """fn of each argument in a thread of its own; a _Raised stands for an exception."""
    outcomes: list[Any] = [None] * len(arguments)

    def body(index: int) -> None:
        try:
            outcomes[index] = fn(arguments[index])
        except BaseException as error:
            outcomes[index] = _Raised(error, time.monotonic())
            abort()

    threads = [
        threading.Thread(target=body, args=(index,), name=f"rank {index}", daemon=True)
        for index in range(len(arguments))
    ]
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = [index for index, thread in enumerate(threads) if thread.is_alive()]
    if late:
        abort()
        for index in late:
            threads[index].join(2.0)
            hangs = _HangError(f"rank {index} had not returned after {timeout:g} s")
            outcomes[index] = _Raised(hangs, deadline)
    return outcomes


def _raise_first(outcomes: Sequence[Any], clean_up: Callable[[], None]) -> None:
    raised = [outcome for outcome in outcomes if isinstance(outcome, _Raised)]
    if raised:
        clean_up()
        raise min(raised, key=lambda one: one.when).error


def run_ranks(
    n: int, fn: Callable[[Communicator], Any], *, timeout: float = PATIENCE, **world: Any
) -> list[Any]:
    """Calls fn(comm) on the n ranks of a new World(n, **world); returns what they returned."""
    with World(n, **world) as ranks:
        return ranks.run(fn, timeout)


# ---- processes ----


@dataclasses.dataclass(frozen=True)
class Finished:
    """A rank's process that is over."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float


def start_process(code: str, env: Mapping[str, str], *args: str) -> subprocess.Popen[str]:
    """Python running code, with these variables on top of this process's."""
    return subprocess.Popen(
        [sys.executable, "-u", "-c", textwrap.dedent(code), *args],
        env={**os.environ, **env},
        cwd=ROOT / "tests",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_processes(
    n: int,
    target: str | Callable[[], None],
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = PATIENCE,
    check: bool = True,
) -> list[Finished]:
    """Runs n processes with the variables that torchrun would set.

    Args:
        target: Python code, or a function without arguments of an importable test module.
        env: more variables.
        check: assert that every rank exits with 0.

    Raises:
        AssertionError: a process failed, or had to be killed after ``timeout`` seconds.
    """
    if not isinstance(target, str):
        module = Path(inspect.getfile(target)).stem
        target = f"import {module}\n{module}.{target.__qualname__}()"
    job = {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    began = time.monotonic()
    processes = [
        start_process(target, {**job, "RANK": str(rank), **(env or {})}) for rank in range(n)
    ]
    finished = []
    try:
        for rank, process in enumerate(processes):
            left = max(0.1, began + timeout - time.monotonic())
            try:
                stdout, stderr = process.communicate(timeout=left)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"rank {rank} runs on after {timeout:g} s") from None
            seconds = time.monotonic() - began
            finished.append(Finished(process.returncode, stdout, stderr, seconds))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    if check:
        for rank, one in enumerate(finished):
            assert one.returncode == 0, f"rank {rank} exits with {one.returncode}:\n{one.stderr}"
    return finished
