"""torch's own stores as carriers of the exchange."""

from __future__ import annotations

import datetime
import time
from typing import Any

import pytest
from bringup_world import Outcome, run_ranks
from patience import PROMPT

from ringcomm.bootstrap.join_failure import JoinError
from ringcomm.bootstrap.rendezvous import StoreExchange

torch_distributed = pytest.importorskip("torch.distributed")

pytestmark = pytest.mark.torch


def gather_over(stores: list[Any], ranks: list[int], patience: float) -> dict[int, Outcome]:
    def call(rank: int) -> list[list[bytes]]:
        time.sleep(0.05 * rank)
        exchange = StoreExchange(stores[rank], rank, len(stores), prefix="test")
        return [
            exchange.allgather(f'{{"{number}":{rank}}}'.encode(), time.monotonic() + patience)
            for number in range(3)
        ]

    return run_ranks(call, ranks)


def tcp_stores(count: int) -> list[Any]:
    wait = datetime.timedelta(seconds=30)
    first = torch_distributed.TCPStore(
        "127.0.0.1", 0, count, is_master=True, timeout=wait, wait_for_workers=False
    )
    others = [
        torch_distributed.TCPStore("127.0.0.1", first.port, count, is_master=False, timeout=wait)
        for _ in range(count - 1)
    ]
    return [first, *others]


@pytest.mark.parametrize("kind", ["hash", "tcp", "prefix"])
def test_store(kind: str) -> None:
    if kind == "hash":
        stores = [torch_distributed.HashStore()] * 3
    else:
        stores = tcp_stores(3)
    if kind == "prefix":
        stores = [torch_distributed.PrefixStore("mine", store) for store in stores]
    for _ in range(3):  # the same store again, as by init, shutdown, init
        for outcome in gather_over(stores, [0, 1, 2], 30.0).values():
            assert outcome.error is None
            assert outcome.value == [
                [f'{{"{n}":{r}}}'.encode() for r in range(3)] for n in range(3)
            ]


@pytest.mark.parametrize("kind", ["hash", "tcp"])
def test_missing_rank(kind: str) -> None:
    stores = [torch_distributed.HashStore()] * 3 if kind == "hash" else tcp_stores(3)
    for outcome in gather_over(stores, [0, 2], 0.6).values():
        assert isinstance(outcome.error, JoinError)
        assert [row.rank for row in outcome.error.rows] == [1]
        assert outcome.seconds < 0.6 + PROMPT
