"""Runs the steps of gpu_check.py: each a process of its own with a limit of its own.

Invariants: no step outlives its limit, nor any process that it started in its session; a step that
crashes or hangs is a check of its own ("wrong", with what it said last), and the others go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lab.job import exit_name

from gpu_checks.report import Check, read

LEAST_S = 5.0  # below that a step is not begun
GRACE_S = 10.0  # to clean up, from SIGTERM on


@dataclasses.dataclass(frozen=True)
class Step:
    """A part of the run.

    Attributes:
        module: whose run(options) it is.
        limit_s: seconds that it may take.
    """

    name: str
    module: str
    limit_s: float


def run_step(
    step: Step,
    command: Sequence[str],
    env: dict[str, str],
    left_s: float,
    show: Callable[[Check], None],
) -> list[Check]:
    """Runs one step, shows its checks as they come, and returns them."""
    limit = min(step.limit_s, left_s)
    if left_s < LEAST_S:
        return _shown([Check(step.name, "all", "skipped", why="no time is left")], show)
    process = subprocess.Popen(
        list(command),
        env=env,
        text=True,
        errors="replace",
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    checks: list[Check] = []
    said: list[str] = []
    over = threading.Timer(limit, _end, [process])
    began = time.monotonic()
    over.start()
    assert process.stdout is not None
    try:
        for line in process.stdout:
            check = read(step.name, line)
            if check is None:
                said.append(line.strip())
            else:
                checks += _shown([check], show)
        code = process.wait()
    finally:
        over.cancel()
        _kill(process)
    took = time.monotonic() - began
    if took >= limit:
        whole = limit == step.limit_s
        why = f"not over after {limit:.0f} s" if whole else "no time was left"
        checks += _shown(
            [Check(step.name, "the rest", "wrong" if whole else "skipped", why=why)], show
        )
    elif code:
        last = next((line for line in reversed(said) if line), "it said nothing")
        why = f"{exit_name(code if code > 0 else 128 - code)}: {last[:300]}"
        checks += _shown([Check(step.name, "the rest", "wrong", why=why)], show)
    _keep(step, said)
    return checks


def _shown(checks: list[Check], show: Callable[[Check], None]) -> list[Check]:
    for check in checks:
        show(check)
    return checks


def _end(process: subprocess.Popen[str]) -> None:
    """SIGTERM to the step itself, which ends what it began; then SIGKILL to all of its session."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _keep(step: Step, said: list[str]) -> None:
    """What it wrote besides, to the end of $OUT/gpu_check.log."""
    folder = os.environ.get("OUT")
    if folder and said:
        with contextlib.suppress(OSError):
            Path(folder).mkdir(parents=True, exist_ok=True)
            with Path(folder, "gpu_check.log").open("a", encoding="utf-8") as log:
                log.write("\n".join([f"# {step.name}", *said[-2000:], ""]))
