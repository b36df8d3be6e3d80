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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import fork_server
from patience import PATIENCE, SILENCE
from ports import free_port

TESTS = Path(__file__).parents[1]
_PROGRAM = "import faults.rank; faults.rank.run()"

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


@dataclasses.dataclass(frozen=True)
class Nursery:
    """A fork server (fork_server.py), whose programs are ranks: its folder, and variables for all
    ranks of all jobs."""

    folder: Path
    environment: dict[str, str]


@contextlib.contextmanager
def nursery_of(*modules: str) -> Iterator[Nursery]:
    """Runs a Nursery with these modules imported. Its end is that of every rank that is left."""
    flags = ["-X", "faulthandler", "-W", "default::ResourceWarning"]
    environment = clean_environment()
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen(
            [sys.executable, *flags, fork_server.__file__, folder, *modules],
            env=environment,
            start_new_session=True,
        )
        try:
            yield Nursery(Path(folder), {**environment, "RINGCOMM_PEER_TIMEOUT": str(SILENCE)})
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(PATIENCE)


class _Process:
    """One rank.

    Attributes:
        pid: its process.
        said: its events, those taken by Job.expect excepted.
        exit: how it ended; by then all that it said is in ``said``. None while it lives.
        sources: the sockets from which more can come.
    """

    def __init__(
        self, nursery: Nursery, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.stdin, theirs = socket.socketpair()  # by which the rank tells its events, too
        self.output: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        with theirs:
            stdio = [theirs.fileno(), self.output.fileno(), self.output.fileno()]
            self._link, self.pid = fork_server.fork(nursery.folder, command, environment, stdio)
        self.said: list[dict[str, Any]] = []
        self.exit: Exit | None = None
        self.sources = [self.stdin, self._link]
        self._partial = b""

    def poll(self) -> None:
        """Takes what it has said, and how it has ended, without waiting."""
        while ready := select.select(self.sources, [], [], 0)[0]:
            if self.stdin in ready:
                self._read()
            if self._link in ready:
                self.exit = Exit(*fork_server.answer(self._link))
                self.sources.remove(self._link)

    def _read(self) -> None:
        data = b""
        with contextlib.suppress(ConnectionResetError):  # it ended without a go that it was given
            data = self.stdin.recv(1 << 16)
        if not data:
            self.sources.remove(self.stdin)
        *lines, self._partial = (self._partial + data).split(b"\n")
        self.said += [json.loads(line) for line in lines]

    def printed(self) -> str:
        """What it wrote to stdout and stderr."""
        self.output.seek(0)
        return self.output.read()

    def close(self) -> None:
        self.stdin.close()
        self._link.close()
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
        command = ["-c", _PROGRAM, module.__name__, function.__name__, json.dumps(arguments)]
        for rank in range(self.world_size) if ranks is None else ranks:
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(self.world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.port),
                **self._environment,
            }
            if rank in self._processes:  # started again, after it has ended
                self._ended.append(self._processes.pop(rank))
            self._processes[rank] = _Process(self._nursery, command, environment)

    # ---- what they say ----

    def expect(self, rank: int, event: str, within: float = PATIENCE) -> dict[str, Any]:
        """Waits for this event of a rank and returns it. Each event is returned once."""
        process = self._processes[rank]
        said = self._pump(lambda: _take(process.said, event) or process.exit, within)
        if not isinstance(said, dict):
            raise AssertionError(f"rank {rank} did not say {event!r} in {within} s\n{self.story()}")
        return said

    def has_said(self, rank: int, event: str) -> bool:
        """Whether expect() of it would return at once."""
        process = self._processes[rank]
        process.poll()
        return any(line["event"] == event for line in process.said)

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
            process.poll()
            lines.append(f"-- rank {rank}, pid {process.pid}, {process.exit}")
            lines += [json.dumps(event) for event in process.said]
            lines.append(process.printed())
        return "\n".join(lines)

    # ---- what is done to them ----

    def go(self, *ranks: int) -> float:
        """Lets these ranks (all, if none is named) past Rank.wait_for_go; returns when."""
        for rank in ranks or self._processes:
            self._processes[rank].stdin.send(b"g")
        return time.monotonic()

    def signal(self, rank: int, number: int) -> float:
        """Sends a signal and returns when."""
        process = self._processes[rank]
        process.poll()
        if process.exit is None:
            os.kill(process.pid, number)
        return time.monotonic()

    def pid(self, rank: int) -> int:
        """The rank's process."""
        return self._processes[rank].pid

    def wait_exit(self, rank: int, within: float = PATIENCE) -> Exit:
        """Waits until the rank's process is gone."""
        process = self._processes[rank]
        ended: Exit | None = self._pump(lambda: process.exit, within)
        if ended is None:
            native = _native_stacks(process.pid)
            self._dump_stacks(process)
            raise AssertionError(
                f"rank {rank} still lives after {within} s\n{self.story()}\n{native}"
            )
        return ended

    def _dump_stacks(self, process: _Process) -> None:
        """Ends a rank, which writes its threads' stacks to its output first (faulthandler)."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGABRT)
        self._pump(lambda: process.exit, PATIENCE)

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

    def __exit__(self, *_: object) -> None:
        for rank in self._processes:
            with contextlib.suppress(ProcessLookupError):
                self.signal(rank, signal.SIGKILL)
        for rank in self._processes:
            self.wait_exit(rank)
        for process in [*self._processes.values(), *self._ended]:
            process.close()

    def _pump(self, found: Callable[[], Any], within: float) -> Any:
        """Takes what the ranks say until found() is true, and returns that; None when the time is
        over."""
        processes, deadline = self._processes.values(), time.monotonic() + within
        while not (result := found()):
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            sources = [source for process in processes for source in process.sources]
            select.select(sources, [], [], min(left, 0.5))
            for process in processes:
                process.poll()
        return result


def _take(said: list[dict[str, Any]], event: str) -> dict[str, Any] | None:
    for index, line in enumerate(said):
        if line["event"] == event:
            return said.pop(index)
    return None


def _native_stacks(pid: int) -> str:
    """Of a process's threads, for what Python does not see; empty where there is no gdb."""
    if shutil.which("gdb") is None:
        return ""
    gdb = ["gdb", "-p", str(pid), "-batch", "-ex", "thread apply all bt 30"]
    with contextlib.suppress(subprocess.TimeoutExpired):
        return subprocess.run(gdb, capture_output=True, text=True, timeout=60).stdout
    return "gdb took more than 60 s"
