"""Counts the circles among the files of each folder of csrc: files that call each other, directly
or by way of others. A file and its header are one; a function that is only named, as in a table,
counts as called.

    python tools/circles.py [TREE]      prints each circle, one a line: its folder and its files

tests/test_layers.py has none of them in a folder.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEFINED = re.compile(r"^(static inline )?[a-z][\w *]*?[ *](\w+)\([^;{}]*\)\s*\{", re.MULTILINE)
INLINE = re.compile(r"^static inline .*?^\}\n", re.DOTALL | re.MULTILINE)
TABLES = re.compile(r"^const [\w *]+?(\w+)(?:\[\])? = ", re.MULTILINE)
NO_CODE = re.compile(r'/\*.*?\*/|"(?:\\.|[^"\\\n])*"|^[ \t]*#[^\n]*', re.DOTALL | re.MULTILINE)


def code_of(path: Path) -> str:
    """A file without its comments, strings and directives; of a header, the inline functions."""
    code = NO_CODE.sub(" ", path.read_text())
    return code if path.suffix == ".c" else "".join(INLINE.findall(code))


def calls_among(folder: Path) -> dict[str, set[str]]:
    """By file, without its ending: the files of the same folder that it calls."""
    code: dict[str, str] = {}
    for path in sorted([*folder.glob("*.c"), *folder.glob("*.h")]):
        code[path.stem] = code.get(path.stem, "") + code_of(path)
    home = {
        match.group(2): stem
        for stem, text in code.items()
        for match in DEFINED.finditer(text)
        if match.group(1) or not match.group(0).startswith("static")
    }
    home |= {name: stem for stem, text in code.items() for name in TABLES.findall(text)}
    calls: dict[str, set[str]] = {}
    for stem, text in code.items():
        own = set(re.findall(r"^static [\w *]*?[ *](\w+)\(", text, re.MULTILINE))
        named = set(re.findall(r"\w+", text)) - own
        calls[stem] = {home[name] for name in named & home.keys()} - {stem}
    return calls


def reached(calls: dict[str, set[str]], start: str) -> set[str]:
    """The files that a file calls, directly or by way of others."""
    seen: set[str] = set()
    left = [start]
    while left:
        new = calls[left.pop()] - seen
        seen |= new
        left += new
    return seen


def circles(folder: Path) -> list[list[str]]:
    """The files of a folder that call each other, as lists; no file is in two."""
    calls = calls_among(folder)
    ways = {name: reached(calls, name) for name in calls}
    groups = {
        tuple(sorted(other for other in ways[name] if name in ways[other]))
        for name in calls
        if name in ways[name]
    }
    return [list(group) for group in sorted(groups)]


def main() -> None:
    tree = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    folders = [path for path in (tree / "csrc").iterdir() if path.is_dir()]
    for folder in sorted([tree / "csrc", *folders]):
        for circle in circles(folder):
            print(f"{folder.relative_to(tree)}: {' '.join(circle)}")


if __name__ == "__main__":
    main()
