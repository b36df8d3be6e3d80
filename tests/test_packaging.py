"""The wheel: one for all Pythons, self-contained, built by a C compiler alone; its command line."""

from __future__ import annotations

import hashlib
import os
import runpy
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import pytest
import wheels
from beside import Done
from wheels import ROOT, build_wheel, source_copy

from ringcomm.core import pipe

built_beside = pytest.mark.beside(sys.executable, wheels.__file__, "{folder}")


@pytest.fixture
def wheel(beside: Done) -> Path:
    assert beside.code == 0, beside.output
    (built,) = beside.folder.glob("*.whl")
    return built


@built_beside
@pytest.mark.skipif(
    bool(sysconfig.get_config_var("Py_GIL_DISABLED")), reason="no abi3 on a free-threaded Python"
)
def test_one_wheel_serves_all_pythons(wheel: Path) -> None:
    assert "-cp310-abi3-" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert "ringcomm/_core.abi3.so" in names
    assert {"ringcomm/py.typed", "ringcomm/functions.pyi"} <= set(names)
    assert "ringcomm/kernels.ptx" in names
    packages = {name.rsplit("/", 1)[0] for name in names if name.startswith("ringcomm/")}
    here = {str(p.parent.relative_to(ROOT)) for p in (ROOT / "ringcomm").rglob("__init__.py")}
    assert here <= packages


@built_beside
def test_the_wheel_works_away_from_the_sources(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import ringcomm, numpy as np; ringcomm.init();"
        "print(ringcomm.__file__, ringcomm.allreduce(np.ones(3)).sum())"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "ringcomm" / "__init__.py"), "3.0"]


def test_a_missing_compiler_is_a_sentence(tmp_path: Path) -> None:
    done = build_wheel(tmp_path, CC="no-such-compiler")
    assert done.returncode != 0
    assert "ringcomm needs a C compiler, and 'no-such-compiler' cannot compile" in (
        done.stdout + done.stderr
    )


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The functions of setup.py, by name."""
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    return runpy.run_path(str(ROOT / "setup.py"))


@pytest.fixture
def assemble(build: dict[str, Any]) -> Any:
    return build["assemble"]


def nvcc(folder: Path, monkeypatch: pytest.MonkeyPatch, fails: bool = False) -> Path:
    """One that writes what it was asked for into the file that it was asked for."""
    script = folder / "nvcc"
    script.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --list-gpu-code ]; then echo "sm_86 sm_75 sm_80 sm_103 sm_100"; exit; fi\n'
        f'[ {int(fails)} = 0 ] || {{ echo "no such thing" >&2; exit 1; }}\n'
        'echo "$@" > "$4"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("NVCC", str(script))
    return script


def test_an_nvcc_assembles_the_kernels(
    assemble: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc(tmp_path, monkeypatch)
    ptx = tmp_path / "some.ptx"
    ptx.write_text("one")
    assert assemble(ptx, tmp_path) == "kernels assembled for sm_75, sm_80, sm_100"
    (made,) = tmp_path.glob("*.fatbin")
    digest = hashlib.sha256(b"one").hexdigest()[:16]
    assert made.name == f"kernels-{digest}.fatbin"
    assert made.read_text().count("-gencode") == 3
    assert assemble(ptx, tmp_path) == ""  # it is there
    ptx.write_text("two")
    assemble(ptx, tmp_path)
    (other,) = tmp_path.glob("*.fatbin")  # what is stale goes
    assert other != made


@pytest.mark.parametrize("case", ["none", "missing", "failing"])
def test_no_nvcc_is_needed(
    assemble: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    said = nvcc(tmp_path, monkeypatch, fails=True)
    if case != "failing":
        monkeypatch.setenv("NVCC", "" if case == "none" else str(tmp_path / "nowhere"))
    (tmp_path / "some.ptx").write_text("one")
    answer = assemble(tmp_path / "some.ptx", tmp_path)
    assert bool(answer) == (case != "none")
    assert case != "failing" or answer == (
        f"{said} does not assemble the kernels, which a GPU's driver will do: no such thing"
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["nvcc", "some.ptx"]


def test_machine_code_is_named_as_it_is_looked_for(
    assemble: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc(tmp_path, monkeypatch)
    ptx = ROOT / "ringcomm" / "kernels.ptx"
    assemble(ptx, tmp_path)
    (made,) = tmp_path.glob("*.fatbin")
    (tmp_path / "kernels.ptx").write_bytes(ptx.read_bytes())
    monkeypatch.setattr("ringcomm.core.pipe.resources.files", lambda _package: tmp_path)
    monkeypatch.delenv("RINGCOMM_LIBCUDA", raising=False)
    assert pipe._images() == [made.read_bytes(), ptx.read_bytes()]
    monkeypatch.setenv("RINGCOMM_LIBCUDA", "another")
    assert pipe._images() == [ptx.read_bytes()]


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [("stdlib.h", "apt install gcc libc6-dev"), ("Python.h", "apt install python3")],
)
def test_missing_headers_are_a_sentence(
    build: dict[str, Any], tmp_path: Path, missing: str, sentence: str
) -> None:
    """A compiler that does not find one header."""
    compiler = tmp_path / "some-cc"
    compiler.write_text(
        f'#!/bin/sh\nfor file; do grep -qs "^#include <{missing}>" "$file" && exit 1; done\n'
        'exec gcc "$@"\n'
    )
    compiler.chmod(0o755)
    said = build["_missing"]([str(compiler)])
    assert said.startswith("ringcomm needs")
    assert sentence in said
    assert build["_missing"](["gcc"]) is None


def import_from(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-S",
            "-c",
            "import sys; sys.path[:0] = sys.argv[1:]; import ringcomm",
            str(folder),
            *(p for p in sys.path if "site-packages" in p),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
    )


def test_what_an_unbuilt_checkout_says(tmp_path: Path) -> None:
    copy = source_copy(tmp_path)
    done = import_from(copy)
    last = done.stderr.splitlines()[-1]
    assert f"imports ringcomm from its sources in {copy}, where the C core has not been" in last
    assert f"'pip install -e {copy}'" in last  # 'pip install .' would not help from here


@pytest.mark.parametrize("core", ["damaged", "missing"])
def test_what_a_damaged_installation_says(tmp_path: Path, core: str) -> None:
    copy = source_copy(tmp_path)
    (copy / "setup.py").unlink()  # so it looks like site-packages
    if core == "damaged":
        (copy / "ringcomm" / "_core.abi3.so").write_text("not a library")
    done = import_from(copy)
    said = "cannot be loaded: " if core == "damaged" else "has no C core"
    assert said in done.stderr.splitlines()[-1]
    assert "Install ringcomm again" in done.stderr.splitlines()[-1]


def test_info_names_what_there_is() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ringcomm"], capture_output=True, text=True, check=True
    )
    assert "(chosen)" in done.stdout
    assert "CUDA" in done.stdout
    assert "127.0.0.1" in done.stdout
