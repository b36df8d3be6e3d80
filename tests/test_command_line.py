"""``python -m ringcomm``: what it prints, and what ``dir`` shows of the package."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import ringcomm
from ringcomm import config
from ringcomm.__main__ import main

SETTINGS = Path(__file__).parents[1] / "docs" / "SETTINGS.md"
INTERNAL = ("api", "bootstrap", "codecs", "collectives", "core", "fusion", "functions")


@pytest.mark.parametrize("flag", ["--version", "-V", "version"])
def test_the_version(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([flag]) == 0
    assert capsys.readouterr().out == f"ringcomm {ringcomm.__version__}\n"


def test_the_settings_and_where_they_are_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGCOMM_INTERFACES", "lo,lo")
    monkeypatch.setenv("RINGCOMM_TIMEOUT", "12")
    monkeypatch.setenv("RINGCOMM_COMPRESSION", "int8")
    monkeypatch.setitem(os.environ, "RINGCOMM_SECRET", "do-not-show" * 3)
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines()]
    assert ["interfaces", "lo,lo", "RINGCOMM_INTERFACES"] in rows
    assert ["timeout", "12", "RINGCOMM_TIMEOUT"] in rows
    assert ["lanes", "1", "default"] in rows
    assert ["compression", "int8", "RINGCOMM_COMPRESSION"] in rows
    assert ["secret", "is", "set", "RINGCOMM_SECRET"] in rows
    assert "do-not-show" not in shown
    names = {row[0] for row in rows if row}
    assert set(config.Config().sources()) <= names


def test_values_are_shown_and_read_as_the_page_has_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RINGCOMM_KERNEL_SET", raising=False)
    assert main([]) == 0
    lines = [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
    shown = {line[0]: line[1] for line in lines if line[-1] == "default"}
    section = SETTINGS.read_text().partition("\n## Settings\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*`) \| (.*?) ?\| .* \|$", section, re.MULTILINE)
    told: dict[str, str] = {}
    for names, defaults in rows:
        fields = re.findall(r"`(\w+)`", names)
        values = defaults.split(", ") if len(fields) > 1 and defaults else [defaults] * len(fields)
        told |= dict(zip(fields, values, strict=True))
    assert shown == {name: told[name] or "-" for name in config.Config().sources()}
    for name in ("algorithm", "spin_us", "threads", "kernel_set"):
        monkeypatch.setenv("RINGCOMM_" + name.upper(), told[name])
    chosen = config.Config()
    assert (chosen.algorithm, chosen.spin_us, chosen.threads, chosen.kernel_set) == (
        "auto",
        -1,
        0,
        "",
    )


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("LANES", "many", "RINGCOMM_LANES='many' cannot be read"),
        ("KERNEL_SET", "mmx", "kernel_set='mmx': this CPU and build have scalar"),
        ("COMPRESSION", "int9", "compression='int9' is unknown"),
        ("COMPRESSION", "int4", "compression='int4' needs error feedback"),
        ("SECRET", "short", "RINGCOMM_SECRET: the secret has 5 bytes"),
        ("SECRET_FILE", "/none", "secret_file '/none' cannot be read"),
    ],
)
def test_settings_that_cannot_work(
    name: str,
    value: str,
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(f"RINGCOMM_{name}", value)
    assert main([]) == 1
    assert text in capsys.readouterr().out.splitlines()[-1]


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keygn"]) == 2
    assert "unknown command 'keygn': did you mean keygen?\nusage:" in capsys.readouterr().err
    for command in ("info", "jobs"):
        assert main([command, "x"]) == 2
        assert f"ringcomm: {command} takes no arguments\nusage:" in capsys.readouterr().err
    assert main(["tune", "--show"]) == 2
    assert "tune is gone: the cost model chooses" in capsys.readouterr().err


def test_what_an_allreduce_goes_by(capsys: pytest.CaptureFixture[str]) -> None:
    for words, chosen in (
        ("--size 4M --hosts 4 --rate 1000", "ring"),
        ("--size 4K --hosts 8", "doubling"),
        ("--size 64k --hosts 4 --rate 10000", "doubling"),
    ):
        assert main(["explain", *words.split()]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines[1:6]] == list(config.ALGORITHMS)[1:]
        assert [line.split()[0] for line in lines if line.endswith("chosen")] == [chosen]
    for words in ("big --hosts 4", "4K --hosts 1", "4K --hosts 2 --rate -1", "4K --hosts 9999999"):
        with pytest.raises(SystemExit):
            main(["explain", "--size", *words.split()])
        assert "explain: error: " in capsys.readouterr().err


def test_tab_shows_the_public_names_alone() -> None:
    assert sorted(dir(ringcomm)) == sorted(ringcomm.__all__)
    assert not set(INTERNAL) & set(dir(ringcomm))
    assert all(hasattr(ringcomm, name) for name in dir(ringcomm))
