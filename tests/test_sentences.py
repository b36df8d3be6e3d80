"""A docstring or comment begins with a verb or with the noun that it documents.

One that begins with "Of", "The same" or "What" leans on the line above it, and a reader who lands
on it by a search has not read that line. The rule holds for docstrings of the package, and for
comments of the core before a definition.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_LEANS = re.compile(r"(Of|The same|Those|That|As|What|Who|See)\b")
_COMMENT = re.compile(r"^/\* ?(.*)", re.M)


def _docstrings(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED):
            yield ast.get_docstring(node) or ""


def _leaning(path: Path, text: str) -> list[str]:
    """First lines of a file's docstrings or comments that lean on another line."""
    found = _docstrings(text) if path.suffix == ".py" else _COMMENT.findall(text)
    return [f"{path.name}: {one.splitlines()[0]}" for one in found if _LEANS.match(one)]


def test_each_begins_with_a_verb_or_a_noun() -> None:
    paths = [*(ROOT / "ringcomm").rglob("*.py"), *(ROOT / "csrc").rglob("*.[ch]")]
    assert len(paths) > 250
    assert not [line for path in paths for line in _leaning(path, path.read_text("utf-8"))]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", 'def sizes() -> None:\n    """Of all ranks."""\n'),
        ("a.py", '"""What is sent."""\n'),
        ("a.c", "/* The same for a sum. */\nint sum(void);\n"),
        ("a.h", "/* See link.h. */\nint next(void);\n"),
    ],
)
def test_one_that_leans_is_found(name: str, text: str) -> None:
    assert len(_leaning(Path(name), text)) == 1


def test_one_that_stands_alone_is_not() -> None:
    assert not _leaning(Path("a.py"), '"""Offsets of all ranks."""\n')
    assert not _leaning(Path("a.c"), "/* Sum of all ranks. */\nint sum(void);\n")
