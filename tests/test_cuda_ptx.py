"""ringcomm/kernels.ptx: made from the kernels.cu that is here, for old drivers and GPUs too, with
arithmetic that has one result, and taken by the assembler for each GPU where there is one. Needs no
GPU.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
    text = make_ptx.SOURCE.read_text(encoding="ascii")
    names = set(re.findall(r"^KERNEL (ringcomm_\w+)\(", text, re.MULTILINE))
    for macro, format_ in re.findall(r"^(HALF|BLOCK)_KERNELS\((\w+), \w+\)$", text, re.MULTILINE):
        assert macro
        names |= {f"ringcomm_pack_{format_}", f"ringcomm_unpack_{format_}"}
    return names


def test_it_is_of_this_source() -> None:
    """After a change of kernels.cu: python tools/make_ptx.py; it says what it needs."""
    assert ptx().startswith(make_ptx.head(make_ptx.SOURCE.read_bytes()))


def test_it_is_what_the_compiler_makes() -> None:
    try:
        made = make_ptx.make(make_ptx.SOURCE.read_bytes())
    except make_ptx.MissingError as error:
        pytest.skip(str(error))
    assert ptx() == made


def test_a_source_with_a_mistake_is_refused() -> None:
    try:
        make_ptx.compiler()
    except make_ptx.MissingError as error:
        pytest.skip(str(error))
    with pytest.raises(ValueError, match="nothing_such"):
        make_ptx.make(b"int x = nothing_such;")


def test_without_a_compiler_it_says_what_to_install() -> None:
    done = subprocess.run(
        [sys.executable, "-S", str(ROOT / "tools" / "make_ptx.py")],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
    assert done.returncode == 1
    assert "pip install nvidia-cuda-nvrtc-cu12==12.0" in done.stderr


def test_old_drivers_and_gpus_take_it() -> None:
    assert re.search(r"^\.version 8\.0$", ptx(), re.MULTILINE)
    assert re.search(r"^\.target sm_60$", ptx(), re.MULTILINE)
    assert re.search(r"^\.address_size 64$", ptx(), re.MULTILINE)


def test_it_has_every_kernel_and_needs_nothing_else() -> None:
    entries = set(re.findall(r"^\.visible \.entry (\w+)\(", ptx(), re.MULTILINE))
    assert entries == kernels_in_source()
    assert len(entries) >= 13
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
    assert conversions <= {"cvt.rn.f32.s32", "cvt.rn.f32.u32"}


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
            [str(ptxas), f"--gpu-name=sm_{gpu}", "-v", str(make_ptx.PTX), "-o",
             str(tmp_path / "cubin")],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        told = done.stdout + done.stderr
        if "is not defined for option 'gpu-name'" in told:
            continue
        assert done.returncode == 0, told[-2000:]
        registers = [int(one) for one in re.findall(r"Used (\d+) registers", told)]
        assert len(registers) == len(kernels_in_source())
        assert max(registers) <= MOST_REGISTERS
        assert set(re.findall(r"(\d+) bytes (?:stack|spill)", told)) == {"0"}
        return
    pytest.skip(f"no ptxas here that knows sm_{gpu} (pip install nvidia-cuda-nvcc-cu12 has one)")
