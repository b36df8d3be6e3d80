"""bench/results.py: rows that are resumed, what stands in the page, each source's figures, and tiny
runs of its commands."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from beside import Done

pytest.importorskip("numpy")

BENCH = Path(__file__).resolve().parent.parent / "bench"
sys.path.insert(0, str(BENCH))

import results  # noqa: E402
from lab.wiring import CABLES  # noqa: E402
from netlab import why_unavailable  # noqa: E402
from report.columns import filled  # noqa: E402
from report.rows import Rows, about, commit_of, is_dirty  # noqa: E402
from sources import onebit, overlap, page, scaling, steps  # noqa: E402
from sources.source import (  # noqa: E402
    OLDER_CABLES,
    UNCOMMITTED,
    Claim,
    Found,
    Point,
    due,
    found,
    load,
    names,
)

ALONE = steps.ALONE


# ---- the command ----


class Fake(SimpleNamespace):
    """A source of two points, whose second one is interrupted at first."""

    DOCUMENT, REAL, EMULATED = "A document.", "all.", "nothing."
    WITHOUT_ROOT, HARNESS = "something else", 1
    mbit: float | None = None
    fails: BaseException | None = KeyboardInterrupt()

    def points(self, quick: bool) -> list[Point]:
        return [Point("first", {"quick": quick}), Point("second", {"quick": quick}, self.mbit)]

    def measure(self, point: Point) -> Mapping[str, Any]:
        if point.name == "second" and self.fails is not None:
            raise self.fails
        return {"figure": len(point.name)}

    def claims(self, found: Found) -> list[Claim]:
        ours = found["second"]["figure"] if "second" in found else None
        return [
            Claim(
                "letters",
                "5",
                "" if ours is None else str(ours),
                ">= 6",
                None if ours is None else ours >= 6,
                1.2 if ours else None,
            )
        ]

    def table(self, found: Found) -> list[tuple[str, ...]]:
        return [("name", "figure"), *((name, str(row["figure"])) for name, row in found.items())]

    brief = table

    def draw(self, found: Found, figure: Any) -> None:
        figure.add_subplot().bar(list(found), [row["figure"] for row in found.values()])


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    source = Fake()
    for module in (results, sys.modules["sources.source"]):
        monkeypatch.setattr(module, "load", lambda _: source)
        monkeypatch.setattr(module, "names", lambda: ["fake"])
    return source


def test_an_interrupted_run_keeps_what_it_has_and_goes_on(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    assert results.main(["fake", "--rows", str(file)]) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert [row["name"] for row in Rows(file)] == ["first"]
    fake.fails = None
    assert results.main(["fake", "--rows", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "[1/2] first: is there" in shown
    assert "second: is there" not in shown
    assert "met" in shown
    row = next(row for row in Rows(file) if row["name"] == "second")
    assert row["figure"] == 6
    assert {*about(), "load", "stolen_s", "cables"} < set(row)


def test_a_failure_is_told_and_the_others_go_on(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.fails = RuntimeError("a rank died")
    assert results.main(["fake", "--rows", str(tmp_path / "rows.jsonl")]) == 2
    told = capsys.readouterr()
    assert "fake, second: a rank died" in told.err
    assert "not measured" in told.out


def test_a_quick_run_gives_no_verdicts(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.fails = None
    for quick in ([], ["--quick"]):
        assert results.main(["fake", "--rows", str(tmp_path / "rows.jsonl"), *quick]) == 0
        shown = capsys.readouterr().out
        assert ("letters" in shown, "met" in shown, ">= 6" in shown) == (True, *[not quick] * 2)


def test_the_page_is_what_the_rows_make() -> None:
    everything = {
        name: (load(name), found(Rows(BENCH / "results" / f"{name}.jsonl"), name, False))
        for name in names()
    }
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.summary(everything) in text
    for name, (source, rows) in everything.items():
        assert page.section(name, source, rows) in text, f"results.py {name} --write --with-due"


# ---- what may be published ----


def test_files_in_no_commit_add_no_rows(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.fails = None
    monkeypatch.setattr(results, "HERE", tmp_path)
    monkeypatch.setattr(results, "about", lambda: {"git": "0123456789-dirty"})
    assert results.main(["fake"]) == 2
    assert "commit first" in capsys.readouterr().err
    monkeypatch.setattr(results, "about", lambda: {"git": "0123456789"})
    assert results.main(["fake"]) == 0
    assert len(Rows(tmp_path / "results" / "fake.jsonl")) == 2


def test_a_commit_is_dirty_by_sources_and_not_by_rows(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words],
            cwd=tmp_path,
            check=True,
            stdout=subprocess.DEVNULL,
        )

    files = [tmp_path / name for name in ("a.py", "bench/results/a.jsonl", "docs/A.md")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("first\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    for file in files[1:]:
        file.write_text("second\n")
    assert len(commit_of(tmp_path)) == 10
    files[0].write_text("second\n")
    assert commit_of(tmp_path)[10:] == "-dirty"
    assert is_dirty({"git": commit_of(tmp_path)})
    assert is_dirty({"git": ""})
    assert is_dirty({"git": "0123456789", "commits": ["0123456789", "0123456789-dirty"]})
    assert not is_dirty({"git": "0123456789", "commits": ["0123456789"]})


def test_rows_that_are_due_again(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They count until they are measured, and no page is made of them unless it may say so."""
    fake.fails = None
    monkeypatch.setattr(results, "HERE", tmp_path)
    monkeypatch.setattr(results, "about", lambda: {"git": "0123456789"})
    rows = Rows(tmp_path / "results" / "fake.jsonl")
    first, second = fake.points(False)
    rows.append({"key": first.key("fake", 1), "name": "first", "figure": 1, "git": "a-dirty"})
    rows.append({"key": second.key("fake", 1), "name": "second", "figure": 6, "git": "a"})
    assert results.main([]) == 0
    assert "2 of 2 measured, 1 due again" in capsys.readouterr().out
    assert results.main(["--write"]) == 2
    assert "1 rows are due again" in capsys.readouterr().err
    results.main(["fake"])
    shown = capsys.readouterr().out
    assert "first: is there" not in shown
    assert "second: is there" in shown
    results.main([])
    assert "0 due again" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mbit", "row", "why"),
    [
        (11.5, {"git": "a"}, OLDER_CABLES),
        (100.0, {"git": "a-dirty"}, OLDER_CABLES),
        (100.0, {"git": "a", "cables": CABLES}, ""),
        (200.0, {"git": "a"}, ""),
        (200.0, {"git": "a-dirty"}, UNCOMMITTED),
        (None, {"git": "a"}, ""),
        (11.5, {"git": "a-dirty", "cables": CABLES}, UNCOMMITTED),
    ],
)
def test_why_a_row_is_due(mbit: float | None, row: dict[str, Any], why: str) -> None:
    assert due(Point("a", {}, mbit), row) == why


def test_rows_of_other_settings_do_not_count(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.jsonl")
    point = scaling.points(True)[0]
    rows.append({"key": point.key("scaling", scaling.HARNESS), "name": point.name})
    assert list(found(rows, "scaling", True)) == [point.name]
    assert found(rows, "scaling", False) == {}


# ---- the page ----


def test_the_page_is_filled_between_its_marks() -> None:
    text = filled("# Results\n\nBy hand.\n", "a", "one", "program.py")
    text = filled(text, "b", "two", "program.py")
    again = filled(text, "a", "three \\1", "program.py")
    assert "By hand." in again
    assert "three \\1" in again
    assert "one" not in again
    assert again.index("three") < again.index("two")
    assert filled(again, "a", "three \\1", "program.py") == again


def test_what_write_makes(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "rows.jsonl"
    fake.fails = None
    results.main(["fake", "--rows", str(file)])
    (tmp_path / "plots").mkdir()
    (tmp_path / "RESULTS.md").write_text("# Results\n")
    monkeypatch.setattr(page, "DOCS", tmp_path)
    monkeypatch.setattr(page, "PAGE", tmp_path / "RESULTS.md")
    assert results.main(["--write", "--with-due", "--rows", str(file)]) == 0
    text = (tmp_path / "RESULTS.md").read_text()
    assert "- [fake](#fake): 1 met" in text
    assert "| letters | 5 | 6 | - | >= 6: met |" in text
    assert "| second | 6 |" in text
    assert (tmp_path / "plots" / "fake.png").stat().st_size > 1000
    assert (tmp_path / "plots" / "results.png").stat().st_size > 1000


# ---- steps ----


def taken(*rounds: float, per: int = 1, **more: Any) -> dict[str, Any]:
    """A way of a row."""
    ordered = sorted(rounds)
    return {
        "rounds": list(rounds),
        "per": per,
        "step_s": ordered[len(ordered) // 2],
        "port_bytes": 1e6,
        "cpu_s": 0.1,
        "waited_s": 0.0,
        **more,
    }


def test_efficiency_is_paired_round_by_round() -> None:
    ways = {
        ALONE: taken(1.0, 2.0, 1.0),
        "fp32": taken(1.25, 2.5, 4.0),
        "two batches": taken(2.5, 5.0, 2.5, per=2),
    }
    assert steps.efficiency(ways, "fp32") == pytest.approx(0.8)
    assert steps.efficiency(ways, "two batches") == pytest.approx(0.8)
    assert steps.exchange_s(ways, "fp32") == pytest.approx(0.5)


def test_a_summary_refuses_what_is_not_finite() -> None:
    one = {"way": "fp32", "per": 1, "step_s": 1.0, "port_bytes": 1, "cpu_s": 1, "waited_s": 0}
    assert steps.summary([{**one, "finite": True}])["step_s"] == 1.0
    with pytest.raises(RuntimeError, match="fp32: a gradient is not finite"):
        steps.summary([{**one, "finite": False}])


# ---- figures of rows ----


def row_of(source: str, name: str, **figures: Any) -> dict[str, Any]:
    """A row of a full point, made up."""
    point = next(point for point in load(source).points(False) if point.name == name)
    return {
        "name": name,
        "settings": dict(point.settings),
        "date": "2026-01-01",
        "cpu": "a CPU",
        "torch": "2",
        **figures,
    }


def scaling_rows(slow: float = 0.106) -> dict[str, Any]:
    """As the article has it; the second way of no concern here takes as long as compute."""
    steps_of = {"fp32": 0.234 + slow, "bf16": 0.234 + slow / 2, "bf16, 2 batches": 0.468 + slow / 2}
    rows = {}
    for ports, ways in scaling.WAYS.items():
        shrunk = {"two ports": 0.5, "unequal ports": 1 / 1.1}.get(ports, 1.0)
        rows[ports] = row_of(
            "scaling",
            ports,
            compute_s=0.234,
            parameters=2_486_450,
            ways={
                way: taken(
                    *[
                        shrunk * (steps_of.get(way, 0.234) - 0.234 * way_["per"])
                        + 0.234 * way_["per"]
                        if way in steps_of
                        else 0.236 * way_["per"]
                    ]
                    * 3,
                    per=way_["per"],
                )
                for way, way_ in {name: {"per": 1, **one} for name, one in ways.items()}.items()
            },
        )
        rows[ports]["ways"][ALONE] = taken(0.234, 0.234, 0.234)
    return rows


def test_scaling_as_the_article_has_it() -> None:
    rows = scaling_rows()
    made = scaling.claims(rows)
    assert [claim.ours for claim in made[:4]] == ["68.8 %", "81.5 %", "89.8 %", "94.6 %"]
    assert all(claim.met for claim in made[:6])
    assert [claim.verdict for claim in made[:4]] == ["calibration"] * 3 + ["met"]
    assert made[4].ratio == pytest.approx(5.5 / 0.847, rel=0.01)
    least_s = steps.wire_s("none", 2_486_450, 4, 1100)
    assert made[6].ours == f"{100 * least_s / (0.106 / 1.1):.1f} %"


def test_scaling_that_falls_short() -> None:
    made = scaling.claims(scaling_rows(slow=0.2))
    assert [claim.verdict for claim in made[:4]] == ["short"] * 4
    assert made[6].verdict == "short"


def overlap_rows() -> dict[str, Any]:
    rows = {}
    for point in overlap.points(False):
        hosts, parameters = point.settings["hosts"], 30_000_000
        compute_s = 2 * overlap.limit_s(parameters, 1000)
        exchange_s = 1.05 * overlap.predicted_s(hosts, parameters, 1000)
        rows[point.name] = row_of(
            "overlap",
            point.name,
            parameters=parameters,
            ways={
                ALONE: taken(compute_s),
                overlap.AFTER: taken(compute_s + exchange_s),
                overlap.DURING: taken(1.02 * compute_s),
            },
        )
    return rows


def test_overlap_and_the_cost_model() -> None:
    made = overlap.claims(overlap_rows())
    assert [claim.verdict for claim in made] == ["met"] * 4
    assert made[3].ours == "off by at most 4.8 %"
    lines = overlap.lines(overlap_rows())
    assert [line.hosts for line in lines] == [*range(1, 9)]
    assert lines[1].model == pytest.approx(0.5, rel=0.01)
    assert lines[7].hop_s == pytest.approx(
        0.05 * lines[7].model * overlap.limit_s(30_000_000, 1000) / 14, rel=0.02
    )
    (note,) = overlap.notes(overlap_rows())
    assert "takes 6.3 to 25.1 ms for each hop" in note
    assert overlap.notes({}) == []


def onebit_rows() -> dict[str, Any]:
    ways = {
        ALONE: taken(0.344),
        onebit.FP32: taken(9.4, sent=47e6),
        onebit.BF16: taken(4.9, sent=23.5e6),
        onebit.BF16_HIDDEN: taken(4.7, sent=23.5e6),
        onebit.INT8_HIDDEN: taken(2.6, sent=11.9e6),
        onebit.DENSE: taken(4.8, sent=23.5e6),
        onebit.DENSE8: taken(2.6, sent=11.9e6),
        onebit.ADAM: taken(0.4, sent=1.6e6, renewing_s=4.9, renewing_sent=25e6),
        onebit.LAMB: taken(0.5, sent=1.6e6, renewing_s=4.9, renewing_sent=25e6),
    }
    return {point.name: row_of("onebit", point.name, ways=ways) for point in onebit.points(False)}


def test_onebit_end_to_end() -> None:
    rows = onebit_rows()
    share = onebit.renewals(2000, 10_000) / 8000
    sent = 0.2 * 23.5 + 0.8 * ((1 - share) * 1.6 + share * 25)
    row = rows["BERT, 8 hosts, papers"]
    assert onebit.over(row, onebit.FP32, onebit.ADAM, "sent", onebit.DENSE) == pytest.approx(
        47 / sent
    )
    made = {claim.what: claim for claim in onebit.claims(rows)}
    like = made["1-bit Adam: bytes saved end to end"]
    assert like.ours == f"{23.5 / sent:.2f}x"
    assert (like.verdict, like.same_baseline) == ("short", "yes")
    unlike = made["1-bit Adam: bytes saved end to end, of fp32"]
    assert unlike.ours == f"{47 / sent:.2f}x"
    assert unlike.same_baseline == "no: 16-bit gradients; fp32 gradients"
    alone = made["1-bit Adam: throughput, steps at 1 bit alone"]
    assert alone.ours == "12.25x"
    assert not alone.is_like_for_like


@pytest.mark.parametrize(
    ("total", "made"), [(2000, 0), (2001, 1), (2004, 4), (2005, 4), (2006, 5), (2012, 8)]
)
def test_renewals_are_made_ever_more_rarely(total: int, made: int) -> None:
    assert onebit.renewals(2000, total) == made


def test_steps_that_renew_count_apart() -> None:
    run = {
        "way": "x",
        "per": 1,
        "finite": True,
        "step_s": 2.0,
        "port_bytes": 0,
        "cpu_s": 0,
        "waited_s": 0,
        "steps": [3.0, 1.0, 3.2, 1.2],
        "sent": [10, 2, 10, 2],
    }
    made = onebit.summary([run])
    assert (made["step_s"], made["sent"]) == (1.1, 2)
    assert (made["renewing_s"], made["renewing_sent"]) == (3.1, 10)
    hook = onebit.summary([{**run, "wire_bytes": 8.0}])
    assert (hook["step_s"], hook["sent"]) == (2.1, 8.0)


# ---- tiny runs ----


def tiny(*words: str) -> Any:
    return pytest.param(
        words[0],
        marks=pytest.mark.beside(
            "{python}", str(BENCH / "results.py"), *words, "--quick", "--rows", "{folder}/rows"
        ),
    )


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
@pytest.mark.parametrize(
    "name", [tiny("scaling", "--only", "unequal"), tiny("overlap", "--only", "1"), tiny("onebit")]
)
def test_a_tiny_run(name: str, beside: Done) -> None:
    """Its rows and its table; its times are for a quiet machine."""
    pytest.importorskip("torch")
    assert beside.code == 0, beside.output
    (row,) = Rows(beside.folder / "rows")
    assert list(found(Rows(beside.folder / "rows"), name, True)) == [row["name"]]
    assert row["ways"][ALONE]["step_s"] > 0
    assert "claim" in beside.output
