"""bench/sources/hybrid.py: its models and cuts, what rows say, and two short jobs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import torch
from netlab import why_unavailable
from sources import _hybrid_model as model
from sources import hybrid
from sources.source import Point

pytestmark = pytest.mark.torch


def timed(**ways: float) -> dict[str, Any]:
    """A row of times by hand."""
    return {
        "ways": {
            name.replace("_", " "): {"step_s": seconds, "rounds": [seconds], "port_bytes": 1e6}
            for name, seconds in ways.items()
        },
        "parameters": 100,
        "first_parameters": 40,
        "first_cost": 0.5,
        "at": 3,
        "pieces": 6,
    }


def weights(**changes: Any) -> dict[str, Any]:
    """A row of weights by hand."""
    return {
        "same_bits": True,
        "replicas_same": True,
        "apart": 1e-6,
        "apart_in_order": 0.0,
        **changes,
    }


def test_the_cut_follows_what_is_scarce() -> None:
    """Compute in halves where there is much of it, else the parameters."""
    pieces = model.shapes("resnet")
    rich = model.cut(pieces, 64, 8, 1000.0, 100.0)
    poor = model.cut(pieces, 64, 8, 0.001, 100.0)
    cost = sum(piece.cost for piece in pieces[:rich]) / sum(piece.cost for piece in pieces)
    assert cost == pytest.approx(0.5, abs=0.02)
    share = sum(one.parameters for one in pieces[:poor]) / sum(one.parameters for one in pieces)
    assert share == pytest.approx(0.5, abs=0.05)
    assert rich < poor


def test_a_cut_sums_up_to_the_whole_model() -> None:
    """The pieces in order compute what a model in one piece does, and follow from the seed."""
    for kind, depth in (("gpt", 2), ("resnet", 20)):
        one, same, other = (
            model.pieces(kind, depth, 8, seed)
            for seed in (1, 1, 2)  # type: ignore[arg-type]
        )
        inputs, target = model.batch(kind, 2, seed=3)  # type: ignore[arg-type]
        loss = model.loss_of(torch.nn.Sequential(*one)(inputs), target)
        assert loss == model.loss_of(torch.nn.Sequential(*same)(inputs), target)
        assert loss != model.loss_of(torch.nn.Sequential(*other)(inputs), target)
        middle = torch.nn.Sequential(*one[:2])(inputs)
        assert loss == model.loss_of(torch.nn.Sequential(*one[2:])(middle), target)


def test_claims_of_weights() -> None:
    """One schedule that fails is enough."""

    def met(row: dict[str, Any]) -> bool | None:
        found = {"weights gpt 1f1b": weights(), "weights gpt gpipe": row}
        claims = {one.what: one for one in hybrid.claims(found)}
        return claims["GPT, weights by 1f1b and gpipe beside one process"].met

    assert met(weights())
    for bad in ({"same_bits": False}, {"replicas_same": False}, {"apart": 0.25}):
        assert met(weights(**bad)) is False


def test_claims_and_table_of_times() -> None:
    found = {
        "time gpt 0.25": timed(gloo=1.8, data_parallel=1.6, hybrid=1.0),
        "time gpt 4": timed(gloo=1.0, data_parallel=1.0, hybrid=1.0, sequential=3.0),
    }
    claims = {one.what: one for one in hybrid.claims(found)}
    assert claims["GPT, throughput over sequential"].met is False
    faster = claims["GPT, throughput over data parallel"]
    assert faster.met
    assert faster.ours == "1.60x (compute/exchange 0.25)", "over ringcomm's, which beats gloo's"
    weighed = claims["ResNet, weights by 1f1b and gpipe beside one process"]
    assert weighed.verdict == "not measured"
    assert hybrid.notes(found) == [
        "Over data parallel, by compute/exchange: GPT 0.25: 1.60x, 4: 1.00x."
    ]
    assert hybrid.notes({}) == []
    heads, *lines = hybrid.table(found)
    assert len(lines) == 2
    assert {len(line) for line in lines} == {len(heads)}
    assert "1.80x" in lines[0]


@pytest.mark.slow
def test_two_stages_with_replicas_train_as_one_process_does() -> None:
    """By 1F1B; ``results.py hybrid`` does it by GPipe as well."""
    settings = {
        "kind": "gpt",
        "schedule": "1f1b",
        "micro": 4,
        "samples": 8,
        "seed": 1,
        "steps": 2,
        "depth": 2,
        "width": 16,
        "lr": 0.1,
    }
    row = hybrid.measure(Point("weights gpt tiny", settings))
    assert row["same_bits"]
    assert row["replicas_same"]
    assert row["moved"] > 0
    assert row["apart"] < hybrid.TOLERANCE


@pytest.mark.slow
@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
def test_steps_are_timed() -> None:
    point = next(one for one in hybrid.points(quick=True) if one.name == "time gpt 0.25")
    settings = {**point.settings, "mbit": 4000.0, "samples": 8, "micro": 2}
    row = hybrid.measure(Point(point.name, settings))
    assert set(row["ways"]) == set(hybrid.WAYS)
    # A replica pair moves about half of the parameters once; four ranks all of them 1.5 times.
    sent = {way: one["port_bytes"] for way, one in row["ways"].items()}
    assert sent["hybrid"] < 0.6 * sent["data parallel"]
    assert sent["data parallel"] == pytest.approx(6 * row["parameters"], rel=0.1)
    assert len(hybrid.table({point.name: row})) == 2
