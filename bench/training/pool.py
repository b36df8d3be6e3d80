"""Worker processes of convergence.py, and who runs what.

    Crew        one worker of four threads, or four workers of one rank each
    run_all     keeps so many crews busy with what a plan says is due, until nothing is

Invariants: a row is in its file before the next run of its crew begins; a run that fails is told of
and left out of this start, and the others go on. When run_all returns, no worker is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from report.rows import Row

from training.plan import RANKS, Run
from training.worker import request

HERE = Path(__file__).resolve().parent


class FailedRunError(Exception):
    """A run that ended without a row."""


class Crew:
    """Workers that train together, started when they are first needed.

    Args:
        processes: each rank is a process; else all are threads of one.
    """

    def __init__(self, processes: bool) -> None:
        self._processes = processes
        self._workers: list[subprocess.Popen[str]] = []

    def run(self, run: Run, checkpoint: Path, save: Path | None = None) -> Row:
        """Trains, and returns the measured part of the row. Raises FailedRunError."""
        if any(worker.poll() is not None for worker in self._workers):
            self.close()
        if not self._workers:
            self._start()
        line = request(run, checkpoint, save)
        answer = ""
        with contextlib.suppress(OSError):  # a worker that died
            for worker in self._workers:
                assert worker.stdin is not None
                worker.stdin.write(line)
                worker.stdin.flush()
            assert self._workers[0].stdout is not None
            answer = self._workers[0].stdout.readline()
        if not answer:
            self.close()
            raise FailedRunError("the worker died")
        row: Row = json.loads(answer)
        if "error" in row:
            self.close()
            raise FailedRunError(row["error"])
        return row

    def _start(self) -> None:
        commands: list[list[str]] = [[]]
        if self._processes:
            ports = ["--port", str(_free_port()), "--gloo", str(_free_port())]
            commands = [["--rank", str(rank), *ports] for rank in range(RANKS)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        for number, command in enumerate(commands):
            self._workers.append(
                subprocess.Popen(
                    [sys.executable, str(HERE / "worker.py"), *command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE if number == 0 else subprocess.DEVNULL,
                    text=True,
                    env=environment,
                )
            )

    def close(self) -> None:
        """Ends the workers."""
        for worker in self._workers:
            with contextlib.suppress(OSError):
                assert worker.stdin is not None
                worker.stdin.close()
        for worker in self._workers:
            try:
                worker.wait(10)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
            if worker.stdout is not None:
                worker.stdout.close()
        self._workers = []


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def crew(processes: bool) -> Iterator[Crew]:
    """A crew that is closed at the end."""
    made = Crew(processes)
    try:
        yield made
    finally:
        made.close()


def run_all(
    due: Callable[[], list[Run]],
    done: Callable[[Run, Row], None],
    failed: Callable[[Run, str], None],
    checkpoint: Callable[[Run], Path],
    *,
    jobs: int,
    until: float = float("inf"),
) -> None:
    """Runs what is due, ``jobs`` at a time, until nothing is, or until the clock says so.

    Args:
        due: the runs that can be made now, in order; asked again after each run.
        done, failed: told of each run, never at once.
        checkpoint: where the weights of a run's start are, and those of a checkpoint run go.
        until: of time.monotonic; no run is begun after it.
    """
    lock = threading.Lock()
    taken: set[str] = set()
    woken: queue.Queue[None] = queue.Queue()

    def take() -> Run | None:
        with lock:
            if time.monotonic() >= until:
                return None
            for run in due():
                if run.key not in taken:
                    taken.add(run.key)
                    return run
        return None

    busy = [0]

    def work() -> None:
        with crew(False) as threads, crew(True) as processes:
            while True:
                run = take()
                if run is None:
                    if busy[0] == 0 or time.monotonic() >= until:
                        break
                    with contextlib.suppress(queue.Empty):
                        woken.get(timeout=1.0)  # another crew's row may make more due
                    continue
                busy[0] += 1
                try:
                    save = checkpoint(run) if run.role == "checkpoint" else None
                    row = (processes if run.in_processes else threads).run(
                        run, checkpoint(run), save
                    )
                    with lock:
                        done(run, row)
                except FailedRunError as error:
                    with lock:
                        failed(run, str(error))
                finally:
                    busy[0] -= 1
                    woken.put(None)

    lanes = [threading.Thread(target=work, name=f"crew {number}") for number in range(jobs)]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join()
