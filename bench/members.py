"""How soon rounds go on without a host that is lost: ringcomm.membership over emulated hosts.

    python bench/members.py                       # 3 and 4 hosts, every fault, 5 trials of each
    python bench/members.py --hosts 3 --faults killed --trials 1

Needs root (netlab). A rank on each host takes round after round, a sum of 0.5 MB over a port of 1
Gbit/s, without a pause in between, so a fault comes in mid-round. One host is hurt:

    killed     its process by SIGKILL: its connections end
    paused     its process by SIGSTOP: its kernel still answers for it
    dark       its port loses all packets, both ways, and says nothing

Timed is from the fault until the slowest of the other ranks has completed a round without it. The
goal is the grace time and 1 s. Exit code 1 if a trial missed it, 2 if one failed.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence

from _columns import aligned
from _job import Job
from netlab import NetLab, NetLabError

FAULTS = ("killed", "paused", "dark")
GOAL_S = 1.0
ELEMENTS = 125_000
MBIT = 1000
BEFORE = 20  # rounds
HEADS = ("fault", "hosts", "lost", "trials", "seconds, least", "most", "goal", "verdict")


def rank(grace_s: float) -> None:
    """One rank: rounds until somebody ends it. Prints a line of JSON for each whose members are
    others than before, and one when BEFORE rounds are over."""
    import numpy as np

    import ringcomm
    from ringcomm.membership import Membership

    members: tuple[int, ...] = ()
    with Membership(grace_s=grace_s, min_peers=2) as membership:
        number = 0
        while True:
            current = membership.begin_round(number)
            while True:
                try:
                    membership.comm.allreduce(np.ones(ELEMENTS, np.float32))
                    membership.end_round()
                    break
                except ringcomm.RingcommError as error:
                    current = membership.lost(error)
            number = current.number + 1
            if current.members != members or number == BEFORE:
                members = current.members
                told = {"members": members, "number": number, "at": time.monotonic()}
                print(json.dumps(told), flush=True)


def trial(hosts: int, victim: int, fault: str, grace_s: float, timeout: float) -> float:
    """Seconds until the slowest of the others had completed a round. Raises RuntimeError."""
    others = [host for host in range(hosts) if host != victim]
    with NetLab(hosts, [MBIT]) as lab:
        job = lab.start([sys.executable, __file__, "--as-rank", str(grace_s)], quiet=True)
        _until(job, lambda: all(_told(job, host, number=BEFORE) for host in range(hosts)), timeout)
        since = time.monotonic()
        if fault == "dark":
            lab.blackhole(victim, 0)
        else:
            name = signal.SIGKILL if fault == "killed" else signal.SIGSTOP
            job.ranks[victim].send_signal(name)
        _until(job, lambda: all(_told(job, host, members=others) for host in others), timeout)
        slowest = max(_told(job, host, members=others)[-1] for host in others)
        job.stop()
    return slowest - since


def _told(job: Job, host: int, **wanted: object) -> list[float]:
    """When a rank told of what is wanted."""
    lines = [line for line in job.output(host).splitlines(keepends=True) if line[:1] == "{"]
    told = [json.loads(line) for line in lines if line.endswith("\n")]
    return [one["at"] for one in told if all(one[name] == want for name, want in wanted.items())]


def _until(job: Job, is_there: Callable[[], bool], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not is_there():
        if time.monotonic() > deadline:
            raise RuntimeError("no round without the lost rank: " + " | ".join(
                job.output(host)[-200:].strip() for host in range(len(job.ranks))
            ))  # fmt: skip
        time.sleep(0.02)


def row(
    fault: str, hosts: int, victim: int, taken: Sequence[float], grace_s: float
) -> tuple[str, ...]:
    """A line of the table."""
    goal = grace_s + GOAL_S
    return (
        fault, str(hosts), str(victim), str(len(taken)), f"{min(taken):.2f}", f"{max(taken):.2f}",
        f"{goal:.2f}", "met" if max(taken) <= goal else "short",
    )  # fmt: skip


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    def whole(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(prog="members.py", description="Rounds without a lost host.")
    add = parser.add_argument
    add("--hosts", type=whole, default="3,4", metavar="LIST")
    add("--faults", type=lambda text: text.split(","), default=",".join(FAULTS), metavar="LIST")
    add("--trials", type=int, default=5)
    add("--grace", type=float, default=2.0, metavar="S", help="how long a lost rank is waited for")
    add("--timeout", type=float, default=60)
    add("--as-rank", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if not all(3 <= hosts <= 16 for hosts in options.hosts) or options.trials < 1:
        parser.error("give 3 to 16 --hosts, and a trial or more")
    unknown = set(options.faults) - set(FAULTS)
    if unknown or options.grace <= 0:
        parser.error(f"give --faults of {', '.join(FAULTS)}, and --grace above 0")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = _parse(argv)
    if options.as_rank is not None:
        rank(options.as_rank)
        return 0
    rows = [HEADS]
    try:
        for fault in options.faults:
            for hosts in options.hosts:
                for victim in (0, hosts - 1):  # rank 0 decides
                    taken = []
                    for _ in range(options.trials):
                        taken.append(trial(hosts, victim, fault, options.grace, options.timeout))
                    rows.append(row(fault, hosts, victim, taken, options.grace))
                    print("#", *rows[-1], flush=True)
    except (NetLabError, RuntimeError) as error:
        print(f"members: {error}", file=sys.stderr)
        return 2
    print("\n".join(aligned(rows, left=[0])))
    return 1 if any(one[-1] == "short" for one in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
