"""The sweep: its options, the closed form that judges results, the floor, and one run of it all."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from patience import PATIENCE

BENCH = Path(__file__).resolve().parent.parent / "bench"
sys.path.insert(0, str(BENCH))

from libraries.peer import DTYPES, OPS, Call, What  # noqa: E402
from measure import closed_form, floor, timing  # noqa: E402
from measure.options import parse_sizes  # noqa: E402
from report.table import add_ratios, verdicts  # noqa: E402

# --- options ---


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4", [4]),
        ("4K,1MB,1.5KiB", [4096, 1_000_000, 1536]),
        ("4:64", [4, 16, 64]),
        ("4:20:2", [4, 8, 16, 20]),
        ("64M:64M", [64 << 20]),
    ],
)
def test_sizes(text: str, sizes: list[int]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "x", "4Q", "-1", "8:4", "4:8:1", "4:8:2:2", "0:8", "4:8:x"])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_sizes(text)


# --- the closed form ---


def bf16(values: np.ndarray) -> np.ndarray:
    """Rounded to bf16, by truncation: changes every value that bf16 cannot hold."""
    return (values.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", [1, 3, 16])
def test_every_partial_result_is_exact(world: int, op: str) -> None:
    for dtype in DTYPES:
        partial_results_are_exact(world, op, dtype)


def partial_results_are_exact(world: int, op: str, dtype: str) -> None:
    inputs = [closed_form.pattern(rank, world, op, dtype) for rank in range(world)]
    want = closed_form.expected(world, op, dtype)
    combine = {"min": np.minimum, "max": np.maximum, "prod": np.multiply}.get(op, np.add)
    total = np.zeros(closed_form.PERIOD) + inputs[0]
    for values in inputs[1:]:
        combine(total, values, out=total)
        kept = closed_form.tile(total, total.size, dtype)
        assert np.array_equal(kept, total)
        if dtype[0] not in "iu":
            assert np.array_equal(bf16(total), total)
    result = total / world if op == "avg" else total
    assert np.array_equal(result, want)
    assert np.array_equal(closed_form.tile(want, want.size, dtype), want)


def test_wrong_elements_are_counted() -> None:
    want = closed_form.expected(4, "sum", "f32")
    good = closed_form.tile(want, 200_000, "f32")
    assert closed_form.count_wrong(good, want, 0, "sum") == 0
    assert closed_form.count_wrong(good[70_000:], want, 70_000, "sum") == 0
    for index, value in ((0, np.nan), (65_537, 100.0), (199_999, good[199_999] + 2e-7)):
        bad = good.copy()
        bad[index] = value
        changed = int(bad[index] != good[index])
        assert closed_form.count_wrong(bad, want, 0, "sum") == changed
    swapped = good.reshape(-1, 50_000)[[0, 2, 1, 3]].reshape(-1)
    assert closed_form.count_wrong(swapped, want, 0, "sum") > 50_000


# --- figures ---


def test_bandwidths_as_defined() -> None:
    assert timing.busbw_factor("allreduce", 4) == 1.5
    assert timing.busbw_factor("allgather", 4) == 0.75
    assert timing.busbw_factor("broadcast", 4) == 1.0
    assert timing.sent_factor("broadcast", 4) == 0.75
    assert timing.element_count(What("allreduce", "sum", "f64"), 4, 3) == 1
    assert timing.element_count(What("allgather", "sum", "f32"), 1000, 3) == 249


def _row(library: str, compression: str, time_us: float, size: int = 4_194_304) -> timing.Row:
    algbw = size / time_us / 1e3
    return timing.Row(
        size,
        size // 4,
        "f32",
        "sum",
        library,
        compression,
        6,
        time_us,
        time_us,
        algbw,
        algbw,
        None,
        0,
        0.1,
        0.0,
    )


def test_verdicts_follow_from_the_rows() -> None:
    rows = [
        _row("ringcomm", "none", 1000.0),
        _row("ringcomm", "bf16", 500.0),
        _row("gloo", "none", 1500.0),
        _row("ringcomm", "none", 1.0, 4096),
    ]
    add_ratios(rows[:3], "ringcomm")
    assert rows[0].ratios == {"gloo": 1.5}
    assert rows[2].ratios == {}
    bare = floor.Floor(("eth0",), (8.388608,), 8.388608, "cubic", 0.3)
    text = "\n".join(verdicts(rows, bare))
    assert "ringcomm none: busbw 4.1943 GB/s = 50.0 % of the floor" in text
    assert "ringcomm bf16: algbw 8.3886 GB/s = 2.00 x uncompressed" in text
    assert "4096 B" not in text


@pytest.mark.parametrize(
    ("lost", "counts", "made"),
    [
        ([0.0, 9.0], 0, 1),  # nothing was taken away: once
        ([0.3, 0.0, 9.0], 1, 2),
        ([0.3, 0.1, 0.2], 1, 3),  # then its time is up
    ],
)
def test_rounds_that_the_host_disturbed_are_made_again(
    monkeypatch: pytest.MonkeyPatch, lost: list[float], counts: int, made: int
) -> None:
    clock = iter([0.0, 0.0, 99.0])
    monkeypatch.setattr(timing.time, "monotonic", lambda: next(clock))
    takes = [[timing._Timing([number], stolen_s=each)] for number, each in enumerate(lost)]
    left = iter(takes)
    alone = Together(0, [None], threading.Barrier(1))
    assert timing._undisturbed(lambda: next(left), alone, 50.0) is takes[counts]
    assert len(list(left)) == len(lost) - made


# --- the floor ---


class Together:
    """Two ranks as threads of this process."""

    world = 2

    def __init__(self, rank: int, shared: list[np.ndarray | None], gate: threading.Barrier) -> None:
        self.rank, self._shared, self._gate = rank, shared, gate

    def barrier(self) -> None:
        self._gate.wait(PATIENCE)

    def gather(self, values: np.ndarray) -> np.ndarray:
        self._shared[self.rank] = values
        self.barrier()
        rows = np.stack([row for row in self._shared if row is not None])
        self.barrier()
        return rows


def _floors(rails: list[list[tuple[str, str]]]) -> list[object]:
    shared: list[np.ndarray | None] = [None, None]
    gate = threading.Barrier(2)
    results: list[object] = [None, None]

    def run(rank: int) -> None:
        try:
            results[rank] = floor.measure_floor(Together(rank, shared, gate), rails[rank], 0.3)
        except floor.FloorError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_floor_is_the_same_on_all_ranks() -> None:
    rails = [("lo", "127.0.0.1"), ("lo", "127.0.0.2")]
    left, right = _floors([rails, rails])
    assert isinstance(left, floor.Floor)
    assert left == right
    assert all(rate > 0.001 for rate in left.gbps)
    assert left.total >= sum(left.gbps) * 0.999


def test_floor_without_ports_is_none_and_with_a_wrong_one_an_error_on_all() -> None:
    assert _floors([[("lo", "127.0.0.1")], []]) == [None, None]
    broken = _floors([[("lo", "127.0.0.1")], [("lo", "192.0.2.1")]])
    assert all("could not be measured: rank 1" in str(error) for error in broken)


# --- all of it ---


def _run_sweep(*options: str, world: int = 2) -> list[tuple[int, str]]:
    """Exit code and output of every rank of a sweep on the loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        **os.environ,
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(BENCH / "sweep.py"), *options],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    ends = [(rank.communicate(timeout=PATIENCE)[0], rank.returncode) for rank in ranks]
    return [(code, text) for text, code in ends]


def test_sweep_of_allreduce(tmp_path: Path) -> None:
    """Of codecs with feedback, what they deliver, the last call besides, is all that was put in."""
    document = tmp_path / "out.json"
    (code, text), (other_code, other_text) = _run_sweep(
        "--sizes",
        "4,40000,4MB",
        "--compression",
        "none,bf16,int4,onebit",
        "--iters",
        "3",
        "--floor",
        "0.2",
        "--json",
        str(document),
        "--against",
        "mpi",
    )
    assert (code, other_code, other_text) == (0, 0, ""), text + other_text
    assert "# mpi: skipped: an MPI job must be started by mpirun" in text
    assert "% of the floor" in text
    assert "x uncompressed" in text
    told = json.loads(document.read_text())
    assert told["world_size"] == 2
    assert told["floor_gbps"] > 0
    assert [(row["size"], row["compression"]) for row in told["rows"]] == [
        (size, codec)
        for size in (4, 40000, 4_000_000)
        for codec in ("none", "bf16", "int4", "onebit")
    ]
    for row in told["rows"]:
        assert row["wrong"] == 0
        assert row["time_us"] > 0
        if row["size"] == 4_000_000 and row["compression"] in ("none", "bf16"):
            halved = 0.5 if row["compression"] == "bf16" else 1.0
            assert row["wirebw"] == pytest.approx(row["busbw"] * halved, rel=0.02)


def test_a_lossy_result_that_is_wrong_is_counted() -> None:
    want = closed_form.tile(closed_form.expected(2, "sum", "f32"), 1000, "f32")
    alone = Together(0, [None], threading.Barrier(1))
    alone.world = 2
    lost = [want * 1.5, want * 1.5, want * 0.5, want * 0.5]  # rounded, and made good at the end

    def wrong(results: list[np.ndarray]) -> int:
        left = iter(results)
        call = Call(lambda: next(left), lambda _: None, lambda result: result, lambda: next(left))
        return timing._verify(What("allreduce", "sum", "f32", "int4"), call, want, alone)

    assert wrong(lost) == 0
    lost[3] = np.roll(lost[3], 1)
    assert wrong(lost) > 500


@pytest.mark.parametrize("collective", ["allgather", "reduce_scatter"])
def test_sweep_of_other_collectives(collective: str) -> None:
    """Of broadcast in test_results_collectives.py."""
    ends = _run_sweep(
        "--collective",
        collective,
        "--sizes",
        "1000,300000",
        "--iters",
        "2",
        "--floor",
        "0",
        world=3,
    )
    assert [code for code, _ in ends] == [0, 0, 0], ends
    assert "wrong elements: 0 of" in ends[0][1]
