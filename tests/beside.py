"""Commands that run beside the tests, on the core that one test at a time leaves idle: C suites,
builds, programs whose speed is nobody's concern.

A test that is about such a command names it, and is given how it ended:

    @pytest.mark.beside("make", "-C", "tests/c", "run")
    def test_c(beside: Done) -> None:
        assert beside.code == 0, beside.output

conftest.py puts these tests last and starts what the chosen ones name when the first test begins.
Commands run one after the other in each lane, and lanes at once: the C suites, marked lane="c", are
one, for they build in one folder, and all others the other. A lane that is through takes what the
other has last. They run in the repository's root, in a process of their own (this file as a
script); a command that two tests name runs once. "{folder}" in a command is a folder of its own,
which the test finds as beside.folder; "{python}" a Python that has imported PyTorch already
(fork_server.py).

Invariants: whatever becomes of pytest, nothing that a command started outlives it; a command whose
test is not chosen is not run.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import fork_server

ROOT = Path(__file__).resolve().parent.parent
APART = (
    "test_convergence.py",
    "test_results_hybrid.py",
    "test_results_slow.py",
    "test_frameworks.py",
)
"""Files of tests that are bound by the processor: a run of the whole suite leaves them to
test_apart.py, which runs them beside the others."""
WARM = ("torch", "torch._dynamo", "torch.distributed.pipelining", "ringcomm.torch")
"""Modules that "{python}" has imported."""
_PR_SET_CHILD_SUBREAPER = 36


@dataclasses.dataclass(frozen=True)
class Done:
    """How a command ended: exit code (minus the signal's number), stdout and stderr in one, and
    the folder that was its own."""

    code: int
    output: str
    folder: Path


class Beside:
    """The commands of a session; a context manager, which ends them.

    Args:
        lanes: commands of each, in the order in which they shall run.
        folder: where a folder for each is made.
        environment: theirs.
    """

    def __init__(
        self,
        lanes: Iterable[Iterable[Sequence[str]]],
        folder: Path,
        environment: Mapping[str, str],
    ) -> None:
        self._folders: dict[tuple[str, ...], Path] = {}
        folder.mkdir(exist_ok=True)
        python = str(fork_server.write(folder))
        jobs: list[list[tuple[str, list[str]]]] = []
        for lane in lanes:
            jobs.append([])
            for command in dict.fromkeys(map(tuple, lane)):
                own = self._folders[command] = folder / str(len(self._folders))
                (own / "folder").mkdir(parents=True)
                words = [
                    word.replace("{folder}", f"{own}/folder").replace("{python}", python)
                    for word in command
                ]
                jobs[-1].append((str(own), words))
        if any(python in words for lane in jobs for _, words in lane):
            modules = WARM if importlib.util.find_spec("torch") else ()
            server = [sys.executable, fork_server.__file__, str(folder), *modules]
            jobs.append([(str(folder), server)])
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            cwd=ROOT,
            env=dict(environment),
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(jobs).encode() + b"\n")
        self._process.stdin.flush()

    def result(self, command: Sequence[str]) -> Done:
        """Waits until this command has ended."""
        own = self._folders[tuple(command)]
        while not (own / "code").exists():
            assert self._process.poll() is None, "what runs commands beside the tests is gone"
            time.sleep(0.05)
        output = (own / "output").read_text(encoding="utf-8", errors="replace")
        return Done(int((own / "code").read_text()), output, own / "folder")

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


# ---- the process that runs them ----


Job = tuple[str, Sequence[str]]  # a folder and a command


def run_all(lanes: Sequence[Sequence[Job]], lifeline: IO[bytes]) -> None:
    """Runs the jobs of all lanes until the lifeline ends, which it waits for."""
    left = [collections.deque(jobs) for jobs in lanes]
    running = [run_lane(own, left) for own in left]
    while not select.select([lifeline], [], [], 0.05)[0]:
        for lane in running:
            next(lane, None)


def run_lane(own: collections.deque[Job], left: Sequence[collections.deque[Job]]) -> Iterator[None]:
    """Runs a lane's own jobs, and then the last of whichever lane has most left; yields whenever
    there is nothing to do but wait."""
    while own or any(left):
        folder, command = own.popleft() if own else max(left, key=len).pop()
        code = yield from run_one(command, Path(folder) / "output")
        told = Path(folder) / "told"
        told.write_text(str(code))
        told.rename(Path(folder) / "code")


def run_one(command: Sequence[str], output: Path) -> Generator[None, None, int]:
    """The command's exit code."""
    with output.open("wb") as file:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )
        except OSError as error:
            file.write(f"{command[0]}: {error}\n".encode())
            return 127
    while process.poll() is None:
        yield
    return process.returncode


def end_all() -> None:
    """Ends the children, and theirs, which become children of this process when their parents are
    gone, until there are none. Kindly for a while: make and gcc then remove what is half written.
    """
    listing = Path(f"/proc/self/task/{os.getpid()}/children")
    patience, told = time.monotonic() + 3.0, set[int]()
    while pids := {int(word) for word in listing.read_text().split()}:
        kindly = time.monotonic() < patience
        for pid in pids - told if kindly else pids:
            os.kill(pid, signal.SIGTERM if kindly else signal.SIGKILL)
        told |= pids
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        run_all(json.loads(sys.stdin.buffer.readline()), sys.stdin.buffer)
    finally:
        end_all()
