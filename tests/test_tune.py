"""All ranks follow rank 0's table, to the byte; and ``python -m ringcomm tune`` makes a good one.

That a table is followed shows in the bits, because a ring adds in another order than the others,
and in the bytes that a rank sends.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from ports import free_port
from ranks import World, run_processes
from reference import OPS, Array
from tensors import elements, same

from ringcomm import Communicator, Config
from ringcomm.__main__ import main
from ringcomm.bootstrap import tuned
from ringcomm.bootstrap.tuned import Cluster, Document, Measured, Row
from ringcomm.config import ALGORITHMS
from ringcomm.tools import costs, tuning
from ringcomm.tools.costs import Costs
from ringcomm.tools.tuning import Sample

pytestmark = pytest.mark.usefixtures("nothing_left")

#: Unlike the model in any world: it has direct or one-shot for little, and the ring for much.
ROWS = (
    (4, "one_shot"),
    (4000, "ring"),
    (4001, "auto"),
    (9000, "direct"),
    (40_000, "one_shot"),
    (100_000, "ring"),
    (1 << 40, "direct"),
)
#: In elements; of float32 they lie on both sides of each bound.
COUNTS = (0, 1, 2, 999, 1000, 1001, 2250, 2251, 10_000, 10_001, 25_000, 25_001, 70_001)


def cluster(n: int) -> Cluster:
    """That of a world on the loopback."""
    return Cluster((0,) * n, (("lo",),) * n, ("host",) * n)


def table_file(path: Path, n: int, rows: reference.Table = ROWS, memory: bool = False) -> str:
    made = tuple(itertools.starmap(Row, rows))
    Document(cluster(n), made, memory, (), "0.1.0", "today").write(str(path))
    return str(path)


def followed(comm: Communicator, table: reference.Table) -> None:
    """All-reduces of every size come out and cost as by the table."""
    n, rank = comm.world_size, comm.rank
    for count in COUNTS:
        before = comm.stats()["payload_bytes"]
        ours = comm.allreduce(elements("f32", count, rank))
        sent = comm.stats()["payload_bytes"] - before
        inputs = [elements("f32", count, r) for r in range(n)]
        assert same(ours, reference.allreduce(inputs, "f32", "sum", table=table)), count
        assert sent == reference.allreduce_payload(count, n, rank, 4, table), count


def links_only(**settings: Any) -> Config:
    """What goes through memory is none of a table's business."""
    return Config(timeout=30.0, shared_memory=False, **settings)


def test_the_bits_tell_tables_apart() -> None:
    """Or the tests below would show nothing."""
    inputs = [elements("f32", 1000, rank) for rank in range(4)]
    results = [
        reference.allreduce(inputs, "f32", "sum", table=((10**6, name),))
        for name in ("ring", "direct", "auto")
    ]
    assert not same(results[0], results[1])
    assert not same(results[0], results[2])


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_rank_follows_the_table(n: int, tmp_path: Path) -> None:
    path = table_file(tmp_path / "t.json", n)
    with World(n, bring_up="tcp", config=links_only(tune_table=path)) as world:
        assert [comm.algorithms for comm in world.comms] == [f"table {path}"] * n
        world.run(lambda comm: followed(comm, ROWS))


def test_rank_0_decides(tmp_path: Path) -> None:
    """The other ranks' tables count for nothing, good, bad or none."""
    good = table_file(tmp_path / "good.json", 4)
    other = table_file(tmp_path / "other.json", 4, ((1 << 40, "ring"),))
    for first, table in ((good, ROWS), ("off", ())):
        paths = (first, other, "off", str(tmp_path / "nothing"))
        address = f"tcp://127.0.0.1:{free_port()}"
        configs = [links_only(tune_table=path, interfaces=("lo",)) for path in paths]

        def rank(
            number: int, config: Config, address: str = address, table: reference.Table = table
        ) -> str:
            with Communicator.create(number, 4, init_method=address, config=config) as comm:
                followed(comm, table)
                return comm.algorithms

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            said = list(pool.map(rank, range(4), configs))
        assert said == ["model" if first == "off" else f"table {first}"] * 4


def test_an_algorithm_that_is_set_wins(tmp_path: Path) -> None:
    path = table_file(tmp_path / "t.json", 3)
    config = links_only(tune_table=path, algorithm="direct")
    with World(3, bring_up="tcp", config=config) as world:
        assert [comm.algorithms for comm in world.comms] == ["direct"] * 3
        world.run(lambda comm: followed(comm, ((1 << 40, "direct"),)))


def test_a_table_of_another_world_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = links_only(tune_table=table_file(tmp_path / "t.json", 4))
    with World(3, bring_up="tcp", config=config) as world:
        assert [comm.algorithms for comm in world.comms] == ["model"] * 3
        world.run(lambda comm: followed(comm, ()))
    assert len([r for r in caplog.records if "world_size was 4 and is 3" in r.getMessage()]) == 1


def test_only_the_whole_world_splits_off_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = links_only(tune_table=table_file(tmp_path / "t.json", 4))

    def split(comm: Communicator) -> tuple[str, str, str]:
        said = []
        for color, key, table in ((0, 0, ROWS), (comm.rank % 2, 0, ()), (0, -comm.rank, ())):
            part = comm.split(color, key)
            assert part is not None
            with part:
                said.append(part.algorithms.split(" ")[0])
                followed(part, table)
        return said[0], said[1], said[2]

    with World(4, bring_up="tcp", config=config) as world:
        assert world.run(split) == [("table", "model", "model")] * 4
    assert not [record for record in caplog.records if "ignored" in record.getMessage()]


@pytest.mark.parametrize("memory", [False, True], ids=["links", "memory"])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_reference_under_a_table(n: int, memory: bool, tmp_path: Path) -> None:
    """Every dtype, op and codec at sizes around the bounds, in place and with all in flight. The
    bounds are of bytes on the wire, so a codec moves them."""
    path = table_file(tmp_path / "t.json", n, memory=memory)
    kinds = [(d, o, "none") for d in ("f16", "f32", "f64", "i8", "i64") for o in OPS]
    kinds += [("f32", "sum", "bf16"), ("f64", "avg", "fp16"), ("f32", "max", "fp16")]
    cases = [(kind, count) for kind in kinds for count in (1, 500, 501, 2000, 4500, 20_001)]

    def body(comm: Communicator) -> list[Array]:
        works = [
            comm.allreduce(
                elements(dtype, count, comm.rank),
                op,
                async_op=True,
                compression=None if codec == "none" else codec,
            )
            for (dtype, op, codec), count in cases
        ]
        return [work.wait() for work in works]

    config = Config(tune_table=path, timeout=30.0, segment_bytes=4096, shared_memory=memory)
    with World(n, bring_up="tcp", lanes=2, config=config) as world:
        results = world.run(body)
    for index, ((dtype, op, codec), count) in enumerate(cases):
        inputs = [elements(dtype, count, rank) for rank in range(n)]
        shared = n if memory else 0
        expected = reference.allreduce(inputs, dtype, op, codec, memory=shared, table=ROWS)
        assert all(same(of_rank[index], expected) for of_rank in results), (dtype, op, codec, count)


# ---- what tune concludes ----


def sample(model: list[float], other: list[float]) -> Sample:
    return Sample(1024, {"auto": model, "ring": other})


def test_only_what_is_clearly_faster_is_chosen() -> None:
    even = [1.0] * 8
    assert sample(even, [0.9] * 8).choice() == "ring"
    assert sample(even, [0.97] * 8).choice() == "auto"  # too little
    assert sample(even, [0.9] * 5 + [1.2] * 3).choice() == "auto"  # too often slower
    assert sample(even, [0.5] * 2).choice() == "auto"  # dropped as hopeless
    assert sample(even, [1.1] * 8).choice() == "auto"
    drifting = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]  # the machine is busier each round
    assert sample(drifting, [0.9 * t for t in drifting]).choice() == "ring"
    three = Sample(64, {"auto": even, "ring": [0.8] * 8, "direct": [0.7] * 8})
    assert three.choice() == "direct"


def test_rows_reach_as_far_as_was_measured() -> None:
    assert tuning.rows([]) == []
    assert tuning.rows([(1024, "auto"), (2048, "auto")]) == []
    assert tuning.rows([(1024, "ring"), (4096, "ring")]) == [Row(4096, "ring")]
    assert tuning.rows([(1024, "ring"), (4096, "auto")]) == [Row(1024, "ring")]
    assert tuning.rows([(1024, "ring"), (4096, "direct")]) == [
        Row(2048, "ring"),
        Row(4096, "direct"),
    ]
    assert tuning.rows([(1024, "auto"), (4096, "direct"), (16384, "auto"), (65536, "ring")]) == [
        Row(4095, "auto"),
        Row(4096, "direct"),
        Row(65535, "auto"),
        Row(65536, "ring"),
    ]
    most = tuning.rows([(1 << i, ("ring", "direct")[i % 2]) for i in range(62)])
    assert len(most) <= tuned.MAX_ROWS
    assert most == sorted(most, key=lambda row: row.up_to)


def test_the_change_is_looked_at_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice half-way between two sizes with different choices: here the ring wins up to 3000 B."""

    def made(_comm: object, _contenders: object, at: list[int], _seconds: float) -> list[Sample]:
        return [Sample(n, {"auto": [1.0] * 8, "ring": [0.5 if n <= 3000 else 2.0] * 8}) for n in at]

    monkeypatch.setattr(tuning, "measure", made)
    world: Any = None
    found = tuning.measure_closely(world, {}, [1024, 2048, 4096, 8192], 1.0)
    assert [one.bytes for one in found] == [1024, 2048, 4096, 8192, 2896, 3444]


def test_the_model_s_constants_are_those_of_the_core() -> None:
    source = (Path(__file__).parents[1] / "csrc" / "plan" / "choose.c").read_text("utf-8")
    found = {
        name: float(value)
        for name, value in re.findall(r"^#define (\w+) ([\d.e]+)$", source, re.MULTILINE)
    }
    assert costs.MODEL.hop == pytest.approx(found["HOP_NS"] * 1e-9)
    assert costs.MODEL.message == pytest.approx(found["MESSAGE_NS"] * 1e-9)
    assert 1 / costs.MODEL.byte == pytest.approx(found["BYTES_PER_NS"] * 1e9)


@pytest.mark.parametrize("n", [2, 3, 4, 6, 8, 13])
def test_constants_are_found_again(n: int) -> None:
    """In times of their own, and nearly so where each is off by a tenth."""
    priced = Costs(12e-6, 3e-6, 1e-9)
    names = [name for name in ALGORITHMS if name != "auto"]
    draw = np.random.default_rng(n)

    def seconds(name: str, size: int) -> float:
        hops, messages, count = costs.counts(name, n, size)
        return hops * priced.hop + messages * priced.message + count * priced.byte

    for noise in (0.0, 0.1):
        times = [
            Measured(
                size,
                {name: seconds(name, size) * (1 + noise * draw.uniform(-1, 1)) for name in names}
                | {"auto": 1.0},
                "auto",
            )
            for size in (1 << i for i in range(10, 25))
        ]
        found, wrong = costs.fit(times, n) or (costs.MODEL, 1.0)
        assert found.hop == pytest.approx(priced.hop, rel=noise + 1e-6)
        assert found.byte == pytest.approx(priced.byte, rel=noise + 1e-6)
        assert n == 2 or found.message == pytest.approx(priced.message, rel=3 * noise + 1e-6)
        assert wrong <= noise + 1e-6


def test_times_of_another_kind_fit_no_constants() -> None:
    """A ring that is as fast with one byte as with a million; and too few."""
    assert costs.fit([Measured(1024, {"ring": 1e-3, "direct": 1e-3}, "auto")], 4) is None
    falling = [Measured(1 << i, {"ring": 2.0**-i, "direct": 2.0**-i}, "auto") for i in range(10)]
    assert costs.fit(falling, 4) is None
    assert costs.line(falling, 4).endswith("these times fit no such model")


def test_a_table_says_what_fits_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = tuple(
        Measured(1 << i, {"ring": 60e-6 + 2e-9 * 2**i, "one_shot": 30e-6 + 2e-9 * 2**i}, "auto")
        for i in range(10, 15)
    )
    path = str(tmp_path / "table.json")
    for memory in (False, True):
        Document(cluster(2), (), memory, times, "0.1.0", "today").write(path)
        assert main(["tune", "--show", path]) == 0
        shown = capsys.readouterr().out
        assert (
            "the model has 50 us a hop, 117 MB/s; these times fit 30 us a hop, 500 MB/s, "
            "within 0% in the median" in shown
        ) == (not memory)


def test_counts_are_the_core_s() -> None:
    """Hops and bytes as a world of that size has them (docs/DESIGN.md, Algorithms)."""
    assert costs.counts("doubling", 6, 100) == (4, 0, 400)  # two exchanges, and to and fro
    assert costs.counts("doubling", 8, 100) == (3, 0, 300)
    assert costs.counts("halving", 6, 600) == (6, 0, 1000)
    assert costs.counts("one_shot", 2, 100) == (1, 0, 100)
    assert costs.counts("direct", 5, 100) == (2, 6, 160)


def test_sizes_are_powers_of_two() -> None:
    assert tuning.sizes(1000, 5000) == [1024, 2048, 4096]
    assert tuning.sizes(0, 16) == [4, 8, 16]
    assert tuning.sizes(5, 7) == []
    table = [Row(2, "ring"), Row(2049, "direct"), Row(1 << 40, "ring")]
    assert tuning.with_edges([1024, 2048, 4096], table) == [1024, 2048, 2052, 4096]


def test_every_algorithm_is_measured_and_switched_to(tmp_path: Path) -> None:
    contenders = tuning.algorithms()
    assert set(contenders) == set(tuned.ALGORITHMS)

    def body(comm: Communicator) -> list[Sample]:
        for name, rows in contenders.items():
            comm._follow(rows)
            comm.barrier()
            followed(comm, tuple((row.up_to, name) for row in rows))
        return list(tuning.measure(comm, contenders, [1024, 8192], 0.02))

    with World(3, config=Config(timeout=30.0)) as world:
        found = world.run(body)
    assert found[0] == found[1] == found[2]  # all ranks draw the same conclusions
    assert all(len(one.seconds["auto"]) >= 7 for one in found[0])
    assert all(t > 0 for one in found[0] for times in one.seconds.values() for t in times)


# ---- the command ----

COMMAND = "import sys; from ringcomm.__main__ import main; sys.exit(main(['tune', *{}]))"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "made.json"
    arguments = ["--largest", "4K", "--seconds", "0.05", "--output", str(path)]
    first, second = run_processes(2, COMMAND.format(arguments))
    assert "4 KiB" in first.stdout
    assert f"wrote {path}" in first.stdout
    assert second.stdout == ""
    fields = json.loads(path.read_text())
    measured = [size["bytes"] for size in fields["measured"]]
    assert {1024, 2048, 4096} <= set(measured)
    assert measured == sorted(measured)
    assert set(fields["measured"][0]["seconds"]) == set(tuned.ALGORITHMS)
    assert main(["tune", "--show", str(path)]) == 0
    assert "2 ranks, per host 2; ports lo" in capsys.readouterr().out

    check = ["--check", "--largest", "2K", "--seconds", "0.05"]
    found = run_processes(2, COMMAND.format(check), env={"RINGCOMM_TUNE_TABLE": str(path)})
    assert "table / model" in found[0].stdout
    assert str(path) in found[0].stdout
    found = run_processes(2, COMMAND.format(check), check=False)
    assert [one.returncode for one in found] == [1, 1]
    assert "no table is in use" in found[0].stdout


def test_a_later_job_finds_the_table_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["tune", "--show"]) == 0
    assert "no tables in" in capsys.readouterr().out
    run_processes(2, COMMAND.format(["--largest", "2K", "--seconds", "0.02"]))
    said = run_processes(2, "import ringcomm; print(ringcomm.init().algorithms)")
    (path,) = (tmp_path / "ringcomm").iterdir()
    assert [one.stdout.strip() for one in said] == [f"table {path}"] * 2
    assert main(["tune", "--show"]) == 0
    assert str(path) in capsys.readouterr().out
    found = dataclasses.asdict(tuned.read(str(path)))
    assert found["cluster"]["hosts"] == (0, 0)


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["tune"], 1, "one rank has nothing to tune"),
        (["tune", "--smallest", "5", "--largest", "6"], 1, "power of two"),
        (["tune", "--seconds", "0"], 1, "--seconds above 0"),
        (["tune", "--show", "/nonexistent"], 1, "cannot be read"),
        (["tune", "--show", "/dev/null"], 1, "no regular file"),
    ],
)
def test_what_the_command_refuses(
    arguments: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == status
    assert says in capsys.readouterr().err


def test_sizes_as_people_write_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["tune", "--largest", "lots"])
    assert "'lots' is no size" in capsys.readouterr().err


def test_measured_times_are_medians_of_the_slowest_rank() -> None:
    assert sample([3.0, 1.0, 2.0], [1.0, 1.0, 5.0]).measured() == Measured(
        1024, {"auto": 2.0, "ring": 1.0}, "auto"
    )
    assert np.isclose(sample([2.0, 4.0], [1.0, 4.0]).ratios("ring"), [0.5, 1.0]).all()
