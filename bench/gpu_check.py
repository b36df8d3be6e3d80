"""Proves ringcomm on a GPU, in under nine minutes: gpu_check.sh calls it.

    bench/gpu_check.sh                          # all steps, on a machine with a GPU
    bench/gpu_check.sh --steps exact,kernels
    bench/gpu_check.sh --fake                   # what can be had of it without a GPU

A line for each check as it is made, a table last; gpu_check.json, and what steps wrote besides in
gpu_check.log, in $OUT if that is set. Neither torch nor CuPy is needed but for what is about them.
Nothing on the GPU or the machine is changed: namespaces and an MPS daemon of its own are removed at
the end.

Exit code 1 if something was wrong, 0 otherwise (short is a goal of speed that is missed), 2 if
nothing could be checked.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT)]

from gpu_checks import build  # noqa: E402
from gpu_checks.report import Check, table, write_json  # noqa: E402
from gpu_checks.steps import Step, run_step  # noqa: E402

STEPS = (
    Step("probe", "gpu_checks.probe", 60),
    Step("exact", "gpu_checks.exact", 120),
    Step("reduce", "gpu_checks.reduce", 60),
    Step("order", "gpu_checks.order", 90),
    Step("kernels", "gpu_checks.kernels", 40),
    Step("links", "gpu_checks.links", 150),
    Step("train", "gpu_checks.train", 60),
    Step("hierarchy", "gpu_checks.hierarchy", 150),
    Step("nccl", "gpu_checks.nccl", 100),
)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    names = [step.name for step in STEPS]
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description="ringcomm on a GPU.")
    add = parser.add_argument
    add("--fake", action="store_true", help="the fake driver of tests/cuda instead of a GPU")
    add("--quick", action="store_true", help="few and small: to see that it works")
    add("--steps", default=",".join(names), metavar="LIST", help=",".join(names))
    add("--minutes", type=float, default=8.8, help="after which nothing is begun or goes on")
    add("--one", choices=names, help=argparse.SUPPRESS)  # in this process
    add("--folder", type=Path, help=argparse.SUPPRESS)  # what was built
    options = parser.parse_args(argv)
    options.steps = options.steps.split(",")
    unknown = set(options.steps) - set(names)
    if unknown:
        parser.error(f"there is no step {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    return options


def prepare(folder: Path, steps: Sequence[str], fake: bool) -> dict[str, str]:
    """Builds; returns the environment of the steps. Raises BuildError."""
    lacking = build.missing()
    if lacking:
        raise build.BuildError(
            f"{sys.executable} lacks {', '.join(lacking)}: ringcomm needs numpy and cffi (offline: "
            "carry the wheels of cffi and pycparser, pip install --target FOLDER, PYTHONPATH)"
        )
    print(f"# {build.make_core(folder)}")
    build.make_metadata(folder)
    if "exact" in steps:
        build.make_reference(folder, "-O1" if fake else "-O3")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", ""), str(folder)])
    env = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    return env | (build.make_fakes(folder) if fake else {})


def run_all(options: argparse.Namespace) -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        try:
            env = prepare(Path(name), options.steps, options.fake)
        except build.BuildError as error:
            print(f"gpu_check: {error}", file=sys.stderr)
            return 2
        checks: list[Check] = []
        for step in STEPS:
            if step.name not in options.steps:
                continue
            if options.fake:  # limits are for a GPU, and for a machine that has nothing else to do
                step = dataclasses.replace(step, limit_s=60 * options.minutes)
            command = [sys.executable, __file__, "--one", step.name, "--folder", name]
            command += [f"--{flag}" for flag in ("fake", "quick") if getattr(options, flag)]
            left = 60 * options.minutes - (time.monotonic() - began)
            checks += run_step(step, command, env, left, lambda check: print(check.line()))
            if any(check.name == "driver" and check.verdict == "wrong" for check in checks):
                break  # there is nothing to check
    took = time.monotonic() - began
    print(
        f"\n{table(checks)}\n# {took:.0f} s; {platform.node()}, {os.cpu_count()} cores, "
        f"Linux {platform.release()}, Python {platform.python_version()}"
    )
    about = {
        "seconds": took,
        "date": time.strftime("%Y-%m-%d"),
        "fake": options.fake,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
    }
    write_json(checks, about)
    return int(any(check.verdict == "wrong" for check in checks))


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # so that namespaces and daemons are removed


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = parse_arguments(argv)
    if options.one is None:
        return run_all(options)
    signal.signal(signal.SIGTERM, _leave)
    step = next(step for step in STEPS if step.name == options.one)
    importlib.import_module(step.module).run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
