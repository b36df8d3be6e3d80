"""What `peers.py --all` measures, and what each figure has to reach: data alone.

A Scene is a site, the libraries on it and the sizes; its goals are the rows of the table. Goals are
ratios within the run, or times that were chosen with the peers' and the floor's in view; whether
one was met is decided in verdicts.py.

Invariants: names are unique. The groups are what --rows names, in order of the table. No measured
figure is kept here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

KIB, MIB = 1 << 10, 1 << 20
KB, MB = 10**3, 10**6

TCP = ("ringcomm", "gloo", "openmpi-tcp", "mpich")
SHARED = ("ringcomm-shm", "openmpi-shm", "mpich-shm")
PORTS = ("ringcomm", "gloo", "gloo-ports", "openmpi-tcp")  # the others take one port

NO_ARP_FLUX = {"net.ipv4.conf.all.arp_ignore": "1", "net.ipv4.conf.all.arp_announce": "2"}

LINE_SHARE = 1448 / 1514  # of layer 2 bytes, that TCP carries


@dataclasses.dataclass(frozen=True)
class Goal:
    """One row.

    Attributes:
        figure: what is judged:
            "time_us"   microseconds of a call, at most
            "share"     busbw over what the ports can carry of TCP, at least
            "cpu"       CPU seconds of all ranks per GB sent, at most
            "cpu_floor" the same over that of bare streams, at most
            "best"      time over that of the fastest other library in the round, at most
            "gloo"      time over gloo's in the round, at most
            "idle"      cores that a rank takes while nothing is in flight, at most
            "follow_s"  seconds until 90 % of the new sum of rates, at most
        limit: in the unit above.
        size: bytes of the tensor; 0 where there is none.
        wire: ringcomm's wire format.
        mbit: of "follow_s": the new rate of the port that changes.
    """

    figure: str
    limit: float
    size: int = 0
    wire: str = "none"
    mbit: float = 0.0


@dataclasses.dataclass(frozen=True)
class Scene:
    """A site with the jobs to run on it.

    Attributes:
        group: as in --rows.
        name: of the site, in words, without the size.
        ranks: in all, spread evenly over the hosts.
        libraries: by their names in libraries/contenders.py; the first of the subjects is judged.
        goals: the rows.
        sizes: bytes; those of the goals unless given.
        hosts: of the netlab; 0: the loopback.
        nics: Mbit/s of each port of a host.
        sysctls: of each host, beside what the lab sets.
        rounds: in a full run.
        kind: "sweep", "idle" or "shift" (a rate that changes in mid-run).
        busy: both cores are loaded by other work meanwhile.
    """

    group: str
    name: str
    ranks: int
    libraries: Sequence[str]
    goals: Sequence[Goal]
    sizes: Sequence[int] = ()
    hosts: int = 0
    nics: Sequence[float] = ()
    one_subnet: bool = False
    sysctls: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rounds: int = 3
    kind: str = "sweep"
    busy: bool = False

    def all_sizes(self) -> list[int]:
        """The sizes to measure, rising."""
        return sorted(set(self.sizes) | {goal.size for goal in self.goals if goal.size})

    def wires(self) -> list[str]:
        """The wire formats that the goals speak of."""
        return list(dict.fromkeys(goal.wire for goal in self.goals))

    def line(self) -> float:
        """GB/s that the ports of one host carry each way; 0: not shaped."""
        return sum(self.nics) * 1e6 / 8 * LINE_SHARE / 1e9


def _times(*pairs: tuple[int, float]) -> tuple[Goal, ...]:
    """Goals of a time in us by size."""
    return tuple(Goal("time_us", us, size) for size, us in pairs)


def _each(figure: str, limit: float, *sizes: int) -> tuple[Goal, ...]:
    return tuple(Goal(figure, limit, size) for size in sizes)


def _port(mbit: float, *sizes: int) -> Scene:
    goals = (*_each("share", 0.98, *sizes), *_each("cpu_floor", 1.25, sizes[-1]))
    return Scene(
        "port", f"2 hosts, {mbit:g} Mbit/s", 2, TCP, goals, hosts=2, nics=(mbit,), rounds=2
    )


def _ports(first: float, second: float, share: float) -> Scene:
    return Scene(
        "ports",
        f"2 hosts, {first:g}+{second:g} Mbit/s",
        2,
        PORTS,
        (Goal("share", 0.90, MB), *_each("share", share, 4 * MB, 16 * MB)),
        hosts=2,
        nics=(first, second),
        rounds=2,
    )


SCENES = (
    Scene(
        "loopback",
        "2 ranks, loopback TCP, fp32",
        2,
        TCP,
        (
            *_times((4 * KIB, 12), (64 * KIB, 20), (MIB, 140), (16 * MIB, 3000), (64 * MIB, 12500)),
            *_each("cpu", 0.30, 16 * MIB, 64 * MIB),
        ),
    ),
    Scene(
        "loopback",
        "2 ranks, loopback TCP, bf16",
        2,
        ("ringcomm", "gloo"),
        (Goal("time_us", 10500, 64 * MIB, "bf16"),),
    ),
    Scene(
        "four",
        "4 ranks on 2 cores, loopback TCP",
        4,
        TCP,
        _each("best", 1.0, 4 * KIB, MIB, 16 * MIB),
    ),
    Scene(
        "shared",
        "2 ranks, shared memory",
        2,
        SHARED,
        _times((4 * KIB, 5), (MIB, 60), (64 * MIB, 6500)),
        sizes=(64 * KIB, 16 * MIB),
    ),
    Scene(
        "shared", "4 ranks on 2 cores, shared memory", 4, SHARED, _each("best", 1.0, MIB, 16 * MIB)
    ),
    _port(1000, 4 * MB, 16 * MB),
    _port(2500, 4 * MB, 16 * MB),
    _port(10000, 4 * MB, 16 * MB, 64 * MB),
    Scene(
        "middle",
        "4 hosts, 1000 Mbit/s",
        4,
        TCP,
        _times((4 * KB, 400), (64 * KB, 1200), (256 * KB, 3200)),
        hosts=4,
        nics=(1000,),
    ),
    _ports(1000, 1000, 0.98),
    _ports(1000, 2500, 0.96),
    _ports(1000, 100, 0.95),
    Scene(
        "subnet",
        "2 hosts, 1000+1000 Mbit/s in one subnet, no routing rules",
        2,
        ("ringcomm", "gloo"),
        _each("share", 0.95, 4 * MB, 16 * MB),
        hosts=2,
        nics=(1000, 1000),
        one_subnet=True,
        rounds=2,
    ),
    Scene(
        "subnet",
        "2 hosts, 1000+1000 Mbit/s in one subnet, ARP settings as ringcomm names them",
        2,
        ("ringcomm", "gloo"),
        _each("share", 0.95, 4 * MB, 16 * MB),
        hosts=2,
        nics=(1000, 1000),
        one_subnet=True,
        rounds=2,
        sysctls=NO_ARP_FLUX,
    ),
    Scene(
        "idle",
        "2 ranks, nothing in flight",
        2,
        ("ringcomm", "ringcomm-shm", "gloo"),
        (Goal("idle", 0.001),),
        kind="idle",
        rounds=1,
    ),
    Scene(
        "busy",
        "2 ranks, loopback TCP, other work on both cores",
        2,
        ("ringcomm", "gloo"),
        _each("gloo", 1.2, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB),
        busy=True,
    ),
    Scene(
        "shift",
        "2 hosts, 1000 + 1000 -> 200 -> 1000 Mbit/s",
        2,
        ("ringcomm",),
        (Goal("follow_s", 1.0, 4 * MB, mbit=200), Goal("follow_s", 1.0, 4 * MB, mbit=1000)),
        hosts=2,
        nics=(1000, 1000),
        kind="shift",
        rounds=1,
    ),
)

GROUPS = tuple(dict.fromkeys(scene.group for scene in SCENES))
