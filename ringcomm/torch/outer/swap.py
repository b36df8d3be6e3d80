"""Evaluation on the anchor: the model holds it for a while, and then its own weights again.

Invariants: nothing is sent. The local weights come back whatever happens within.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from .flight import Fragment


@contextlib.contextmanager
def swapped(fragments: Iterable[Fragment]) -> Iterator[None]:
    """Within, the model's parameters and buffers are those of the anchor."""
    blocks = [unit.block for fragment in fragments for unit in fragment.units]
    locals_ = [block.local() for block in blocks]
    try:
        for block in blocks:
            block.set_local(block.anchor)
        yield
    finally:
        for block, local in zip(blocks, locals_, strict=True):
            block.set_local(local)
