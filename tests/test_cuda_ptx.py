"""ringcomm/kernels.ptx: made from the kernels.cu that is here, for old drivers and GPUs too, with
arithmetic that has one result, and taken by the assembler for each GPU where there is one. Needs no
GPU.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import make_ptx  # noqa: E402

MOST_REGISTERS = 64  # a lane's; with more, too few warps fit to keep memory busy
GPUS = [60, 70, 75, 80, 86, 89, 90, 100, 120]


def ptx() -> str:
    return make_ptx.PTX.read_text(encoding="ascii")


def code() -> str:
    return re.sub(r"//.*", "", ptx())


def kernels_in_source() -> set[str]:
    """Names, with those that macros make."""
    text = b"".join(make_ptx.sources().values()).decode("ascii")
    names = set(re.findall(r"^KERNEL (ringcomm_\w+)\(", text, re.MULTILINE))
    for macro, format_ in re.findall(r"^(HALF|BLOCK)_KERNELS\((\w+), \w+\)$", text, re.MULTILINE):
        names |= {f"ringcomm_pack_{format_}", f"ringcomm_unpack_{format_}"}
        names |= {f"ringcomm_add_{format_}"} if macro == "BLOCK" else set()
    return names


def test_it_is_of_this_source() -> None:
    """After a change of csrc/cuda: python tools/make_ptx.py; it says what it needs."""
    assert ptx().startswith(make_ptx.head(make_ptx.sources()))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Python, by itself: the compiler changes the locale of its process."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT / "tools",
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )


def skip_without_compiler(done: subprocess.CompletedProcess[str]) -> None:
    if make_ptx.INSTALL in done.stderr:
        pytest.skip(f"NVRTC 12.0 is not installed ({make_ptx.INSTALL})")


def test_it_is_what_the_compiler_makes() -> None:
    done = run("make_ptx.py", "--check")
    skip_without_compiler(done)
    assert done.returncode == 0, done.stderr


def test_a_source_with_a_mistake_is_refused() -> None:
    done = run("-c", "import make_ptx; make_ptx.make({'kernels.cu': b'int x = nothing_such;'})")
    skip_without_compiler(done)
    assert "ValueError" in done.stderr
    assert "nothing_such" in done.stderr


def test_without_a_compiler_it_says_what_to_install() -> None:
    done = run("-S", "-E", "make_ptx.py", "--check")
    assert done.returncode == 1
    assert "pip install nvidia-cuda-nvrtc-cu12==12.0" in done.stderr


def test_old_drivers_and_gpus_take_it() -> None:
    assert re.search(r"^\.version 8\.0$", ptx(), re.MULTILINE)
    assert re.search(r"^\.target sm_60$", ptx(), re.MULTILINE)
    assert re.search(r"^\.address_size 64$", ptx(), re.MULTILINE)


def test_it_has_every_kernel_and_needs_nothing_else() -> None:
    entries = set(re.findall(r"^\.visible \.entry (\w+)\(", ptx(), re.MULTILINE))
    assert entries == kernels_in_source()
    assert len(entries) >= 17
    assert not re.search(r"\.extern|\.func|\.global \.|vprintf|\bcall\b", code())


def test_no_result_is_left_to_the_gpu() -> None:
    """No product fused with a sum, nothing flushed or approximated; and where PTX does not say how
    to round, an assembler may fuse."""
    assert not re.findall(r"\b\w*(?:fma|mad)\w*\.\w*\.?f\d+|\.ftz|\.approx|\.full", code())
    arithmetic = re.findall(r"\b(?:add|sub|mul|div|sqrt|rcp)\.[\w.]*f(?:32|64)\b", code())
    assert {"mul.rn.f32", "add.rn.f32", "div.rn.f32", "sqrt.rn.f32"} <= set(arithmetic)
    assert all(".rn." in operation for operation in arithmetic)


def test_16_bit_floats_are_rounded_as_integers() -> None:
    """Conversions of the GPU's own have another NaN, and bf16 did not exist."""
    conversions = set(re.findall(r"\bcvt[\w.]*f\d+[\w.]*", code()))
    whole = {"cvt.rn.f32.s32", "cvt.rn.f32.u32", "cvt.rn.f64.u32", "cvt.rpi.u64.f64"}
    assert conversions <= whole


# ---- the assemblers that are here ----


def assemblers() -> list[Path]:
    """On the path, and in packages of this Python."""
    found = [Path(one) for one in [shutil.which("ptxas")] if one]
    if importlib.util.find_spec("nvidia") is not None:
        for package in ("nvidia.cuda_nvcc", "nvidia.cu13"):
            spec = importlib.util.find_spec(package)
            places = list(spec.submodule_search_locations or ()) if spec is not None else []
            found += [path for place in places for path in Path(place).glob("bin/ptxas")]
    return found


@pytest.mark.parametrize("gpu", GPUS)
def test_assembled_without_spills(gpu: int, tmp_path: Path) -> None:
    for ptxas in assemblers():
        done = subprocess.run(
            [
                str(ptxas),
                f"--gpu-name=sm_{gpu}",
                "-v",
                str(make_ptx.PTX),
                "-o",
                str(tmp_path / "cubin"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        told = done.stdout + done.stderr
        if "is not defined for option 'gpu-name'" in told:
            continue
        assert done.returncode == 0, told[-2000:]
        used = re.findall(r"entry function '(\w+)'.*?Used (\d+) registers", told, re.DOTALL)
        assert {name for name, _ in used} == kernels_in_source()
        for name, registers in used:
            assert int(registers) <= MOST_REGISTERS, name
        assert set(re.findall(r"(\d+) bytes (?:stack|spill)", told)) == {"0"}
        return
    pytest.skip(f"no ptxas here that knows sm_{gpu} (pip install nvidia-cuda-nvcc-cu12 has one)")
