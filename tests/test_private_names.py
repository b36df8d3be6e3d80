"""A module uses private names of its own alone: what another module may use has a public name.

A name with one underscore before it counts as private to the modules that define it, as a function,
a class, a variable or an attribute of ``self``. A subclass may use its base's, by ``self`` or
``super()``. Names that no module of ringcomm defines are other libraries' affair.
"""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "ringcomm"
FILES = sorted(PACKAGE.rglob("*.py"))

#: torch's, though a module of ours has one of that name as well.
FOREIGN = {"_version", "_device_types", "_set_group_name"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_own(node: ast.expr) -> bool:
    """Whether it is ``self``, ``cls`` or ``super()``."""
    if isinstance(node, ast.Call):
        node = node.func
    return isinstance(node, ast.Name) and node.id in ("self", "cls", "super")


def defined(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if is_own(node.value) else set()
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return {name for name in names if is_private(name)}


def used(tree: ast.Module) -> set[str]:
    """Private names of others, so far as their form tells."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not is_own(node.value):
            names.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.level or node.module == "ringcomm"):
            names |= {alias.name for alias in node.names}
    return {name for name in names if is_private(name)}


TREES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in FILES}
DEFINED = {name: defined(tree) for name, tree in TREES.items()}


def borrowed(name: str, tree: ast.Module) -> set[str]:
    """What a module uses that others, and not it, define."""
    elsewhere = set().union(*(names for other, names in DEFINED.items() if other != name))
    return (used(tree) & elsewhere) - defined(tree) - FOREIGN


def test_a_module_uses_its_own_private_names_alone() -> None:
    found = {name: names for name, tree in TREES.items() if (names := borrowed(name, tree))}
    assert not found, f"{found} are of other modules: name them publicly"


def test_what_is_told_apart() -> None:
    for text, expected in [
        ("state._codec_of(x)", {"_codec_of"}),
        ("from .hooks import _StepMemory", {"_StepMemory"}),
        ("self._mine = super()._theirs()", set()),
        ("other.__dict__", set()),
        ("from os import _exit", set()),
    ]:
        assert used(ast.parse(text)) == expected, text
    assert defined(ast.parse("class _A:\n def _b(self): self._c = other._d = _e = 1")) == {
        "_A",
        "_b",
        "_c",
        "_e",
    }
