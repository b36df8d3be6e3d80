"""The ranks of one job in a lab: their output, their end, their exit codes.

Invariants: when wait() returns or raises, no rank runs any more. A rank that fails takes the job
with it, but only after a grace time in which the others can report for themselves.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time

TERMINATE_S = 3.0  # from SIGTERM to SIGKILL
TIMED_OUT = 124  # exit code, as of timeout(1)


class Job:
    """A started job; made by NetLab.start().

    Attributes:
        ranks: one subprocess.Popen per rank, in rank order.
    """

    def __init__(self, ranks: list[subprocess.Popen[str]], quiet: bool) -> None:
        self.ranks = ranks
        self._quiet = quiet
        self._lines: list[list[str]] = [[] for _ in ranks]
        self._stopped: set[int] = set()
        self._readers = [
            threading.Thread(target=self._read, args=(rank,), daemon=True)
            for rank, process in enumerate(ranks)
            if process.stdout is not None
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, rank: int) -> None:
        stream = self.ranks[rank].stdout
        assert stream is not None
        for line in stream:
            self._lines[rank].append(line)
            if not self._quiet:
                sys.stderr.write(f"[rank {rank}] {line.rstrip()}\n")

    def output(self, rank: int) -> str:
        """What a rank wrote so far, stdout and stderr together. Rank 0: only of a quiet job."""
        return "".join(self._lines[rank])

    def wait(self, timeout: float | None = None, grace: float = 5.0) -> int:
        """Wait for all ranks and return the worst exit code.

        A rank ended by signal s counts as 128 + s, as in a shell. Ranks that were ended because
        another one failed do not count. After ``timeout`` seconds all are ended and the code is
        124. ``grace``: seconds that the others have to end by themselves once a rank has failed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        failed_at: float | None = None
        try:
            while None in (codes := [process.poll() for process in self.ranks]):
                now = time.monotonic()
                if failed_at is None and any(codes):
                    failed_at = now
                if deadline is not None and now >= deadline:
                    return TIMED_OUT
                if failed_at is not None and now - failed_at >= grace:
                    break
                time.sleep(0.01)
        finally:
            self.stop()
        return max(self._exit_code(rank) for rank in range(len(self.ranks)))

    def stop(self) -> None:
        """End the ranks that still run: SIGTERM, then SIGKILL for those that stay."""
        running = [rank for rank, process in enumerate(self.ranks) if process.poll() is None]
        self._stopped.update(running)
        for rank in running:
            self.ranks[rank].terminate()
        kill_at = time.monotonic() + TERMINATE_S
        for rank in running:
            process = self.ranks[rank]
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, kill_at - time.monotonic()))
            if process.poll() is None:
                process.kill()
                process.wait()
        for reader in self._readers:
            reader.join(timeout=10.0)  # a grandchild may hold the pipe open

    def _exit_code(self, rank: int) -> int:
        code = self.ranks[rank].returncode
        if rank in self._stopped or code is None:
            return 0
        return code if code >= 0 else 128 - code


def exit_name(code: int) -> str:
    """An exit code in words, for messages: "exit code 1", "SIGKILL", "time out"."""
    if code == TIMED_OUT:
        return "time out"
    if code > 128:
        with contextlib.suppress(ValueError):
            return signal.Signals(code - 128).name
    return f"exit code {code}"
