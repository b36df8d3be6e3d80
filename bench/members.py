"""How soon rounds go on without a host that is lost: ringcomm.membership over emulated hosts.

    python bench/members.py                       # 3 and 4 hosts, every fault, 5 trials of each
    python bench/members.py --hosts 3 --faults killed --trials 1
    python bench/members.py --out-of-step         # 2, 3 and 4 hosts, no fault, ranks that come late

Needs root (netlab). A rank on each host takes round after round, a sum of 0.5 MB over a port of 1
Gbit/s, without a pause in between, so a fault comes in mid-round. One host is hurt:

    killed     its process by SIGKILL: nobody listens for it any more
    paused     its process by SIGSTOP: its kernel still answers for it
    dark       its port loses all packets, both ways, and says nothing

Timed is from the fault until the slowest of the other ranks has completed a round without it. The
goal is the grace time and 1 s. Exit code 1 if a trial missed it, 2 if one failed.

With --out-of-step nothing is hurt: each rank comes to each of 60 rounds behind a delay of its own,
from 2 ms to 2 s, and the same rounds are taken by a communicator of fixed ranks. The goal: nobody
joins or leaves, and the time is within 5 % of the fixed ranks'.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from lab.job import Job
from netlab import NetLab, NetLabError
from report.columns import aligned

FAULTS = ("killed", "paused", "dark")
GOAL_S = 1.0
ELEMENTS = 125_000
MBIT = 1000
BEFORE = 20  # rounds
ROUNDS = 60  # out of step
DELAYS_S = (0.002, 2.0)
WITHIN = 1.05
LATE_HEADS = ("hosts", "rounds", "joined", "left", "fixed, s", "membership, s", "ratio", "verdict")
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


def late_rank(rounds: int) -> None:
    """One rank, out of step with the others: prints a line of JSON when the rounds are over."""
    import numpy as np

    import ringcomm
    from ringcomm.membership import Membership

    values, told = np.ones(ELEMENTS, np.float32), {"joined": 0, "left": 0, "fixed": 0.0}

    def delays(rank: int) -> Iterator[float]:
        chance = random.Random(rank)
        least, most = DELAYS_S
        return (least * (most / least) ** chance.random() for _ in range(rounds))

    with ringcomm.init() as comm:
        comm.barrier()
        began = time.monotonic()
        for delay in delays(comm.rank):
            time.sleep(delay)
            comm.allreduce(values)
            comm.barrier()
        told["fixed"] = time.monotonic() - began
    with Membership(grace_s=30.0, min_peers=2) as membership:
        membership.comm.barrier()
        began = time.monotonic()
        for number, delay in enumerate(delays(membership.rank)):
            time.sleep(delay)
            current = membership.begin_round(number)
            told["joined"] += len(current.joined)
            told["left"] += len(current.left)
            membership.comm.allreduce(values)
            membership.end_round()
        told["membership"] = time.monotonic() - began
        print(json.dumps(told), flush=True)


def out_of_step(hosts: int, rounds: int, timeout: float) -> tuple[str, ...]:
    """A line of the table. Raises RuntimeError where a rank fails."""
    with NetLab(hosts, [MBIT]) as lab:
        command = [sys.executable, __file__, "--as-late-rank", str(rounds)]
        code = (job := lab.start(command, quiet=True)).wait(timeout)
        output = [job.output(host) for host in range(hosts)]
    lines = [[line for line in text.splitlines() if line[:1] == "{"] for text in output]
    if code or not all(lines):
        raise RuntimeError(f"exit code {code}: " + " | ".join(text[-200:] for text in output))
    told = [json.loads(line[-1]) for line in lines]
    fixed, taken = (max(one[name] for one in told) for name in ("fixed", "membership"))
    joined, left = (sum(one[name] for one in told) for name in ("joined", "left"))
    met = not joined and not left and taken <= WITHIN * fixed
    return (
        str(hosts),
        str(rounds),
        str(joined),
        str(left),
        f"{fixed:.2f}",
        f"{taken:.2f}",
        f"{taken / fixed:.3f}",
        "met" if met else "short",
    )


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
            raise RuntimeError(
                "no round without the lost rank: "
                + " | ".join(job.output(host)[-200:].strip() for host in range(len(job.ranks)))
            )
        time.sleep(0.02)


def row(
    fault: str, hosts: int, victim: int, taken: Sequence[float], grace_s: float
) -> tuple[str, ...]:
    """A line of the table."""
    goal = grace_s + GOAL_S
    return (
        fault,
        str(hosts),
        str(victim),
        str(len(taken)),
        f"{min(taken):.2f}",
        f"{max(taken):.2f}",
        f"{goal:.2f}",
        "met" if max(taken) <= goal else "short",
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    def whole(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(prog="members.py", description="Rounds without a lost host.")
    add = parser.add_argument
    add("--hosts", type=whole, metavar="LIST", help="3,4 by default; 2,3,4 out of step")
    add("--out-of-step", action="store_true", help="ranks that come late instead of faults")
    add("--rounds", type=int, default=ROUNDS, help="out of step")
    add("--faults", type=lambda text: text.split(","), default=",".join(FAULTS), metavar="LIST")
    add("--trials", type=int, default=5)
    add("--grace", type=float, default=2.0, metavar="S", help="how long a lost rank is waited for")
    add("--timeout", type=float, default=60)
    add("--as-rank", type=float, help=argparse.SUPPRESS)
    add("--as-late-rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    least = 2 if options.out_of_step else 3
    options.hosts = options.hosts or list(range(least, 5))
    if not all(least <= hosts <= 16 for hosts in options.hosts):
        parser.error(f"give {least} to 16 --hosts")
    if options.trials < 1 or options.rounds < 1:
        parser.error("give a trial and a round, or more")
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
    if options.as_late_rank is not None:
        late_rank(options.as_late_rank)
        return 0
    rows = [LATE_HEADS if options.out_of_step else HEADS]
    try:
        if options.out_of_step:
            for hosts in options.hosts:
                rows.append(out_of_step(hosts, options.rounds, options.timeout * options.rounds))
                print("#", *rows[-1], flush=True)
            options.faults = []
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
