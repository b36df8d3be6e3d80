"""Every collective but all-reduce's arithmetic: results, roots, out=, split, counters.

Sums follow tests/reference.py bit for bit. Each test opens a world or several; where ranks matter,
the worlds are 1 (nothing moves), 2 (both neighbours are one rank), 3 (odd) and 5.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest
import reference
from patience import until
from ranks import World, run_ranks
from reference import OPS, Array
from tensors import elements, inputs, same

from ringcomm import Communicator, Config, TensorError
from ringcomm.core.native import lib

pytestmark = pytest.mark.usefixtures("nothing_left")

SIZES = (1, 2, 3, 5)
COUNTS = (0, 1, 7, 256, 5003)
HEADER_BYTES = 52
SMALL = Config(segment_bytes=4096, timeout=20.0)
QUIET = Config(segment_bytes=4096, timeout=20.0, heartbeat=30, peer_timeout=60)


def world(n: int, **options: Any) -> World:
    return World(n, config=options.pop("config", SMALL), **options)


# ---- results ----


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", ["f32", "u8", "i64"])
def test_broadcast_from_every_root(n: int, dtype: str, memory: bool) -> None:
    def body(comm: Communicator) -> None:
        for root, count in itertools.product(range(n), COUNTS):
            mine = elements(dtype, count, comm.rank)
            assert comm.broadcast(mine, root) is mine
            assert same(mine, elements(dtype, count, root))
        assert (comm.stats()["shared_bytes"] > 0) == shares

    shares = memory and n > 1
    with world(n, lanes=2, memory=n if shares else 0) as ranks:
        ranks.run(body)


@pytest.mark.parametrize("n", SIZES)
def test_allgather(n: int) -> None:
    def body(comm: Communicator) -> None:
        for count in COUNTS:
            mine = elements("f64", count, comm.rank).reshape(-1, 1)
            rows = comm.allgather(mine)
            assert rows.shape == (n, count, 1)
            assert same(rows, reference.allgather(inputs("f64", count, n), "f64"))
            assert same(mine, elements("f64", count, comm.rank))

    with world(n) as ranks:
        ranks.run(body)


@pytest.mark.parametrize("n", SIZES)
def test_reduce_and_reduce_scatter(n: int) -> None:
    """Each dtype with each op, by turns at two counts and roots."""

    def body(comm: Communicator) -> None:
        kinds = itertools.product(("f32", "f16", "i32"), OPS)
        for turn, (dtype, op) in enumerate(kinds, start=n):
            for count in (COUNTS[turn % len(COUNTS)], COUNTS[(turn + 2) % len(COUNTS)]):
                parts = inputs(dtype, n * count, n)
                got = comm.reduce_scatter(parts[comm.rank].copy(), op)
                assert same(got, reference.reduce_scatter(parts, dtype, op)[comm.rank])
                whole, root = inputs(dtype, count, n), (turn + count) % n
                mine = whole[comm.rank].copy()
                assert comm.reduce(mine, root, op) is mine
                expected = reference.reduce(whole, dtype, op, root)
                assert same(mine, expected if comm.rank == root else whole[comm.rank])

    with world(n) as ranks:
        ranks.run(body)


@pytest.mark.parametrize("n", SIZES)
def test_gather_and_scatter_at_every_root(n: int) -> None:
    def body(comm: Communicator) -> None:
        for root, count in itertools.product(range(n), COUNTS):
            here = comm.rank == root
            gathered = comm.gather(elements("i32", count, comm.rank), root)
            if here:
                assert gathered.shape == (n, count)
                assert same(gathered, reference.allgather(inputs("i32", count, n), "i32"))
            else:
                assert gathered is None
            rows = elements("i32", n * count, root).reshape(n, count)
            of_this_shape = rows.copy() if here else np.zeros_like(rows)
            assert same(comm.scatter(of_this_shape, root), rows[comm.rank])
            out = np.zeros(count, np.int32)
            assert comm.scatter(rows if here else None, root, out=out) is out
            assert same(out, rows[comm.rank])

    with world(n) as ranks:
        ranks.run(body)


@pytest.mark.parametrize("n", SIZES)
def test_alltoall(n: int) -> None:
    def body(comm: Communicator) -> None:
        for count in COUNTS:
            parts = inputs("f32", n * count, n)
            got = comm.alltoall(parts[comm.rank].reshape(n, count))
            assert got.shape == (n, count)
            assert same(got, reference.alltoall(parts, "f32")[comm.rank])

    with world(n, rails=2) as ranks:
        ranks.run(body)


@pytest.mark.parametrize("codec", ["bf16", "fp16"])
@pytest.mark.parametrize("n", [1, 3])
def test_compressed_copies_are_equal_on_all_ranks(n: int, codec: str) -> None:
    """Also the rank that had the original keeps what the others decode. The core takes a codec
    with every collective; the Python methods other than allreduce do not offer it."""
    count = 5003

    def body(comm: Communicator) -> None:
        for dtype in ("f32", "f64"):
            all_inputs = inputs(dtype, count, n)
            mine = all_inputs[comm.rank].copy()
            view = comm._result(mine, comm_view(mine), mine.shape)
            comm.run_collective(lib.RC_BROADCAST, view, view, count, root=n - 1, compression=codec)
            wire = reference.Wire(dtype, "sum", codec, n)
            assert same(mine, wire.kept(all_inputs[n - 1]))
            rows = np.empty(n * count, mine.dtype)
            src, dst = comm_view(all_inputs[comm.rank]), comm_view(rows)
            comm.run_collective(lib.RC_ALLGATHER, src, dst, count, compression=codec)
            assert same(rows, reference.allgather(all_inputs, dtype, codec))

    with world(n) as ranks:
        ranks.run(body)


def comm_view(array: Array) -> Any:
    from ringcomm.core.faces import view

    return view(array, writable=True)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_send_and_recv_between_all_pairs(n: int) -> None:
    """Sends to one rank keep their order, whatever their sizes and whoever else sends."""

    def body(comm: Communicator) -> None:
        for count in (1, 0, 40000, 3):
            works = []
            for step in range(1, n):
                peer = (comm.rank + step) % n
                works.append(
                    comm.send(elements("f32", count, comm.rank, salt=peer), peer, async_op=True)
                )
            for step in range(1, n):
                peer = (comm.rank - step) % n
                got = np.full(count, np.nan, np.float32)
                assert comm.recv(got, peer) is got
                assert same(got, elements("f32", count, peer, salt=comm.rank))
            for work in works:
                work.wait()

    with world(n, lanes=2) as ranks:
        ranks.run(body)


def test_barrier_holds_everyone_until_the_last() -> None:
    arrived: list[int] = []

    def body(comm: Communicator) -> int:
        if comm.rank == 2:
            time.sleep(0.2)
        arrived.append(comm.rank)
        comm.barrier()
        return len(arrived)

    assert run_ranks(4, body) == [4, 4, 4, 4]


def test_a_world_of_one_answers_at_once() -> None:
    def body(comm: Communicator) -> None:
        x = np.arange(6.0)
        assert comm.allreduce(x, "avg", compression="bf16").tolist() == [0, 1, 2, 3, 4, 5]
        assert comm.allgather(x).shape == (1, 6)
        assert comm.reduce_scatter(x).tolist() == x.tolist()
        assert comm.alltoall(x).tolist() == x.tolist()
        assert comm.gather(x).shape == (1, 6)
        assert comm.scatter(x.reshape(1, 6)).tolist() == x.tolist()
        assert comm.barrier() is None
        work = comm.allreduce(np.ones(2), async_op=True)
        assert work.done()
        assert work.wait().tolist() == [1, 1]

    run_ranks(1, body)


# ---- out= ----


def test_out_takes_the_result_and_the_input_stays() -> None:
    def body(comm: Communicator) -> None:
        n, rank = comm.world_size, comm.rank
        x, before = elements("f32", 6, rank), elements("f32", 6, rank)
        ins = inputs("f32", 6, n)
        for call, expected in [
            (lambda out: comm.allreduce(x, out=out), reference.allreduce(ins, "f32", "sum")),
            (lambda out: comm.allgather(x, out=out), reference.allgather(ins, "f32")),
            (lambda out: comm.alltoall(x, out=out), reference.alltoall(ins, "f32")[rank]),
            (
                lambda out: comm.reduce_scatter(x, out=out),
                reference.reduce_scatter(ins, "f32", "sum")[rank],
            ),
        ]:
            out = np.full(len(expected), np.nan, np.float32)
            assert call(out) is out
            assert same(out, expected)
            assert same(x, before)
            too_small = np.zeros(len(expected) - 1, np.float32)
            with pytest.raises(TensorError, match="out is f32"):
                call(too_small)
            with pytest.raises(TensorError, match="out is f64"):
                call(out.astype(np.float64))
        out = np.zeros((n, 6), np.float32)
        for root in range(n):
            got = comm.gather(x, root, out=out if rank == root else None)
            assert got is (out if rank == root else None)
            total = np.zeros(6, np.float32)
            got = comm.reduce(x, root, out=total if rank == root else None)
            assert got is (total if rank == root else x)
            assert same(x, before)
        assert same(out, reference.allgather(ins, "f32"))

    run_ranks(3, body)


def test_out_of_another_shape_is_filled_in_its_order() -> None:
    def body(comm: Communicator) -> None:
        out = np.zeros((3, 2))
        comm.allreduce(np.arange(6.0), out=out)
        assert out.tolist() == [[0, 2], [4, 6], [8, 10]]

    run_ranks(2, body)


# ---- split ----


def test_split_by_color_and_key() -> None:
    def body(comm: Communicator) -> None:
        part = comm.split(comm.rank % 2, key=-comm.rank)
        assert part is not None
        members = sorted((r for r in range(5) if r % 2 == comm.rank % 2), reverse=True)
        assert (part.rank, part.world_size) == (members.index(comm.rank), len(members))
        with part:
            assert part.allgather(np.array([comm.rank])).ravel().tolist() == members
            assert part.allreduce(np.array([1.0]))[0] == len(members)
        comm.barrier()

    run_ranks(5, body)


def test_split_of_none_of_one_and_of_a_split() -> None:
    def body(comm: Communicator) -> None:
        half = comm.split(None if comm.rank == 3 else 7)
        assert (half is None) == (comm.rank == 3)
        if half is not None:
            assert half.world_size == 3
            pair = half.split(0 if half.rank < 2 else 1)
            assert pair is not None
            assert pair.world_size == (2 if half.rank < 2 else 1)
            assert pair.allreduce(np.ones(1))[0] == pair.world_size
            both = [comm.allreduce(np.ones(9), async_op=True) for comm in (pair, half)]
            assert [work.wait()[0] for work in both] == [pair.world_size, 3]
            pair.close()
            assert half.allreduce(np.ones(1))[0] == 3
            half.close()
        alone = comm.split(comm.rank)
        assert alone is not None
        assert (alone.rank, alone.world_size) == (0, 1)
        alone.close()
        again = comm.split(0)
        assert again is not None
        assert (again.rank, again.world_size) == (comm.rank, 4)
        again.close()

    run_ranks(4, body)


def test_a_split_keeps_lanes_and_rails() -> None:
    def body(comm: Communicator) -> None:
        part = comm.split(0 if comm.rank < 2 else None)
        if part is not None:
            with part:
                assert len(part.stats()["lanes"]) == 4
                assert part.allreduce(np.ones(10))[0] == 2

    with World(3, lanes=2, rails=2, bring_up="tcp") as ranks:
        ranks.run(body)


# ---- counters ----


@pytest.mark.parametrize("n", [2, 3, 5, 6, 8])
@pytest.mark.parametrize(("dtype", "codec"), [("f32", "none"), ("f64", "bf16"), ("u8", "none")])
def test_bytes_on_the_wire_are_what_the_plan_says(n: int, dtype: str, codec: str) -> None:
    """Payload: exactly every chunk on each of its hops. Wire: that, and a header per frame."""
    counts = (1, 257, 30_000)

    def body(comm: Communicator) -> None:
        compression = None if codec == "none" else codec
        for count in counts:
            comm.allreduce(elements(dtype, count, comm.rank), compression=compression)
        stats = comm.stats()
        item = reference.wire_bytes(dtype, codec)
        payload = sum(reference.allreduce_payload(count, n, comm.rank, item) for count in counts)
        assert stats["works"] == len(counts)
        assert stats["payload_bytes"] == payload
        frames = sum(lane["sent_frames"] for lane in stats["lanes"])
        assert stats["wire_bytes"] == payload + HEADER_BYTES * frames
        assert stats["wire_bytes"] == sum(lane["sent_bytes"] for lane in stats["lanes"])
        comm.barrier()
        assert comm.stats()["engine_cpu_s"] >= 0.0

    run_ranks(n, body, config=QUIET)


def test_rails_are_the_sums_of_their_lanes() -> None:
    def body(comm: Communicator) -> dict[str, Any]:
        comm.barrier()
        before = comm.stats()["waiting_s"]
        if comm.rank == 1:  # comes when the other has waited for it
            assert until(lambda: comm.stats()["waiting_s"] >= before + 0.08)
        comm.allreduce(np.ones(100_000))
        return comm.stats()

    for stats in run_ranks(2, body, lanes=2, rails=2, config=QUIET):
        assert [(one["rail"], one["interface"]) for one in stats["rails"]] == [(0, "lo"), (1, "lo")]
        for rail in stats["rails"]:
            lanes = [lane for lane in stats["lanes"] if lane["rail"] == rail["rail"]]
            for name in ("sent_bytes", "received_bytes", "retransmits"):
                assert rail[name] == sum(lane[name] for lane in lanes)
        assert sum(rail["share"] for rail in stats["rails"]) == pytest.approx(1.0)
        assert all(0 < lane["rtt_s"] < 1 for lane in stats["lanes"])


def test_what_is_sent_is_received() -> None:
    def body(comm: Communicator) -> None:
        comm.allreduce(np.ones(100_000))
        comm.barrier()

    with World(3, lanes=2, config=QUIET) as ranks:

        def ends() -> list[tuple[dict[str, Any], dict[str, Any]]]:
            """Both of every lane."""
            lanes = {
                (comm.rank, lane["peer"], lane["lane"]): lane
                for comm in ranks.comms
                for lane in comm.stats()["lanes"]
            }
            return [(here, lanes[peer, me, lane]) for (me, peer, lane), here in lanes.items()]

        def is_all_in() -> bool:
            return all(
                here["sent_bytes"] == there["received_bytes"]
                and here["sent_frames"] == there["received_frames"]
                for here, there in ends()
            )

        ranks.run(body)
        assert until(is_all_in), ends()  # the last acknowledgements of calls, too
        assert any(here["sent_frames"] > 0 for here, _ in ends())
