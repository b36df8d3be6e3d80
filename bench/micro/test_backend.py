"""An all-reduce between two ranks of this host, by ``ringcomm.allreduce``, torch.distributed's
backend "ringcomm" and "gloo", by turns; and what a call of the backends costs in a world of one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
ringcomm = pytest.importorskip("ringcomm")
pytest.importorskip("ringcomm.torch")
dist = torch.distributed

BACKENDS = ("ringcomm", "gloo")
WAYS = ("ringcomm.allreduce", *(f"backend {name}" for name in BACKENDS))
TURNS = 3


def open_ways(store: Any, rank: int) -> list[Callable[[Any], Any]]:
    """Joins two ranks; returns what all-reduces a tensor in each of WAYS."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    group: Any = dist.new_group(backend="ringcomm")
    return [
        lambda x: ringcomm.allreduce(x, comm=group.comm),
        lambda x: dist.all_reduce(x, group=group),
        dist.all_reduce,
    ]


def be_rank_1(port: int) -> None:
    """Makes the calls of rank 0, which ends a measurement with ones, and the last with none."""
    ways = open_ways(dist.TCPStore("127.0.0.1", port), 1)
    order = torch.zeros(2, dtype=torch.int64)
    while dist.broadcast(order, 0) or order[1]:
        tensor = torch.zeros(int(order[1]))
        while not tensor[0]:
            ways[order[0]](tensor)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ways() -> Iterator[list[Callable[[Any], Any]]]:
    """Runs rank 1 beside this process, which is rank 0."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        other = subprocess.Popen([sys.executable, __file__, str(store.port)])
        try:
            ways = open_ways(store, 0)
            try:
                yield ways
                dist.broadcast(torch.tensor([0, 0]), 0)
            finally:
                dist.destroy_process_group()
            assert other.wait(60) == 0
        finally:
            other.kill()
            other.wait()


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_reduce_alone(measure: Callable[..., Any], backend: str) -> None:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    tensor = torch.zeros(1024)
    measure(f"all_reduce by backend {backend}, world of 1", lambda: dist.all_reduce(tensor))
    dist.destroy_process_group()


@pytest.mark.parametrize("way", range(len(WAYS)), ids=WAYS)
@pytest.mark.parametrize("turn", range(TURNS))
@pytest.mark.parametrize("size", [4 << 10, 64 << 10, 1 << 20, 16 << 20])
def test_all_reduce(
    measure: Callable[..., Any], ways: list[Callable[[Any], Any]], size: int, turn: int, way: int
) -> None:
    tensor, call = torch.zeros(size // 4), ways[way]
    dist.broadcast(torch.tensor([way, size // 4]), 0)
    measure(f"{WAYS[way]}, 2 ranks, {size >> 10} KiB, turn {turn}", lambda: call(tensor), 1, size)
    call(torch.ones(size // 4))


if __name__ == "__main__":
    be_rank_1(int(sys.argv[1]))
