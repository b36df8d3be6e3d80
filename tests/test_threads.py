"""How many threads carry the traffic: what is chosen from what is known of the ports and cores, and
that the second one is there, idle, and gone with the communicator.
"""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
from patience import until
from ranks import World

from ringcomm import Communicator, Config
from ringcomm.bootstrap.mesh_result import LaneSocket, Mesh
from ringcomm.core.opening import choose_threads

pytestmark = pytest.mark.usefixtures("nothing_left")

TEN_GBIT = 1.25e9


def mesh(rails: list[float], lanes: int = 1, peers: int = 1, local: int = 1, busy: int = 0) -> Mesh:
    """Of a rank with so many peers on other hosts, local ranks, and ports of these speeds."""
    made = [
        LaneSocket(peer, rail, lane, -1, speed / lanes)
        for peer in range(1, peers + 1)
        for rail, speed in enumerate(rails)
        for lane in range(lanes)
    ]
    n = peers + 1
    return Mesh(0, n, ["host"] * n, list(range(n)), [], made, 0, local, busy or local)


@pytest.mark.parametrize(
    ("joined", "cores", "threads"),
    [
        pytest.param(mesh([TEN_GBIT]), 8, 1, id="one port of 10 Gbit/s"),
        pytest.param(mesh([TEN_GBIT, TEN_GBIT]), 8, 2, id="two"),
        pytest.param(mesh([TEN_GBIT, TEN_GBIT]), 2, 2, id="just enough cores"),
        pytest.param(mesh([TEN_GBIT, TEN_GBIT]), 1, 1, id="one core"),
        pytest.param(mesh([TEN_GBIT, TEN_GBIT], lanes=4), 8, 2, id="several lanes on a port"),
        pytest.param(mesh([TEN_GBIT], peers=8), 64, 1, id="several peers behind a port"),
        pytest.param(mesh([2.5 * TEN_GBIT]), 4, 2, id="one of 25 Gbit/s"),
        pytest.param(mesh([2.5 * TEN_GBIT], local=4), 64, 1, id="which four ranks share"),
        pytest.param(mesh([10 * TEN_GBIT], local=4), 64, 2, id="100 Gbit/s for four ranks"),
        pytest.param(mesh([10 * TEN_GBIT], local=4), 7, 1, id="on seven cores"),
        pytest.param(mesh([10 * TEN_GBIT], busy=8), 8, 1, id="other containers' ranks"),
        pytest.param(mesh([0.0, 0.0]), 8, 1, id="nothing is known"),
        pytest.param(mesh([], peers=0), 8, 1, id="a world of one"),
    ],
)
def test_what_is_chosen(joined: Mesh, cores: int, threads: int) -> None:
    assert choose_threads(joined, cores) == threads


@pytest.mark.parametrize(("threads", "used"), [(0, 1), (1, 1), (2, 2)])
def test_the_setting(threads: int, used: int) -> None:
    """The loopback's speed is not known, so it is one by itself."""
    with World(2, config=Config(timeout=30.0, threads=threads), engines="own") as world:
        assert [comm.stats()["threads"] for comm in world.comms] == [used, used]


def test_the_second_thread_costs_nothing_when_idle_and_goes() -> None:
    def body(comm: Communicator) -> None:
        comm.allreduce(np.ones(1 << 19, np.float32))

    before = set(os.listdir("/proc/self/task"))
    with World(2, config=Config(timeout=30.0, threads=2), engines="own") as world:
        world.run(body)

        def idles() -> bool:
            cpu = [comm.stats()["engine_cpu_s"] for comm in world.comms]
            time.sleep(0.3)
            used = [
                comm.stats()["engine_cpu_s"] - was
                for comm, was in zip(world.comms, cpu, strict=True)
            ]
            return max(used) < 0.015

        assert until(idles)  # who polls never does
    # the test's own threads take a moment to go
    assert until(lambda: set(os.listdir("/proc/self/task")) <= before)
