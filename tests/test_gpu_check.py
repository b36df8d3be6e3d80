"""bench/gpu_check.sh: its arithmetic, its verdicts, and a run over the driver that is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import PATIENCE, PROMPT

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "bench"
sys.path.insert(0, str(BENCH))

import emulation  # noqa: E402
import gpu_check  # noqa: E402
from gpu_checks import hierarchy, links, train  # noqa: E402
from gpu_checks.report import Check, at_least, at_most, read, table  # noqa: E402
from gpu_checks.steps import Step, run_step  # noqa: E402


def run(
    library: Path, kernels: Path, out: Path, steps: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
    """The command, and the verdicts that it wrote by step and check."""
    env = {
        **os.environ,
        "PYTHON": sys.executable,
        "OUT": str(out),
        "RINGCOMM_LIBCUDA": str(library),
        "FAKE_CUDA_KERNELS": str(kernels),
    }
    done = subprocess.run(
        [str(BENCH / "gpu_check.sh"), "--fake", "--steps", steps],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=5 * PATIENCE,
    )
    checks = json.loads((out / "gpu_check.json").read_text())["checks"]
    assert all(f"{check['step']}, {check['name']}" in done.stdout for check in checks)
    return done, {f"{check['step']}, {check['name']}": check["verdict"] for check in checks}


def test_a_run_without_a_gpu(gpu_library: Path, gpu_kernels: Path, tmp_path: Path) -> None:
    done, verdicts = run(gpu_library, gpu_kernels, tmp_path, "probe,order")
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(verdicts.values()) == {"ok", "skipped"}
    assert verdicts["order, torch"] == verdicts["probe, copies"] == "skipped"
    for name in (
        "probe, driver",
        "probe, PTX",
        "order, plain arrays, side stream",
        "order, plain arrays, graph capture refused",
    ):
        assert verdicts[name] == "ok"


def test_a_wrong_bit_is_found(gpu_library: Path, tmp_path: Path) -> None:
    """A copy of kernels.cu makes another NaN. All else is as it should be."""
    kernels = ROOT / "csrc" / "cuda" / "kernels.cu"
    good = kernels.read_text()
    assert good.count("? 0x7fc0 : rounded") == 1
    for folder in ("csrc/cuda", "tests/cuda"):
        (tmp_path / folder).mkdir(parents=True)
        for source in (ROOT / folder).iterdir():
            if source.is_file():
                (tmp_path / folder / source.name).write_bytes(source.read_bytes())
    bad = good.replace("? 0x7fc0 : rounded", "? 0x7fc1 : rounded")
    (tmp_path / "csrc/cuda/kernels.cu").write_text(bad)
    library = emulation.compiled(
        tmp_path / "bad.so", [tmp_path / "tests/cuda/emulate.c"], emulation.EMULATED
    )
    done, verdicts = run(gpu_library, library, tmp_path, "exact")
    assert done.returncode == 1
    assert verdicts.pop("exact, pack bf16") == "wrong"
    assert len(verdicts) == 11
    assert set(verdicts.values()) == {"ok"}
    assert "0x7fc1, not 0x7fc0" in done.stdout


def test_without_a_driver_nothing_else_is_begun(tmp_path: Path) -> None:
    env = {**os.environ, "RINGCOMM_LIBCUDA": "none.so"}
    step = Step("probe", "gpu_checks.probe", 60)
    command = [sys.executable, gpu_check.__file__, "--one", "probe", "--folder", str(tmp_path)]
    (check,) = run_step(step, command, env, 60.0, lambda check: None)
    assert check.verdict == "wrong"
    assert "no CUDA driver" in check.why


@pytest.mark.parametrize(
    ("program", "limit", "why"),
    [
        ("import os; print('oh'); os.abort()", 60, "SIGABRT: oh"),
        ("raise SystemExit(3)", 60, "exit code 3: it said nothing"),
        ("import time; time.sleep(60)", 2, "not over after 2 s"),
    ],
)
def test_a_step_that_breaks(
    program: str, limit: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    told = '{"name": "first", "verdict": "ok", "measured": "1 s", "goal": "", "why": ""}'
    began = time.monotonic()
    shown: list[Check] = []
    checks = run_step(
        Step("s", "", limit),
        [sys.executable, "-uc", f"print('{told}')\n{program}"],
        dict(os.environ),
        60.0,
        shown.append,
    )
    assert time.monotonic() - began < 2 + PROMPT
    rest = Check("s", "the rest", "wrong", why=why)
    assert checks == shown == [Check("s", "first", "ok", "1 s"), rest]
    said = tmp_path / "out" / "gpu_check.log"
    assert said.exists() == ("print" in program)
    assert not said.exists() or said.read_text() == "# s\noh\n"


def test_verdicts_and_lines() -> None:
    assert [at_least(1.0, 1.0), at_least(0.9, 1.0), at_most(1.0, 1.0), at_most(1.1, 1.0)] == [
        "ok",
        "short",
        "ok",
        "short",
    ]
    check = Check("kernels", "pack int8", "short", "60 % of a copy", "70 %", "at 90 us")
    line = "short   kernels, pack int8: 60 % of a copy (goal 70 %); at 90 us"
    assert check.line() == line
    assert table([check]).endswith("0 ok, 1 short, 0 wrong, 0 skipped")
    assert read("s", "something else") is None


def test_floors() -> None:
    wire = links.wire_s("none", 100_000_000, 4, [10_000.0])
    assert wire == pytest.approx(0.1255, rel=1e-3)
    assert links.wire_s("bf16", 100_000_000, 2, [10_000.0] * 2) == pytest.approx(wire / 6)
    there_and_back = 2 * 0.4
    for codec, crosses in (("none", 1.0), ("bf16", 0.5), ("onebit", 1.0)):  # onebit: with feedback
        floor = links.floor_s(codec, 100_000_000, 4, [10_000.0], 1e9)
        network = links.wire_s(codec, 100_000_000, 4, [10_000.0])
        assert floor == pytest.approx(network + crosses * there_and_back + 60e-6)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "ok"),
        ({"step_s": 0.12}, "short"),
        ({"error": 0.5}, "wrong"),
        ({"same": False}, "wrong"),
        ({"error": float("nan")}, "wrong"),
    ],
)
def test_steps_of_training(changes: dict[str, float], verdict: str) -> None:
    one = {
        "compute_s": 0.1,
        "forward_s": 0.03,
        "step_s": 0.105,
        "error": 0.001,
        "same": True,
        "batch": 9,
        **changes,
    }
    assert train.verdict(one, 0.04)[0] == verdict


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "ok"),
        ({"codec": "bf16", "error": 0.009}, "ok"),
        ({"error": 0.009}, "wrong"),
        ({"same": False}, "wrong"),
        ({"error": float("nan")}, "wrong"),
    ],
)
def test_gradients_of_a_hierarchy(changes: dict[str, float], verdict: str) -> None:
    one = {"codec": "none", "step_s": 0.1, "error": 1e-7, "same": True, **changes}
    assert hierarchy.verdict(one)[0] == verdict
