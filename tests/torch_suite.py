"""PyTorch's own distributed tests, run against a backend, and compared with gloo.

    python tests/torch_suite.py run ringcomm --world 2              one backend
    python tests/torch_suite.py compare --world 2 --world 3         gloo too: make test-torch
    python tests/torch_suite.py compare --world 2 --match all_reduce,ddp_comm_hook
    python tests/torch_suite.py compare --lifted --world 2 --world 3

The tests are those that ship with PyTorch (torch.testing._internal.distributed.distributed_test).
They ask for the backend's name and skip what they know only of others; with ``--as-gloo`` groups of
ringcomm are therefore also made under gloo's name, so that these tests run too. Most ask for a GPU
or for NCCL besides; with ``--lifted`` they do not, and run on the CPU (torch_lifted.py): ringcomm
as gloo.

Ranks are forked from a process that has imported PyTorch, or each test would take seconds to start.
``compare`` fails if a test passes with gloo and not with ringcomm (each is tried twice, since some
race with time), and prints both scores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import torch_lifted

SECONDS = 60
"""For one test."""
OF_THE_NAME = ["test_ddp_logging_data_cpu", "test_ddp_profiling_torch_profiler"]
"""Tests that look at the backend's name, which is ringcomm under any other: they run under that."""
TOO_LONG = {"test_ddp_uneven_inputs"}
"""A convolutional network in 54 settings: more than five minutes on any backend without a GPU."""


def prepare(backend: str, world: int, folder: str) -> None:
    """The tests read these when they are imported."""
    os.environ.update(
        BACKEND=backend,
        WORLD_SIZE=str(world),
        TEMP_DIR=folder,
        MASTER_ADDR="127.0.0.1",
        OMP_NUM_THREADS="1",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(SECONDS),
        GLOO_SOCKET_IFNAME="lo",
        RINGCOMM_INTERFACES="lo",
    )
    for name in ("barrier", "test_dir", "init_dir"):
        os.makedirs(os.path.join(folder, name), exist_ok=True)


def stand_in_for_gloo() -> None:
    """Groups of backend "gloo" are ringcomm's from here on."""
    import torch.distributed.distributed_c10d as c10d

    from ringcomm.torch import Options
    from ringcomm.torch.group import RingcommGroup, connect

    class Gloo(RingcommGroup):
        def __new__(cls, store: Any, rank: int, size: int, timeout: Any, **_: Any) -> Any:
            comm = connect(store, rank, size, timeout, Options(), "0")
            group = RingcommGroup(store, comm, Options())
            group.__class__ = cls
            return group

        def __init__(self, *_: Any, **__: Any) -> None:
            self.options.global_ranks_in_group = self.options.group_name = None

    c10d.ProcessGroupGloo = Gloo  # type: ignore[misc]


def forget_names_of_ranges() -> None:
    """What gloo calls its profiler's ranges is for gloo to keep."""
    from torch.testing._internal.distributed import distributed_test as suite

    suite.PROFILING_SUPPORTED_BACKENDS.clear()
    suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.clear()


def load(backend: str) -> type[unittest.TestCase]:
    """The class with all the tests."""
    import torch
    from torch.testing._internal import common_distributed

    import ringcomm.torch  # noqa: F401

    for feature in ("ddp", "subgroup", "plugin"):
        common_distributed.DistTestCases.backend_feature[feature].add("ringcomm")
    from torch.testing._internal.distributed import distributed_test as suite

    class Tests(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return Tests


class Results(unittest.TestResult):
    """What became of each test: "ok", "skip", or the failure's text."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}

    def startTest(self, test: Any) -> None:  # noqa: N802
        super().startTest(test)
        self._began = time.monotonic()

    def _note(self, test: Any, what: str) -> None:
        name = test._testMethodName
        self.found.setdefault(name, what)
        line = what.strip().splitlines()[-1][:150] if what else ""
        print(f"{time.monotonic() - self._began:6.1f} s  {name}  {line}", file=sys.stderr)

    def addSuccess(self, test: Any) -> None:  # noqa: N802
        self._note(test, "ok")

    def addSkip(self, test: Any, reason: str) -> None:  # noqa: N802
        self._note(test, "skip")

    def addError(self, test: Any, err: Any) -> None:  # noqa: N802
        self._note(test, self._exc_info_to_string(err, test))

    addFailure = addError  # noqa: N815


def run(backend: str, world: int, match: list[str], as_gloo: bool, lifted: bool) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        prepare("gloo" if as_gloo else backend, world, folder)
        if lifted:
            torch_lifted.lift_gates()
        tests = load(backend)
        if lifted:
            torch_lifted.map_gpus_to_cpu(world)
        if as_gloo:
            stand_in_for_gloo()
            forget_names_of_ranges()
        names = unittest.TestLoader().getTestCaseNames(tests)
        names = [n for n in names if not (lifted and n in TOO_LONG)]
        chosen = [n for n in names if not match or any(part in n for part in match)]
        results = Results()
        for name in chosen:
            tests(name).run(results)
        return results.found


def in_a_process(
    backend: str, world: int, match: list[str], as_gloo: bool, lifted: bool
) -> dict[str, str]:
    """The suite can be loaded for one backend and world size per process."""
    command = [sys.executable, __file__, "run", backend, "--world", str(world), "--json"]
    command += ["--as-gloo"] if as_gloo else []
    command += ["--lifted"] if lifted else []
    command += ["--match", ",".join(match)] if match else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compare(world: int, match: list[str], as_gloo: bool, lifted: bool) -> bool:
    as_gloo = as_gloo or lifted
    theirs = in_a_process("gloo", world, match, False, lifted)
    ours = in_a_process("ringcomm", world, match, as_gloo, lifted)
    named = [name for name in OF_THE_NAME if as_gloo and name in ours]
    if named:
        ours.update(in_a_process("ringcomm", world, named, False, lifted))
    passed = [name for name, what in theirs.items() if what == "ok"]
    asked = [name for name in passed if ours.get(name) != "skip"]
    wrong = [name for name in asked if ours.get(name) != "ok"]
    if wrong:
        again = in_a_process("ringcomm", world, wrong, as_gloo, lifted)
        ours.update({name: again[name] for name in wrong if name not in named})
        wrong = [name for name in wrong if ours[name] != "ok"]
    for name in wrong:
        print(f"---- {name}\n{ours[name]}")
    skipped = len(passed) - len(asked)
    label = "ringcomm as gloo" if as_gloo else "ringcomm"
    label += ", gates lifted" if lifted else ""
    print(
        f"{world} ranks: of {len(theirs)} tests {len(passed)} pass with gloo; of these "
        f"{len(asked) - len(wrong)} pass with {label}, {len(wrong)} fail, {skipped} are "
        f"skipped by name{': ' + ', '.join(wrong) if wrong else ''}"
    )
    return not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("run", "compare"))
    parser.add_argument("backend", nargs="?", default="ringcomm")
    parser.add_argument("--world", type=int, action="append", help="2 if not given")
    parser.add_argument("--match", default="", help="parts of names, with commas")
    parser.add_argument("--as-gloo", action="store_true")
    parser.add_argument("--lifted", action="store_true", help="without the gates of GPUs")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    match = [part for part in args.match.split(",") if part]
    worlds = args.world or [2]
    if args.what == "compare":
        right = [compare(world, match, args.as_gloo, args.lifted) for world in worlds]
        return 0 if all(right) else 1
    if args.json:
        with contextlib.redirect_stdout(sys.stderr):
            found = run(args.backend, worlds[0], match, args.as_gloo, args.lifted)
        print(json.dumps(found), flush=True)
        return 0
    found = run(args.backend, worlds[0], match, args.as_gloo, args.lifted)
    bad = {name: what for name, what in found.items() if what not in ("ok", "skip")}
    for name, what in bad.items():
        print(f"---- {name}\n{what}")
    print(
        f"{sum(w == 'ok' for w in found.values())} ok, {len(bad)} failed, "
        f"{sum(w == 'skip' for w in found.values())} skipped"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
