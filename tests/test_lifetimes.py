"""Memory that the core borrows stays valid until it is done, whoever drops what (lifetimes.py)."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
from beside import Done

from ringcomm.collectives import Collectives


@pytest.mark.torch
@pytest.mark.beside("{python}", "tests/lifetimes.py", "{folder}")
def test_no_memory_is_touched_that_was_let_go_of(beside: Done) -> None:
    assert beside.code == 0, beside.output
    assert " cases, 0 failed" in beside.output, beside.output


@pytest.mark.torch
def test_every_verb_has_a_road() -> None:
    from ringcomm.torch import stand_in

    verbs = {*stand_in.COLLECTIVES, *stand_in.MESSAGES}
    verbs |= {name for name in vars(Collectives) if not name.startswith("_")}
    if importlib.util.find_spec("jax") is not None:
        import ringcomm.jax

        verbs |= set(ringcomm.jax.__all__) - {"TreeWork"}
    roads = ast.parse(Path(__file__).with_name("lifetime_roads.py").read_text())
    named = {
        getattr(node, "attr", None) or getattr(node, "value", None) for node in ast.walk(roads)
    }
    assert verbs - {name for name in named if isinstance(name, str)} == {"barrier"}  # no memory
