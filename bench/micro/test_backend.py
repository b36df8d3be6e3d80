"""An all-reduce of torch.distributed between two ranks of this host, by backend "ringcomm" and by
"gloo" in turn."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ringcomm.torch")
dist = torch.distributed

OTHER_RANK = """
import sys, torch, ringcomm.torch
from torch import distributed as dist
dist.init_process_group(sys.argv[1], sys.argv[2], rank=1, world_size=2)
count = torch.zeros(1, dtype=torch.int64)
while dist.broadcast(count, 0) or count:
    tensor = torch.zeros(int(count))
    while not tensor[0]:  # rank 0 ends with ones
        dist.all_reduce(tensor)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module", params=["ringcomm", "gloo"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """This process is rank 0; rank 1 is one that makes the same calls."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-c", OTHER_RANK, request.param, address]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        other = subprocess.Popen(command)
        try:
            dist.init_process_group(request.param, address, rank=0, world_size=2)
            try:
                yield request.param
                dist.broadcast(torch.tensor([0]), 0)
            finally:
                dist.destroy_process_group()
            assert other.wait(60) == 0
        finally:
            other.kill()
            other.wait()


@pytest.mark.parametrize("size", [4 << 10, 64 << 10, 1 << 20, 16 << 20])
def test_all_reduce(measure: Callable[..., Any], backend: str, size: int) -> None:
    tensor = torch.zeros(size // 4)
    name = f"all_reduce by backend {backend}, 2 ranks, {size >> 10} KiB"
    dist.broadcast(torch.tensor([size // 4]), 0)
    measure(name, lambda: dist.all_reduce(tensor), 1, size)
    dist.all_reduce(torch.ones(size // 4))
