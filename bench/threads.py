"""One thread and two beside each other: all-reduces that the engine's own threads carry.

    python bench/threads.py
    python bench/threads.py --sizes 4M,64M --cores 0,0.3 --rounds 5 --markdown threads.md

Two ranks over the loopback, each with a communicator of one thread and one of two (`threads`),
used by turns; nobody waits inside the library, so that its threads do all the work. Where the ranks
fill the cores a second thread has none to run on, so a machine of more but slower cores is
emulated: each engine thread may use only a part of a core (--cores; 0: no limit), by a control
group of its own (needs root and the cpu controller of cgroup v1). What that cannot show: on the
loopback the sending side also does the kernel's receiving, which falls to interrupts where there is
a network card.

Ratios are taken within a round. Exit code 1 if a result was wrong, 2 if a rank failed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _columns import aligned, markdown, size_name
from _standings import short
from sweep import parse_sizes

from ringcomm import Communicator, Config

PERIOD_US = 5000
WAYS = (1, 2)
HEADS = ("cores each", "size", "threads", "GB/s", "x one thread", "(range)", "CPU s/GB",
         "used by progress", "by sender")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Taken:
    """Rank 0's figures of one way at one size in one round."""

    cores: float
    size: int
    threads: int
    turn: int
    rate: float
    """GB/s: the tensor's size over the median time of a call."""
    cpu: float
    """CPU seconds of the rank per GB that it sent."""
    used: list[float]
    """Cores that each engine thread used: progress, sender."""


# ---- a rank ----


def _threads_of_this_process() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}


def _cpu_s(thread: int) -> float:
    with open(f"/proc/self/task/{thread}/schedstat", encoding="ascii") as file:
        return int(file.read().split()[0]) * 1e-9


def _limit(group: Path, thread: int, cores: float) -> None:
    """Puts a thread into a control group of its own that may use so much of a core."""
    group.mkdir(exist_ok=True)
    (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
    (group / "cpu.cfs_quota_us").write_text(str(round(cores * PERIOD_US) if cores else -1))
    (group / "tasks").write_text(str(thread))


def _call(comm: Communicator, tensor: Any, out: Any) -> float:
    """Seconds of an all-reduce that nobody waits for inside the library."""
    over = threading.Event()
    comm.barrier()
    start = time.perf_counter()
    work = comm.allreduce(tensor, out=out, async_op=True)
    work.call_back(lambda _: over.set())
    over.wait()
    took = time.perf_counter() - start
    work.wait()
    return took


def _take(comm: Communicator, engine: Sequence[int], calls: int, size: int) -> dict[str, Any]:
    tensor, out = np.ones(size // 4, np.float32), np.zeros(size // 4, np.float32)
    _call(comm, tensor, out)
    sent, cpu = comm.stats()["payload_bytes"], time.process_time()
    used, start = [_cpu_s(thread) for thread in engine], time.perf_counter()
    times = [_call(comm, tensor, out) for _ in range(calls)]
    wall = time.perf_counter() - start
    used = [(_cpu_s(thread) - was) / wall for thread, was in zip(engine, used, strict=True)]
    cpu = time.process_time() - cpu
    if not np.all(out == comm.world_size):
        raise SystemExit(1)
    sent = comm.stats()["payload_bytes"] - sent
    return {"rate": size * 1e-9 / statistics.median(times), "cpu": cpu * 1e9 / sent, "used": used}


def be_rank(asked: dict[str, Any]) -> None:
    """Runs all rounds; rank 0 prints a line of JSON for each figure."""
    engine: list[int] = []
    comms = {}
    for way in WAYS:
        before = _threads_of_this_process()
        comms[way] = Communicator.create(config=Config(shared_memory=False, threads=way))
        engine += sorted(_threads_of_this_process() - before)
    rank = comms[1].rank
    for cores in asked["cores"]:
        if asked["group"]:
            for number, thread in enumerate(engine):
                _limit(Path(f"{asked['group']}-{rank}-{number}"), thread, cores)
        for size in asked["sizes"]:
            for turn in range(asked["rounds"]):
                for way in WAYS if turn % 2 else WAYS[::-1]:
                    taken = _take(comms[way], engine, asked["calls"], size)
                    taken |= {"cores": cores, "size": size, "threads": way, "turn": turn}
                    if rank == 0:
                        print(json.dumps(taken), flush=True)
    for comm in comms.values():
        comm.close()


# ---- the command ----


def controller() -> Path | None:
    """Where cgroup v1's cpu controller is mounted and may be written to, if anywhere."""
    with open("/proc/mounts", encoding="utf-8") as file:
        for line in file:
            _, where, kind, settings, *_ = line.split()
            if kind == "cgroup" and "cpu" in settings.split(",") and os.access(where, os.W_OK):
                return Path(where)
    return None


@contextlib.contextmanager
def group_names() -> Iterator[str]:
    """A name to begin those of control groups with, which are removed in the end; "" if there can
    be none."""
    base = controller()
    if base is None:
        yield ""
        return
    name = f"ringcomm-threads-{os.getpid()}"
    try:
        yield str(base / name)
    finally:
        for group in base.glob(f"{name}-*"):
            with contextlib.suppress(OSError):
                group.rmdir()


def run(asked: dict[str, Any], timeout: float) -> list[Taken]:
    """All figures. Raises OSError if a rank fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", json.dumps(asked)],
            env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            stdout=subprocess.PIPE if rank == 0 else None, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        told, _ = ranks[0].communicate(timeout=timeout)
        codes = [rank.wait(timeout=10) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if 1 in codes:
        raise SystemExit(1)
    if any(codes):
        raise OSError(f"the ranks ended with {codes}")
    return [Taken(**json.loads(line)) for line in told.splitlines()]


def rows(taken: Sequence[Taken]) -> list[tuple[str, ...]]:
    """The table, a row for each way at each size and limit."""
    found = []
    for cores, size, way in dict.fromkeys(
        sorted((one.cores, one.size, one.threads) for one in taken)
    ):
        here = [one for one in taken if (one.cores, one.size) == (cores, size)]
        base = {one.turn: one for one in here if one.threads == 1}
        mine = [one for one in here if one.threads == way]
        ratios = [one.rate / base[one.turn].rate for one in mine]
        used = [statistics.median(each) for each in zip(*(one.used for one in mine), strict=True)]
        found.append((
            f"{cores:g}" if cores else "no limit", size_name(size), str(way),
            f"{statistics.median(one.rate for one in mine):.2f}",
            short(statistics.median(ratios)), f"{short(min(ratios))}-{short(max(ratios))}",
            f"{statistics.median(one.cpu for one in mine):.2f}", *(f"{u:.2f}" for u in used),
        ))  # fmt: skip
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="threads.py", description="One thread and two.")
    add = parser.add_argument
    add("--sizes", type=parse_sizes, default="64M", help="bytes of the tensor")
    add(
        "--cores",
        type=lambda text: [float(part) for part in text.split(",")],
        default="0,0.3",
        metavar="SHARE,...",
        help="of a core, for each engine thread; 0: no limit",
    )
    add("--rounds", type=int, default=7)
    add("--calls", type=int, default=5, help="timed in each round and way")
    add("--timeout", type=float, default=300)
    add("--markdown", type=Path, metavar="FILE")
    add("--rank", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.rank:
        be_rank(options.rank)
        return 0
    with group_names() as group:
        shares = [share for share in options.cores if group or share == 0]
        if len(shares) < len(options.cores):
            print("# no cpu controller of cgroup v1 that can be written to: nothing is limited")
        asked = {"sizes": options.sizes, "cores": shares, "rounds": options.rounds,
                 "calls": options.calls, "group": group if any(shares) else ""}  # fmt: skip
        try:
            table = [HEADS, *rows(run(asked, options.timeout))]
        except (OSError, subprocess.TimeoutExpired) as error:
            print(f"threads: {error}", file=sys.stderr)
            return 2
    print(f"# 2 ranks, loopback, {len(os.sched_getaffinity(0))} cores")
    print("\n".join(aligned(table)))
    if options.markdown:
        options.markdown.write_text("\n".join(markdown(table)) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
