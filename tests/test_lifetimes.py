"""Memory that the core borrows stays valid until it is done, whoever drops what (lifetimes.py)."""

from __future__ import annotations

import pytest
from beside import Done


@pytest.mark.torch
@pytest.mark.beside("{python}", "tests/lifetimes.py", "{folder}")
def test_no_memory_is_touched_that_was_let_go_of(beside: Done) -> None:
    assert beside.code == 0, beside.output
    assert " cases, 0 failed" in beside.output, beside.output
