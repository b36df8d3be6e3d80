"""A job as a test sees it: its ranks as processes, what they report, and the means to harm them.

Invariants: leaving the ``with`` block leaves no process behind; a rank that does not do what is
expected in time fails the test with everything that all ranks said.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from patience import PATIENCE, SILENCE
from ports import free_port

TESTS = Path(__file__).parents[1]

_LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "MASTER_",
    "TORCHELASTIC",
    "OMPI_",
    "PMI",
    "PMIX",
    "SLURM_",
    "RINGCOMM_",
    "MPI",
    "PRTE_",
    "PYTHONWARNINGS",
)


def clean_environment() -> dict[str, str]:
    """This process's environment without what launchers and users of ringcomm put there. One
    thread per process for arithmetic: ranks share few cores."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS)}
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return {**kept, **threads, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}


@dataclasses.dataclass(frozen=True)
class Exit:
    """How a rank's process ended: exit code (minus the signal's number), and when."""

    code: int
    at: float


class Nursery:
    """The fork server with these modules imported. Close it.

    Attributes:
        environment: variables for all ranks of all jobs.
    """

    def __init__(self, *modules: str) -> None:
        self.environment = {"RINGCOMM_PEER_TIMEOUT": str(SILENCE)}
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-X",
                    "faulthandler",
                    "-W",
                    "default::ResourceWarning",
                    str(TESTS / "faults" / "nursery.py"),
                    str(theirs.fileno()),
                    *modules,
                ],
                pass_fds=[theirs.fileno()],
                env=clean_environment(),
                start_new_session=True,
            )
        self._exits: dict[int, Exit] = {}

    def fork(self, order: dict[str, Any], fds: Iterable[int]) -> int:
        """Starts a rank and returns its pid."""
        socket.send_fds(self.control, [json.dumps(order).encode()], list(fds))
        while True:
            message = self._receive()
            if "code" not in message:
                pid = int(message["pid"])
                self._exits.pop(pid, None)  # of a rank that had this number before
                return pid

    def exit_of(self, pid: int) -> Exit | None:
        """None while it lives."""
        while select.select([self.control], [], [], 0)[0]:
            self._receive()
        return self._exits.get(pid)

    def close(self) -> None:
        """Ends it, and every rank that is left."""
        self.control.close()
        self._process.wait(PATIENCE)

    def _receive(self) -> dict[str, Any]:
        data = self.control.recv(4096)
        if not data:
            raise RuntimeError("the nursery is gone")
        message: dict[str, Any] = json.loads(data)
        if "code" in message:
            self._exits[message["pid"]] = Exit(message["code"], message["at"])
        return message


class _Process:
    """One rank: its pid, the ends of its pipes, and what it has said so far."""

    def __init__(self, nursery: Nursery, order: dict[str, Any]) -> None:
        commands, self.commands = os.pipe()
        self.events, events = os.pipe()
        self.output: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        try:
            self.pid = nursery.fork(order, [commands, events, self.output.fileno()])
        finally:
            os.close(commands)
            os.close(events)
        self.said: list[dict[str, Any]] = []
        self._partial = b""

    def read(self) -> bool:
        """Takes what the event pipe holds. False at its end."""
        data = os.read(self.events, 1 << 16)
        *lines, self._partial = (self._partial + data).split(b"\n")
        self.said += [json.loads(line) for line in lines]
        return bool(data)

    def printed(self) -> str:
        """What it wrote to stdout and stderr."""
        self.output.seek(0)
        return self.output.read()

    def close(self) -> None:
        os.close(self.commands)
        os.close(self.events)
        self.output.close()


class Job:
    """The ranks 0 to world_size - 1 of one job on this host.

    Args:
        nursery: what forks them.
        world_size: how many there are.
        environment: variables for all of them besides RANK, WORLD_SIZE and MASTER_*.
    """

    def __init__(
        self, nursery: Nursery, world_size: int, environment: dict[str, str] | None = None
    ) -> None:
        self._nursery = nursery
        self.world_size = world_size
        self.port = free_port()
        self._environment = {**nursery.environment, **(environment or {})}
        self._processes: dict[int, _Process] = {}
        self._silent: set[int] = set()
        self._ended: list[_Process] = []

    def start(
        self,
        function: Callable[..., None],
        *,
        ranks: Iterable[int] | None = None,
        **arguments: Any,
    ) -> None:
        """Starts ranks (all of them, if None) with function(Rank, **arguments), which lives in a
        module of its own, as it is looked up by name."""
        module = inspect.getmodule(function)
        assert module is not None
        for rank in range(self.world_size) if ranks is None else ranks:
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(self.world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.port),
                **self._environment,
            }
            order = {
                "module": module.__name__,
                "function": function.__name__,
                "arguments": arguments,
                "environment": environment,
            }
            if rank in self._processes:  # started again, after it has ended
                self._ended.append(self._processes.pop(rank))
                self._silent.discard(rank)
            self._processes[rank] = _Process(self._nursery, order)

    # ---- what they say ----

    def expect(self, rank: int, event: str, within: float = PATIENCE) -> dict[str, Any]:
        """Waits for this event of a rank and returns it. Each event is returned once."""
        process = self._processes[rank]

        def happened() -> Any:
            return _take(process.said, event) or self._nursery.exit_of(process.pid)

        found = self._pump(happened, within)
        if isinstance(found, Exit):
            self._drain(rank)
            found = _take(process.said, event)
        if found is None:
            raise AssertionError(f"rank {rank} did not say {event!r} in {within} s\n{self.story()}")
        said: dict[str, Any] = found
        return said

    def has_said(self, rank: int, event: str) -> bool:
        """Whether expect() of it would return at once."""
        self._drain(rank)
        return any(line["event"] == event for line in self._processes[rank].said)

    def expect_all(self, event: str, ranks: Iterable[int] | None = None) -> list[dict[str, Any]]:
        """expect() of all ranks in order, or of these."""
        chosen = sorted(self._processes) if ranks is None else ranks
        return [self.expect(rank, event) for rank in chosen]

    def printed(self, rank: int) -> str:
        """A rank's stdout and stderr."""
        return self._processes[rank].printed()

    def story(self) -> str:
        """Everything that every rank said, for the message of a failed test."""
        lines = []
        for rank, process in self._processes.items():
            lines.append(f"-- rank {rank}, pid {process.pid}, {self._nursery.exit_of(process.pid)}")
            lines += [json.dumps(event) for event in process.said]
            lines.append(process.printed())
        return "\n".join(lines)

    # ---- what is done to them ----

    def go(self, *ranks: int) -> float:
        """Lets these ranks (all, if none is named) past Rank.wait_for_go; returns when."""
        for rank in ranks or self._processes:
            os.write(self._processes[rank].commands, b"g")
        return time.monotonic()

    def signal(self, rank: int, number: int) -> float:
        """Sends a signal and returns when."""
        pid = self._processes[rank].pid
        if self._nursery.exit_of(pid) is None:
            os.kill(pid, number)
        return time.monotonic()

    def pid(self, rank: int) -> int:
        """The rank's process."""
        return self._processes[rank].pid

    def wait_exit(self, rank: int, within: float = PATIENCE) -> Exit:
        """Waits until the rank's process is gone."""
        pid = self._processes[rank].pid
        ended = self._pump(lambda: self._nursery.exit_of(pid), within)
        if ended is None:
            native = _native_stacks(pid)
            self._dump_stacks(pid)
            raise AssertionError(
                f"rank {rank} still lives after {within} s\n{self.story()}\n{native}"
            )
        self._drain(rank)
        return ended

    def _dump_stacks(self, pid: int) -> None:
        """Ends a rank, which writes its threads' stacks to its output first (faulthandler)."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGABRT)
        self._pump(lambda: self._nursery.exit_of(pid), PATIENCE)

    def finish(self, ranks: Iterable[int] | None = None, *, quietly: bool = True) -> None:
        """All ranks, or these, must exit with code 0 and, unless they may have something to say
        there, without a word on stdout or stderr."""
        for rank in self._processes if ranks is None else ranks:
            ended = self.wait_exit(rank)
            printed = self.printed(rank)
            assert ended.code == 0, f"rank {rank} exited with {ended.code}\n{self.story()}"
            assert not (printed and quietly), f"rank {rank} printed:\n{printed}"

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes.values():
            if self._nursery.exit_of(process.pid) is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        for rank in self._processes:
            self.wait_exit(rank)
        for process in [*self._processes.values(), *self._ended]:
            process.close()

    # ---- pipes ----

    def _pump(self, found: Callable[[], Any], within: float) -> Any:
        """Reads pipes until found() is true, and returns that; None when the time is over or the
        ranks have nothing more to say."""
        deadline = time.monotonic() + within
        while not (result := found()):
            pipes = {p.events: r for r, p in self._processes.items() if r not in self._silent}
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            ready = select.select([*pipes, self._nursery.control], [], [], min(left, 0.5))[0]
            for fd in ready:
                if fd in pipes and not self._processes[pipes[fd]].read():
                    self._silent.add(pipes[fd])
        return result

    def _drain(self, rank: int) -> None:
        """Reads what is in a rank's pipe."""
        process = self._processes[rank]
        while rank not in self._silent and select.select([process.events], [], [], 0)[0]:
            if not process.read():
                self._silent.add(rank)


def _take(said: list[dict[str, Any]], event: str) -> dict[str, Any] | None:
    for index, line in enumerate(said):
        if line["event"] == event:
            return said.pop(index)
    return None


@contextlib.contextmanager
def nursery_of(*modules: str) -> Iterator[Nursery]:
    """A Nursery for the length of a ``with`` block."""
    nursery = Nursery(*modules)
    try:
        yield nursery
    finally:
        nursery.close()


def _native_stacks(pid: int) -> str:
    """Of a process's threads, for what Python does not see; empty where there is no gdb."""
    if shutil.which("gdb") is None:
        return ""
    gdb = ["gdb", "-p", str(pid), "-batch", "-ex", "thread apply all bt 30"]
    with contextlib.suppress(subprocess.TimeoutExpired):
        return subprocess.run(gdb, capture_output=True, text=True, timeout=60).stdout
    return "gdb took more than 60 s"
