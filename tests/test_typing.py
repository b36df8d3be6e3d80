"""The package's types: what users write passes mypy --strict, and what they get wrong does not."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path
from typing import Literal, get_args

import pytest
from beside import Done
from ranks import World

import ringcomm
from ringcomm.codecs import CODECS
from ringcomm.config import ALGORITHMS
from ringcomm.core import native
from ringcomm.core.calls import OPS

ROOT = Path(__file__).resolve().parent.parent

mypy = pytest.mark.beside(
    *(sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", "{folder}"),
    *("tests/typed/right.py", "tests/typed/wrong.py"),
)


def complaints(done: Done, name: str) -> set[int]:
    """Numbers of the lines of a file in which mypy finds an error."""
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed")
    assert "wrong.py:" in done.output, done.output
    return {int(line) for line in re.findall(rf"{name}:(\d+): error: ", done.output)}


@mypy
def test_what_users_write_is_well_typed(beside: Done) -> None:
    assert not complaints(beside, "right.py"), beside.output


@mypy
def test_what_users_get_wrong_is_found(beside: Done) -> None:
    text = (ROOT / "tests/typed/wrong.py").read_text()
    before, _, wrong = text.partition("x = bytearray(4)\n")
    first = before.count("\n") + 2
    lines = set(range(first, first + len(wrong.splitlines())))
    assert complaints(beside, "wrong.py") == lines, beside.output


def test_the_stub_is_made_from_the_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from make_stub import STUB, stub

    kept, made = ast.parse(STUB.read_text()), ast.parse(stub())
    assert ast.unparse(kept) == ast.unparse(made), "run python tools/make_stub.py"


def test_the_names_that_types_have_are_those_that_work() -> None:
    assert get_args(ringcomm.Compression) == tuple(CODECS)
    assert get_args(ringcomm.Op) == tuple(OPS)
    assert get_args(ringcomm.Algorithm) == tuple(ALGORITHMS)
    known = map(native.lib.rc_algorithm_name, range(native.lib.RC_ALGORITHM_COUNT))
    assert list(map(native.text, known)) == list(ALGORITHMS)


@pytest.mark.torch
def test_what_torch_has_takes_the_same_names() -> None:
    """By its annotations: torch's own types take mypy half a minute."""
    pytest.importorskip("torch")
    from ringcomm.torch import HierarchicalState, HookState, Options
    from ringcomm.torch.codec_policy import CodecPolicy

    names, more = ringcomm.Compression | None, Literal["auto"] | CodecPolicy
    assert Options.__init__.__annotations__["compression"] in ("Compression | None", names)
    for kind in (HierarchicalState, HookState):
        said = kind.__init__.__annotations__["compression"]
        assert said in ("Compression | Literal['auto'] | CodecPolicy | None", names | more), kind


@pytest.mark.torch
def test_what_callbacks_pass_on_is_what_outer_step_takes() -> None:
    pytest.importorskip("torch")
    from ringcomm.torch import OuterStep
    from ringcomm.torch.outer.settings import OuterSettings

    takes = dict(OuterStep.__init__.__annotations__)
    for name in ("model", "optimizer", "scaler", "return"):
        del takes[name]
    passed = OuterSettings.__annotations__
    assert takes == {name: one.__forward_arg__ for name, one in passed.items()}


def test_stats_have_the_keys_of_their_types() -> None:
    with World(2, lanes=2) as world:
        stats = world.comms[0].stats()
    assert list(stats) == list(ringcomm.Stats.__annotations__)
    assert list(stats["lanes"][0]) == list(ringcomm.LaneStats.__annotations__)
    assert list(stats["rails"][0]) == list(ringcomm.RailStats.__annotations__)


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "ringcomm" / "py.typed").is_file()
