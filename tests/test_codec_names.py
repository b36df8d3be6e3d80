"""The codecs that documents, help texts and docstrings list are those that codecs.py has."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from ringcomm import Communicator
from ringcomm.codecs import CODECS, Codec, names, parse
from ringcomm.core.native import lib, text
from ringcomm.train.command_line import _parser

ROOT = Path(__file__).resolve().parent.parent


def named(text: str) -> set[str]:
    """The codecs in a text, as whole words; none is always one."""
    words = set(re.findall(r"[\w-]+", text))
    return words & set(CODECS) | {"none"}


def test_the_page_has_a_row_of_each() -> None:
    page = (ROOT / "docs" / "COMPRESSION.md").read_text()
    table = page.split("| `compression=` |")[1].split("\n\n")[0]
    rows = [line.split("|")[1:4] for line in table.splitlines()[2:]]
    found: dict[str, tuple[float, str]] = {}
    for codecs, bits, feedback in rows:
        listed = re.findall(r"[\w-]+", codecs)
        numbers = [float(number) for number in bits.split(",")] * len(listed)
        for name, number in zip(listed, numbers, strict=False):
            found[name.lower()] = (number, feedback.strip())
    assert {parse(name).name for name in found} == set(CODECS)
    for name, (bits, feedback) in found.items():
        codec = parse(name)
        assert bits == pytest.approx(codec.bits, abs=0.0051), name
        assert (feedback == "needed") == codec.needs_feedback, name
        assert (feedback == "") == (not codec.quantises), name


def test_the_wire_format_numbers_each() -> None:
    row = re.search(r"^\| 12-15 \| codec \| (.*) \|$", (ROOT / "docs/WIRE.md").read_text(), re.M)
    assert row is not None
    listed = {name: int(number) for number, name in re.findall(r"(\d+) \(?([\w-]+)", row[1])}
    assert listed == {codec.name: codec.number for codec in CODECS.values()}


def test_the_core_numbers_each() -> None:
    known = [text(lib.rc_codec_name(number)) for number in range(lib.RC_CODEC_COUNT)]
    assert known == sorted(CODECS, key=lambda name: CODECS[name].number)


def test_the_docstring_of_an_allreduce_names_each() -> None:
    said = inspect.getdoc(Communicator.allreduce)
    assert said is not None
    assert named(said) == set(CODECS)


def test_the_trainers_help_names_what_it_takes() -> None:
    shown = re.sub(r"\s+", " ", _parser().format_help())
    listed = re.search(r"codec on the wire: (.*?)\(default", shown)
    assert listed is not None
    assert named(listed[1]) == set(CODECS)


@pytest.mark.torch
def test_what_torch_has_names_what_it_takes() -> None:
    pytest.importorskip("torch")
    from ringcomm.torch import HookState, Options

    def about(kind: type) -> set[str]:
        found = re.search(r"^ +compression: (.*?)^ +\w+: ", kind.__doc__ or "", re.M | re.S)
        assert found is not None
        return named(found[1])

    assert about(HookState) == set(CODECS)
    assert about(Options) == {codec.name for codec in CODECS.values() if not codec.needs_feedback}


def test_names() -> None:
    def gentle(codec: Codec) -> bool:
        return not codec.quantises

    assert names() == ", ".join(CODECS)
    assert names(gentle) == "none, bf16, fp16"


@pytest.mark.parametrize(
    "script", ["codecs.py", "measure/codec_rank.py", "gpu_checks/link_rank.py"]
)
def test_the_benchmarks_ask_the_library(script: str) -> None:
    text = (ROOT / "bench" / script).read_text()
    assert "parse(codec)" in text
    assert "WITH_FEEDBACK =" not in text
