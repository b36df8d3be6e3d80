"""The commands of the documents, as printed: what they name is there.

The programs of this repository must exist, and say in their --help that they take the options that
the documents give them; make must know the targets. None is run to its end here.
"""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/SETTINGS.md",
    "docs/FRAMEWORKS.md",
    "bench/README.md",
)
STARTERS = ("python", "torchrun", "mpirun", "srun", "sudo", "pytest", "pip", "make", "export")


def printed(document: str) -> Iterator[str]:
    """The commands in the blocks of a document that have no language, comments left out."""
    text = (ROOT / document).read_text(encoding="utf-8")
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines() if not language else ():
            if line.split(" ")[0].startswith(STARTERS) or line.startswith("bench/"):
                yield line


COMMANDS = [(document, line) for document in DOCUMENTS for line in printed(document)]


def test_make_starts_ranks_that_torchrun_does_not_warn_of() -> None:
    """It does where the number of threads is not given."""
    for target in ("demo", "bench"):
        command = ["make", "--no-print-directory", "-n", "-o", ".venv/.demo", "-o", ".venv/.test"]
        (line,) = subprocess.check_output([*command, target], cwd=ROOT, text=True).splitlines()
        assert re.match(r"OMP_NUM_THREADS=\$\{OMP_NUM_THREADS:-1\} \.venv/bin/torchrun ", line)


def programs(line: str) -> Iterator[tuple[str, list[str]]]:
    """The programs of this repository that a command starts, each with its options."""
    words = shlex.split(line, comments=True)
    name, options = "", list[str]()
    for before, word in zip(["", *words], words, strict=False):
        is_module = before == "-m" and word.startswith("ringcomm")
        if is_module or word.endswith((".py", ".sh")):
            if name:
                yield name, options
            name, options = ("-m " if is_module else "") + word, []
        elif word == "--":
            yield name, options
            name, options = "", []
        elif name == "-m ringcomm" and not options and word == "keygen":
            name += f" {word}"
        elif word.startswith("--"):
            options.append(word.partition("=")[0])
    if name:
        yield name, options


@functools.cache
def help_of(name: str) -> str:
    done = subprocess.run(
        [sys.executable, *name.split(), "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 35
    assert list(programs("python a/netlab.py --nics 1 -- .venv/bin/python b.py --x=1")) == [
        ("a/netlab.py", ["--nics"]),
        ("b.py", ["--x"]),
    ]
    assert list(programs("mpirun -n 2 python -m ringcomm keygen --show  # --not")) == [
        ("-m ringcomm keygen", ["--show"])
    ]


@pytest.mark.parametrize(("document", "line"), COMMANDS)
def test_what_a_command_names_is_there(document: str, line: str) -> None:
    if line.startswith("make "):
        target = line.split()[1]
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        return
    for name, options in programs(line):
        if name == "your_script.py":
            continue
        if not name.startswith("-m"):
            assert (ROOT / name).exists(), f"{document}: {name}"
        if name.endswith(".sh"):
            name = name.replace(".sh", ".py")
        known = help_of(name) if options else ""
        for option in options:
            assert re.search(rf"{option}\b", known), f"{document}: {name} has no {option}"
