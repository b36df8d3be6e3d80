"""What runs commands beside the tests: what it tells of them, and that nothing outlives it."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import beside
import pytest
from patience import until

PROGRAM = """
import subprocess, sys
from subprocess import PIPE

def start(code):
    return subprocess.Popen([sys.executable, "-c", code], stdout=PIPE, text=True)

aborted = start("import os; os.abort()").wait()
left = start("import time; print('is there', flush=True); time.sleep(600)")
said = left.stdout.readline().strip()
left.kill()
left.communicate(timeout=300)  # to the end of its output: nobody is left who could write
print(sys.argv[1:], "torch" in sys.modules, aborted, said, flush=True)
sys.exit("over")
"""
SLEEPS = "setsid sleep 60 & echo $! >{folder}/pid; mv {folder}/pid {folder}/started; wait"


def start(folder: Path, *commands: Sequence[str]) -> beside.Beside:
    return beside.Beside([commands], folder, os.environ)


def test_how_commands_end(tmp_path: Path) -> None:
    speaks = ("sh", "-c", "echo out; echo err >&2; echo kept >{folder}/file; exit 3")
    appends = ("sh", "-c", f"echo run >>{tmp_path}/runs")
    with start(tmp_path, appends, speaks, ("no-such-command",), appends) as running:
        done = running.result(speaks)
        assert (done.code, done.output) == (3, "out\nerr\n")
        assert (done.folder / "file").read_text() == "kept\n"
        none = running.result(["no-such-command"])
        assert none.code == 127
        assert none.output.startswith("no-such-command: ")
        assert running.result(appends).code == 0
    assert (tmp_path / "runs").read_text() == "run\n"


def test_lanes_run_at_once(tmp_path: Path) -> None:
    """Each waits for what the other one does."""
    waits = "until [ -e {there} ]; do sleep 0.01; done"
    first = ("sh", "-c", f"touch {tmp_path}/a; {waits.format(there=tmp_path / 'b')}")
    second = ("sh", "-c", f"{waits.format(there=tmp_path / 'a')}; touch {tmp_path}/b")
    with beside.Beside([[first], [second]], tmp_path / "own", os.environ) as running:
        assert running.result(first).code == running.result(second).code == 0


def test_a_lane_that_is_through_takes_what_another_has_last(tmp_path: Path) -> None:
    """The first command waits for what the second one does."""
    first = ("sh", "-c", f"until [ -e {tmp_path}/b ]; do sleep 0.01; done")
    second = ("sh", "-c", f"touch {tmp_path}/b")
    with beside.Beside([[("true",)], [first, second]], tmp_path / "own", os.environ) as running:
        assert running.result(first).code == running.result(second).code == 0


def test_nothing_is_left(tmp_path: Path) -> None:
    """Not even what has left its session and lost its parent."""
    with start(tmp_path, ("sh", "-c", SLEEPS), ("sh", "-c", f"touch {tmp_path}/second")):
        started = tmp_path / "0" / "folder" / "started"
        until(started.exists)
        pid = int(started.read_text())
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not (tmp_path / "second").exists()


def test_it_says_when_it_is_gone(tmp_path: Path) -> None:
    with start(tmp_path, ("sleep", "60")) as running:
        running._process.send_signal(signal.SIGTERM)
        with pytest.raises(AssertionError, match="is gone"):
            running.result(["sleep", "60"])


@pytest.mark.torch
@pytest.mark.beside("{python}", "-c", PROGRAM, "one", "two")
def test_programs_of_the_warm_python(beside: beside.Done) -> None:
    """As of any Python: arguments, exit codes, signals, and the programs that they start."""
    assert beside.output == "['one', 'two'] True -6 is there\nover\n"
    assert beside.code == 1
