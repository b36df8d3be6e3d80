"""An all-reduce of torch.distributed between two ranks of this host, by backend "ringcomm" and by
"gloo" in turn."""

from __future__ import annotations

import contextlib
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
backend, address, count = sys.argv[1:]
dist.init_process_group(backend, address, rank=1, world_size=2)
tensor = torch.zeros(int(count))
while not tensor[0]:  # rank 0 ends with ones
    dist.all_reduce(tensor)
dist.destroy_process_group()
"""


@contextlib.contextmanager
def pair(backend: str, count: int) -> Iterator[None]:
    """This process is rank 0; rank 1 is one that makes the same calls."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    other = subprocess.Popen([sys.executable, "-c", OTHER_RANK, backend, address, str(count)])
    try:
        dist.init_process_group(backend, address, rank=0, world_size=2)
        try:
            yield
            dist.all_reduce(torch.ones(count))
        finally:
            dist.destroy_process_group()
        assert other.wait(60) == 0
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("backend", ["ringcomm", "gloo"])
@pytest.mark.parametrize("size", [4 << 10, 64 << 10, 1 << 20, 16 << 20])
def test_all_reduce(
    measure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, backend: str, size: int
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with pair(backend, size // 4):
        tensor = torch.zeros(size // 4)
        name = f"all_reduce by backend {backend}, 2 ranks, {size >> 10} KiB"
        measure(name, lambda: dist.all_reduce(tensor), 1, size)
