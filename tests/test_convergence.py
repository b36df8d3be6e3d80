"""bench/convergence.py: statistics on made-up rows, the plan, rows, counter-examples, tiny runs."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

BENCH = Path(__file__).resolve().parent.parent / "bench"
sys.path.insert(0, str(BENCH))

import convergence  # noqa: E402
from report.rows import Rows  # noqa: E402
from training import claims, exact, link, pool, report, stats, worker  # noqa: E402
from training import plan as plans  # noqa: E402
from training.methods import INNER, METHODS  # noqa: E402

pytestmark = pytest.mark.torch
NONE = Path("none")


# ---- statistics ----


def test_a_paired_difference_by_hand() -> None:
    method = {1: 1.02, 2: 1.04, 3: 1.03, 4: 1.03, 9: 5.0}
    baseline = {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}
    pair = stats.paired(method, baseline)
    assert pair.seeds == 4
    assert pair.mean == pytest.approx(0.03)
    assert pair.error == pytest.approx(math.sqrt(2e-4 / 3) / 2)
    assert pair.upper == pytest.approx(0.03 + 2.353 * pair.error)
    assert pair.lower == pytest.approx(0.03 - 2.353 * pair.error)


@pytest.mark.parametrize(
    ("differences", "margin", "verdict"),
    [
        ([0.001, 0.002, 0.001, 0.002], 0.005, "no worse"),
        ([0.006, 0.007, 0.006, 0.007], 0.005, "worse"),
        ([-0.05, 0.05, 0.04, -0.04], 0.005, "not shown"),
        ([-0.5, -0.6, -0.5, -0.6], 0.005, "no worse"),
    ],
)
def test_non_inferiority(differences: list[float], margin: float, verdict: str) -> None:
    assert stats.non_inferior(stats.of_differences(differences), margin) == verdict


def test_the_null_control_finds_what_differs() -> None:
    assert stats.null(stats.of_differences([0.01, -0.01, 0.012, -0.011]), 0.05) == "same"
    assert stats.null(stats.of_differences([0.01, 0.011, 0.012, 0.01]), 0.05) == "differs"
    assert stats.null(stats.of_differences([-0.01, -0.011, -0.012, -0.01]), 0.05) == "differs"
    assert stats.null(stats.of_differences([0.2, -0.2, 0.3, -0.3]), 0.05) == "not shown"


def test_what_is_known_to_be_bad_has_to_lose_by_five_errors() -> None:
    assert stats.loses(stats.of_differences([0.8, 0.82, 0.81])) == "loses"
    assert stats.loses(stats.of_differences([0.1, 0.9, 0.5])) == "does not lose"
    assert stats.loses(stats.of_differences([-0.8, -0.82, -0.81])) == "does not lose"


def test_a_run_that_diverged_counts_as_a_guess() -> None:
    pair = stats.paired({1: None, 2: float("nan"), 3: 700.0}, {1: 1.0, 2: 1.0, 3: 1.0})
    assert pair.mean == pytest.approx(math.log(103) - 1)


def test_the_sign_flip_test_of_eight_pairs() -> None:
    assert stats.sign_flip([0.1] * 8) == pytest.approx(2 / 256)
    assert stats.sign_flip([0.1, -0.1]) == 1.0


# ---- the link ----


def test_equal_time_by_the_formula() -> None:
    one = link.Link(1.0)
    sent = 4 * link.PARAMETERS * 1.5
    assert one.exchange_s(32) == pytest.approx(sent * 8 / 0.94e9)
    assert link.JUST.ddp_s(link.INT8) == pytest.approx(link.COMPUTE_S * 4 / 3)
    assert link.EQUAL_TIME["adamw-waits"] == pytest.approx(0.75)


# ---- methods and claims ----


def test_every_claim_names_methods_that_run_its_setting() -> None:
    for claim in claims.CLAIMS:
        for name in filter(None, (claim.method, claim.baseline, claim.stale)):
            assert claim.setting in METHODS[name].settings, (claim, name)
        assert (claim.margin is not None) == (claim.kind in ("margin", "null")), claim


def test_all_methods_have_the_same_tuning_budget() -> None:
    for method in METHODS.values():
        assert len(method.lrs) == 4, method.name
        ratios = {round(b / a, 6) for a, b in zip(method.lrs, method.lrs[1:], strict=False)}
        assert ratios == {2.0}, method.name
    tuning = set(plans.TUNE_SEEDS)
    assert not tuning & {seed for method in METHODS.values() for seed in method.seeds}


# ---- the plan ----


def _answer(run: plans.Run, loss: float | None) -> dict[str, Any]:
    return {
        "key": run.key,
        "setting": run.setting,
        "method": run.method,
        "role": run.role,
        "lr": run.lr,
        "seed": run.seed,
        "steps": run.steps,
        "loss": loss,
        "weights": "same",
        "curve": [[run.steps // 2, 2.0], [run.steps, loss]],
        "sent": 471936 * run.steps * 6,
        "cpu_s": 0.1 * run.steps,
        "torch": "2",
        "python": "3",
        "cpu": "none",
    }


def _fill(rows: Rows, names: tuple[str, ...], loss: Any) -> plans.Plan:
    """Answers all that is due, as run_all would."""
    plan = plans.Plan(rows, [METHODS[name] for name in names])
    while due := plan.due():
        for run in due:
            rows.append(_answer(run, loss(run)))
    return plan


def test_the_rate_is_tuned_first_and_lies_inside(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows")
    bf16 = METHODS["bf16"]
    plan = plans.Plan(rows, [bf16])
    assert {run.role for run in plan.due()} == {"tune"}
    assert len(plan.due()) == 8
    plan = _fill(rows, ("bf16",), lambda run: 1.5 + abs(math.log(run.lr / 5e-3)))
    assert plan.tuned(bf16) == 5e-3
    assert plan.is_interior(bf16)
    assert sorted(plan.finals("T1", "bf16")) == list(range(1, 9))
    assert plan.count()[:2] == (17, 17)
    assert plan.process_check("T1", "bf16") == "same bits"
    process = next(run for run in plan.runs(bf16) if run.role == "process")
    answer = rows.find(process.key)
    assert answer is not None
    rows.append({**answer, "weights": "others"})
    assert plan.process_check("T1", "bf16") == "OTHER BITS"
    rows.append({**answer, "weights": "others", "cpu": "another"})
    assert plan.process_check("T1", "bf16") == "other processor"


@pytest.mark.parametrize(("best", "tried"), [(1.25e-3, 5 + 1), (4e-2, 6), (1.0, 4 + 3)])
def test_a_grid_grows_where_the_best_rate_is_at_its_edge(
    tmp_path: Path, best: float, tried: int
) -> None:
    rows = Rows(tmp_path / "rows")
    plan = _fill(rows, ("bf16",), lambda run: 1.5 + abs(math.log(run.lr / best)))
    assert len({row["lr"] for row in rows if row["role"] == "tune"}) == tried
    assert plan.is_interior(METHODS["bf16"]) == (best < 1)


def test_a_rate_that_diverges_is_not_chosen(tmp_path: Path) -> None:
    plan = _fill(
        Rows(tmp_path / "rows"), ("bf16",), lambda run: None if run.lr > 6e-3 else 2 - run.lr
    )
    assert plan.tuned(METHODS["bf16"]) == 5e-3


def test_a_changed_method_is_run_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    run = plans.Run("T1", "int8", 1e-2, 1, "final", 400)
    before = run.key
    assert dataclasses.replace(run, role="quick").key == before
    assert dataclasses.replace(run, role="process").key != before
    assert dataclasses.replace(run, seed=2).key != before
    old = METHODS["int8"]
    monkeypatch.setitem(
        METHODS, "int8", dataclasses.replace(old, options={**old.options, "threshold": 1})
    )
    assert run.key != before
    monkeypatch.setitem(METHODS, "int8", dataclasses.replace(old, version=2))
    assert run.key != before


#: Of the source of each builder. A key holds no source, so an edit of a builder is to be judged:
#: where it changes what is trained, raise `version` of its methods; then put the new digest here.
BUILDERS = {
    "adamw": "d70fc2ae9901",
    "hooked": "a5aa59a715e4",
    "lion": "2029abe32ebe",
    "muon": "b3220054979e",
    "muon_by_owner": "9f90417d1c50",
    "outer": "a0e13f491a28",
    "powersgd": "6e74ad83f781",
    "published": "a2e67e89dbbc",
    "sgd": "430291cd1fc4",
    "sharded": "53e6e4a64206",
    "sparse_sgd": "59665e63ba9f",
    "stale": "e27e99336364",
    "stellatrain": "e5f571da0cc5",
    "stellatrain_sgd": "cd29fa42c0d0",
    "torch_fp16": "e0bb8b8bf995",
    "torch_fp32": "dcc674dde091",
    "wire": "5a2db9663209",
}


def test_an_edit_of_a_builder_is_judged() -> None:
    builders = {method.build for method in METHODS.values()} | set(INNER.values())
    found = {
        build.__name__: hashlib.sha256(inspect.getsource(build).encode()).hexdigest()[:12]
        for build in builders
    }
    assert found == BUILDERS, "see BUILDERS"


def test_t4_waits_for_its_checkpoint(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows")
    plan = plans.Plan(rows, [METHODS["adamw"]])
    while (due := convergence.ready(plan, tmp_path)) != [plans.CHECKPOINT]:
        assert all(run.setting == "T1" for run in due)
        for run in due:
            rows.append(_answer(run, 1.5 + abs(run.lr - 1e-2)))
    assert convergence.ready(plan, tmp_path) == [plans.CHECKPOINT], "its file is not there"
    convergence.checkpoint_of(tmp_path).touch()
    assert {run.setting for run in convergence.ready(plan, tmp_path)} == {"T4"}
    grid = {rate / 10 for rate in METHODS["adamw"].lrs}
    assert {run.lr for run in convergence.ready(plan, tmp_path)} == grid, "tuned by itself"
    while due := convergence.ready(plan, tmp_path):
        for run in due:
            rows.append(_answer(run, 1.5 + abs(run.lr - 5e-4)))
    assert plan.tuned(METHODS["adamw"], "T4") == 5e-4
    assert plan.tuned(METHODS["adamw"]) == 1e-2
    assert {row["lr"] for row in plan.finals("T4", "adamw").values()} == {5e-4}


# ---- rows ----


def test_rows_outlast_an_interruption(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = Rows(path)
    rows.append({"key": "a", "loss": 1.0})
    rows.append({"key": "b", "loss": 2.0})
    with path.open("a") as file:
        file.write('{"key": "c", "lo')
    again = Rows(path)
    assert len(again) == 2
    again.append({"key": "c", "loss": 3.0})
    again.append({"key": "a", "loss": 4.0})
    last = Rows(path)
    assert [last.find(key)["loss"] for key in "abc"] == [4.0, 2.0, 3.0]  # type: ignore[index]


# ---- the table ----


def test_the_table_is_made_of_rows_alone(tmp_path: Path) -> None:
    shift = {"int8": 0.001, "int4": 0.2, "onebit-adamw": 0.8}

    def loss(run: plans.Run) -> float:
        noise = 1e-4 * ((7 * run.seed + len(run.method)) % 5)
        return 1.6 + abs(math.log(run.lr / 1e-2)) + shift.get(run.method, 0.0) + noise

    rows = Rows(tmp_path / "rows")
    names = ("adamw", "bf16", "int8", "int4", "onebit-adamw", "adamw-other-seeds")
    _fill(rows, names, loss)
    told = report.markdown(plans.Plan(rows, METHODS.values()), [])
    line = {
        cells[0]: cells
        for row in told.splitlines()
        if len(cells := [cell.strip() for cell in row.strip("|").split("|")]) == 8
    }
    assert line["int8"][-1] == "no worse"
    assert line["int8, both at 0.01"][-1] == "no worse"
    assert line["int8, T4, both at 0.001"][-1] == "no worse"
    assert line["int4"][-1] == "worse"
    assert line["onebit-adamw"][-1] == "loses"
    assert line["adamw-other-seeds"][-1] == "same"
    assert line["adamw-dealt"][-1] == "not run yet"
    assert "| T1 | int8 | 0.01 | 1.601 | 0.000 | 6.00 | same bits |" in told


def test_what_write_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "plots").mkdir()
    for name in ("METHODS", "RESULTS"):
        (tmp_path / f"{name}.md").write_text(f"# {name}\n", encoding="utf-8")
    monkeypatch.setattr(convergence, "DOCS", tmp_path)
    convergence.write(plans.Plan(Rows(tmp_path / "rows"), METHODS.values()))
    for name in ("METHODS", "RESULTS"):
        told = (tmp_path / f"{name}.md").read_text(encoding="utf-8")
        assert told.startswith(f"# {name}\n\n## convergence\n\n<!-- convergence: made by ")
    assert (tmp_path / "plots" / "convergence.png").exists()


def test_the_pages_are_what_the_rows_make() -> None:
    """Fails where an edit leaves rows without their method, and where somebody forgot --write."""
    plan = plans.Plan(Rows(convergence.ROWS), METHODS.values())
    for page, made in convergence.pages(plan).items():
        assert made == page.read_text(encoding="utf-8")


# ---- the runs themselves ----


@pytest.mark.parametrize("name", exact.EXAMPLES)
def test_a_counter_example(name: str) -> None:
    one = exact.EXAMPLES[name]()
    assert one.holds, one


def test_a_tiny_run_on_images() -> None:
    """One step stale, by the largest lines: all ranks end with the weights of both steps."""
    pytest.importorskip("sklearn")
    run = plans.Run("T5", "images-sparse-4", 0.2, 1, "quick", 2)
    first, again = (worker.in_threads(run, NONE, None) for _ in range(2))
    assert first["weights"] == again["weights"]
    assert first["alike"]
    assert 0.8 < first["loss"] < 0.97
    other = worker.in_threads(dataclasses.replace(run, steps=1), NONE, None)
    assert other["weights"] != first["weights"]


@pytest.mark.slow
def test_a_start_over_threads_and_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs are made by workers, kept, and not made again; with the same bits over processes, under
    DDP, with a codec and its feedback. One that fails is told of, and the others go on."""
    path = tmp_path / "rows.jsonl"
    rows = Rows(path)
    run = plans.Run("T1", "int4", 1e-2, 1, "quick", 2)
    broken = dataclasses.replace(run, setting="T4")  # there is no checkpoint
    runs = [run, broken, dataclasses.replace(run, role="process")]
    progress = convergence.Progress(rows, None, len(runs))

    def due() -> list[plans.Run]:
        return [run for run in runs if rows.find(run.key) is None]

    pool.run_all(due, progress.done, progress.failed, lambda _: NONE, jobs=1)
    assert progress.failures == 1
    assert due() == [broken]
    told = capsys.readouterr()
    assert "2 of 3" in told.out
    assert "FileNotFoundError" in told.err
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert kept[0]["weights"] == kept[1]["weights"]
    assert kept[0]["loss"] == kept[1]["loss"]
    assert kept[0]["alike"]
    assert 0.8 < kept[0]["sent"] / 2 / 471_936 < 0.9
    assert {"git", "torch", "cpu", "curve", "sent", "weights", "text", "options"} <= set(kept[0])
