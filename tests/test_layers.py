"""The layering rule: a file includes or imports only what lies below it, and a C file only the one
header of another folder that is its interface. And two rules of the house that every file keeps: at
most 800 lines, and a word on what it is at its head.

    C       include < base < kernels, plan < codec, sparse < net, shm, cuda < coll < comm < api
            < pipe
    Python  errors < config, codecs < bootstrap, adaptive < core < summary < fusion < collectives
            < communicator < membership < api < functions < exact < feedback, sparse < the package
            itself < jax, torch < tools, train < __main__
    core    callback_threads < native < cuda, counters, opening < views < faces, residuals
            < calls, chunks < work < pipe, timeline < dispatch

Nothing outside ringcomm/core calls the extension. Files of one layer may use each other within a
folder, and not across folders. A file that has no place in the tables below fails the test, so that
whoever adds a layer says where it lies.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

import circles

ROOT = Path(__file__).resolve().parent.parent
MOST_LINES = 800

C_LAYERS = [
    {"include"},
    {"base"},
    {"kernels", "plan"},
    {"codec", "sparse"},
    {"net", "shm", "cuda"},
    {"coll"},
    {"comm"},
    {"api"},
    {"pipe"},
]
PYTHON_LAYERS = [
    {"errors"},
    {"config", "codecs"},
    {"bootstrap", "adaptive"},
    {"core.callback_threads"},
    {"core.native"},
    {"core.cuda", "core.counters", "core.opening"},
    {"core.views"},
    {"core.faces", "core.residuals"},
    {"core.calls", "core.chunks"},
    {"core.work"},
    {"core.pipe", "core.timeline"},
    {"core.dispatch", "core.lost_lanes"},
    {"summary"},
    {"fusion"},
    {"collectives"},
    {"communicator"},
    {"membership"},
    {"api"},
    {"functions"},
    {"exact"},
    {"feedback", "sparse"},
    {"ringcomm"},
    {"jax", "torch"},
    {"tools", "train"},
    {"__main__"},
]
#: The one header of each folder that other layers include.
INTERFACES = {
    "kernels": "kernels/kernels.h",
    "plan": "plan/plan.h",
    "codec": "codec/codec.h",
    "sparse": "sparse/payload.h",
    "net": "net/link.h",
    "shm": "shm/region.h",
    "cuda": "cuda/device.h",
    "coll": "coll/work.h",
    "comm": "comm/comm.h",
    "pipe": "pipe/pipe.h",
}
#: Layers all of whose headers are for others: the public headers, and a toolbox.
OPEN_LAYERS = {"include", "base"}
#: Headers that ask nothing of an operating system: C's own (stdio.h for snprintf), and those of
#: instruction sets.
PURE_HEADERS = {
    "arm_neon.h",
    "cpuid.h",
    "float.h",
    "immintrin.h",
    "limits.h",
    "math.h",
    "stdalign.h",
    "stdatomic.h",
    "stdbool.h",
    "stddef.h",
    "stdint.h",
    "stdio.h",
    "string.h",
}
#: Libraries that the caller may bring, and that only these folders may import.
CALLERS_LIBRARIES = {"torch", "mpi4py", "cupy", "jax"}
MAY_IMPORT_THEM = {"torch", "train", "tools", "jax"}


def level(layers: list[set[str]], name: str) -> int:
    for number, layer in enumerate(layers):
        if name in layer:
            return number
    raise AssertionError(f"{name!r} has no place in the layers of {__file__}")


def may_use(layers: list[set[str]], user: str, used: str) -> bool:
    return user == used or level(layers, used) < level(layers, user)


# ---- C ----

C_FILES = sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".c", ".h"))


def c_layer(path: Path) -> str:
    """The folder, or for a file in csrc itself the word before the underscore: api_lanes.c."""
    parts = path.relative_to(ROOT / "csrc").parts
    return parts[0] if len(parts) > 1 else path.stem.split("_")[0]


@functools.cache
def includes(path: Path) -> list[tuple[str, str]]:
    """("<" or '"', name) of every include."""
    return re.findall(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', path.read_text(), re.MULTILINE)


def own_includes(path: Path) -> list[Path]:
    """The project's files that a file includes."""
    return [(path.parent / name).resolve() for kind, name in includes(path) if kind == '"']


def reached(path: Path) -> set[Path]:
    """The file and all project files that it includes, directly or not."""
    seen: set[Path] = set()
    left = [path]
    while left:
        one = left.pop()
        if one not in seen:
            seen.add(one)
            left += own_includes(one)
    return seen


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_c_includes_point_down() -> None:
    wrong = [
        f"{named(path)} must not include {included}"
        for path in C_FILES
        for included in own_includes(path)
        if not (included.is_file() and may_use(C_LAYERS, c_layer(path), c_layer(included)))
    ]
    assert not wrong, "\n".join(wrong)


def may_include(user: Path, header: Path) -> bool:
    """Whether a file may include a header: one of its own layer, or another's interface."""
    layer = c_layer(header)
    is_interface = header == ROOT / "csrc" / INTERFACES.get(layer, "")
    return layer == c_layer(user) or layer in OPEN_LAYERS or is_interface


def test_c_layers_are_included_by_their_interfaces() -> None:
    wrong = [
        f"{named(path)} must not include {named(included)}"
        for path in C_FILES
        for included in own_includes(path)
        if not may_include(path, included)
    ]
    assert not wrong, "\n".join(wrong)
    assert {c_layer(path) for path in C_FILES} == {*INTERFACES, *OPEN_LAYERS, "api"}


@pytest.mark.parametrize("header", INTERFACES.values())
def test_an_interface_says_which_threads_may_call(header: str) -> None:
    head = (ROOT / "csrc" / header).read_text().split("*/")[0]
    assert re.search(r"\binterface\W+of\b", head)
    assert re.search(r"\b(Pure|Threading)\b", head)


def test_files_of_a_folder_call_each_other_one_way() -> None:
    folders = [path for path in (ROOT / "csrc").iterdir() if path.is_dir()]
    assert [circle for path in folders for circle in circles.circles(path)] == []


def test_a_pipe_reads_no_field_of_a_communicator() -> None:
    for path in [path for path in C_FILES if c_layer(path) in ("pipe", "cuda")]:
        assert "comm->" not in path.read_text(), named(path)


def test_a_circle_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.c").write_text("int one(void)\n{\n    return two();\n}\n")
    (tmp_path / "b.c").write_text("int two(void)\n{\n    return 2; /* one() */\n}\n")
    assert circles.circles(tmp_path) == []
    (tmp_path / "b.c").write_text("int two(void)\n{\n    return three();\n}\n")
    (tmp_path / "b.h").write_text("static inline int three(void)\n{\n    return one();\n}\n")
    assert circles.circles(tmp_path) == [["a", "b"]]


def is_pure(path: Path) -> bool:
    return c_layer(path) in ("plan", "kernels", "codec", "sparse") or (
        c_layer(path) == "net" and path.stem == "frame"
    )


def test_plan_kernels_codec_and_frame_touch_no_os() -> None:
    pure = set().union(*(reached(path) for path in C_FILES if is_pure(path)))
    wrong = [
        f"{named(path)} includes {name}"
        for path in sorted(pure)
        for kind, name in includes(path)
        if kind == "<" and name not in PURE_HEADERS
    ]
    assert not wrong, "\n".join(wrong)


def test_only_api_implements_the_public_functions_of_communicators_and_works() -> None:
    """Where arguments are checked, and nowhere else."""
    defined = re.compile(
        r"^(?:\w+[ *]+)+\*?(rc_(?:comm_|work_|feedback_|submit)\w*)\([^;]*?\)\s*\{", re.MULTILINE
    )
    places = {name: path.name for path in C_FILES for name in defined.findall(path.read_text())}
    assert "rc_submit" in places
    assert set(places.values()) == {"api.c", "api_lanes.c"}, places


# ---- Python ----

PYTHON_FILES = sorted(
    path for path in (ROOT / "ringcomm").rglob("*.py") if "__pycache__" not in path.parts
)


def python_layer(parts: tuple[str, ...]) -> str:
    """Of a module's path below the package: its first folder or name, with core the second, too."""
    if parts[:1] == ("core",) and len(parts) > 1 and parts[1] != "__init__":
        return f"core.{parts[1]}"
    return parts[0] if parts and parts[0] != "__init__" else "ringcomm"


def module_parts(path: Path) -> tuple[str, ...]:
    return path.relative_to(ROOT / "ringcomm").with_suffix("").parts


def absolute(path: Path, node: ast.ImportFrom) -> tuple[str, ...]:
    """The module that `from ... import` names, in parts from the top."""
    named = tuple(node.module.split(".")) if node.module else ()
    if node.level == 0:
        return named
    here = ("ringcomm", *module_parts(path))[: -node.level]
    return here + named


def imports(path: Path) -> Iterator[tuple[str, ...]]:
    """Every module that a file imports, also late or for types, as far as it can be a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = absolute(path, node)
            for alias in node.names:
                inner = ROOT.joinpath(*module, alias.name)
                is_module = inner.is_dir() or inner.with_suffix(".py").is_file()
                yield (*module, alias.name) if is_module else module


IMPORTED = {path: set(imports(path)) for path in PYTHON_FILES}


def test_python_imports_point_down() -> None:
    wrong = []
    for path, modules in IMPORTED.items():
        user = python_layer(module_parts(path))
        for module in sorted(modules):
            if module[:2] == ("ringcomm", "_core"):
                right = user == "core.native"  # which alone loads the extension
            else:
                right = module[0] != "ringcomm" or may_use(
                    PYTHON_LAYERS, user, python_layer(module[1:])
                )
            if not right:
                wrong.append(f"{named(path)} must not import {'.'.join(module)}")
    assert not wrong, "\n".join(wrong)


def test_the_core_alone_calls_the_extension() -> None:
    wrong = [
        f"{named(path)}: {call}"
        for path in PYTHON_FILES
        if module_parts(path)[0] != "core"
        for call in re.findall(r"\brc_\w+\(|lib\.rc_\w+", path.read_text())
    ]
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other() -> None:
    graph = {("ringcomm", *module_parts(path)): modules for path, modules in IMPORTED.items()}
    packages = {name[:-1]: modules for name, modules in graph.items() if name[-1] == "__init__"}
    graphlib.TopologicalSorter({**graph, **packages}).prepare()  # raises CycleError


def test_the_callers_libraries_are_left_to_the_caller() -> None:
    wrong = [
        f"{named(path)} must not import {module[0]}"
        for path, modules in IMPORTED.items()
        for module in sorted(modules)
        if module[0] in CALLERS_LIBRARIES
        and python_layer(module_parts(path)) not in MAY_IMPORT_THEM
    ]
    assert not wrong, "\n".join(wrong)


def test_the_rule_bites() -> None:
    """What the tables above must forbid, said once without them."""
    assert not may_use(C_LAYERS, "plan", "codec")
    assert not may_use(C_LAYERS, "plan", "kernels")
    assert not may_use(C_LAYERS, "net", "coll")
    assert may_use(C_LAYERS, "codec", "kernels")
    assert not may_include(ROOT / "csrc/api.c", ROOT / "csrc/net/lane.h")
    assert may_include(ROOT / "csrc/net/link.h", ROOT / "csrc/net/lane.h")
    assert may_include(ROOT / "csrc/api.c", ROOT / "csrc/base/clock.h")
    assert not may_use(PYTHON_LAYERS, "bootstrap", "core.native")
    assert not may_use(PYTHON_LAYERS, "core.views", "communicator")
    assert may_use(PYTHON_LAYERS, "train", "torch")
    with pytest.raises(AssertionError, match="no place"):
        level(C_LAYERS, "misc")


# ---- every file ----


def source_files() -> list[Path]:
    """C and Python files of the project, as git sees it where there is git."""
    folders = ("csrc", "ringcomm", "tests", "bench", "tools", "examples")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders, "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0:
        found = [ROOT / line for line in listed.stdout.splitlines()]
    else:
        found = [path for folder in folders for path in (ROOT / folder).rglob("*")]
        found += ROOT.glob("*.py")
    kinds = (".c", ".h", ".py", ".pyi", ".cu", ".cuh")
    return sorted({path for path in found if path.suffix in kinds and path.is_file()})


def says_what_it_is(path: Path, text: str) -> bool:
    """By a docstring or a comment at its head."""
    head = r'"""\S' if path.suffix in (".py", ".pyi") else r"/\*.{20}"
    return bool(re.match(head, text.removeprefix("#!/usr/bin/env python3\n"), re.DOTALL))


def test_every_file_is_short_and_says_what_it_is() -> None:
    texts = {path: path.read_text() for path in source_files()}
    assert texts
    long = [named(path) for path, text in texts.items() if len(text.splitlines()) > MOST_LINES]
    assert not long, f"these have more than {MOST_LINES} lines: {long}"
    headless = [named(path) for path, text in texts.items() if not says_what_it_is(path, text)]
    assert not headless, f"these do not say what they are: {headless}"
