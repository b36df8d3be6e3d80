"""Lightning, Accelerate and transformers train on backend "ringcomm" and with its hook, as the
docs/FRAMEWORKS.md says. The reference model gets the same weights as on gloo, to the bit."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if not all(map(importlib.util.find_spec, ("torch", "sklearn", "pytorch_lightning", "accelerate"))):
    pytest.skip("not installed: pip install '.[torch,frameworks]'", allow_module_level=True)

import torch
from faults import frameworks
from faults.job import Job, Nursery, nursery_of

from ringcomm import Communicator, ConfigError
from ringcomm.torch.frameworks import TransformersCallback

pytestmark = pytest.mark.torch

NEEDS_TRANSFORMERS = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="not installed: pip install '.[frameworks]'",
)
TORCHRUN = {
    "GLOO_SOCKET_IFNAME": "lo",
    "RINGCOMM_INTERFACES": "lo",
    "TORCHELASTIC_RUN_ID": "test",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
}


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    found = [name for name in frameworks.PRELOADED if importlib.util.find_spec(name.split(".")[0])]
    with nursery_of("faults.frameworks", *found) as made:
        yield made


@pytest.mark.parametrize(
    ("trains", "ways"),
    [
        (frameworks.by_lightning, ("backend", "hook", "start", "printed")),
        (frameworks.by_accelerate, ("backend", "hook", "printed")),
    ],
)
def test_weights_are_gloos(
    nursery: Nursery, tmp_path: Path, trains: Callable[..., None], ways: tuple[str, ...]
) -> None:
    kept = {}
    for way in ("gloo", *ways):
        with Job(nursery, 2, TORCHRUN) as job:
            job.start(trains, way=way, folder=str(tmp_path))
            for event in job.expect_all("trained"):
                assert event["backend"] == ("gloo" if way == "gloo" else "ringcomm")
            job.finish(quietly=False)
        kept[way] = [torch.load(tmp_path / f"{way}-{rank}.pt") for rank in range(2)]
    expected = kept["gloo"][0]
    assert not torch.equal(expected, frameworks.fresh_weights())
    for way, ranks in kept.items():
        for weights in ranks:
            if way in ("start", "printed"):  # which docs/FRAMEWORKS.md has with bf16
                assert torch.equal(weights, ranks[0])
                torch.testing.assert_close(weights, expected, rtol=0.02, atol=2e-3)
            else:
                assert torch.equal(weights, expected), way


@NEEDS_TRANSFORMERS
def test_the_trainer_of_transformers(nursery: Nursery, tmp_path: Path) -> None:
    with Job(nursery, 2, TORCHRUN) as job:
        job.start(frameworks.by_transformers, folder=str(tmp_path))
        for event in job.expect_all("carried"):  # 16 bits of each gradient in every step, and more
            assert event["sent"] > 3 * 2 * event["weights"]
        assert {event["backend"] for event in job.expect_all("trained")} == {"ringcomm"}
        job.finish(quietly=False)
    weights = [torch.load(tmp_path / f"transformers-{rank}.pt") for rank in range(2)]
    assert torch.equal(*weights)


@pytest.mark.parametrize("framework", ["lightning", "transformers"])
@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"every": 0}, "Invalid every: 0"),
        ({"compression": "int3"}, "compression='int3' is unknown"),
        ({"compresion": "int4"}, "did you mean compression?"),
        ({"min_peers": 1}, "min_peers= is gone: give comm=ringcomm.membership"),
    ],
    ids=str,
)
def test_callbacks_refuse_settings_when_they_are_made(
    framework: str, setting: dict[str, Any], says: str
) -> None:
    pytest.importorskip(
        "transformers" if framework == "transformers" else "pytorch_lightning",
        reason="not installed: pip install '.[frameworks]'",
    )
    module = importlib.import_module(f"ringcomm.torch.{framework}")
    with pytest.raises(ConfigError) as caught:
        module.OuterStepCallback(**setting)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("trains", "way"),
    [
        (frameworks.outer_by_lightning, "outer-lightning"),
        (frameworks.outer_of_folds_by_lightning, "outer-folds"),
        (frameworks.outer_after_errors_by_lightning, "outer-errors"),
        (frameworks.attached_by_accelerate, "attached"),
        pytest.param(
            frameworks.outer_by_transformers, "outer-transformers", marks=NEEDS_TRANSFORMERS
        ),
        pytest.param(frameworks.best_by_transformers, "best", marks=NEEDS_TRANSFORMERS),
    ],
)
def test_methods_behind_a_frameworks_back(
    nursery: Nursery, tmp_path: Path, trains: Callable[..., None], way: str
) -> None:
    with Job(nursery, 2, TORCHRUN) as job:
        job.start(trains, folder=str(tmp_path))
        job.expect_all("trained")
        job.finish(quietly=False)
    weights = [torch.load(tmp_path / f"{way}-{rank}.pt") for rank in range(2)]
    assert torch.equal(*weights)
    assert not torch.equal(weights[0], frameworks.fresh_weights())


def test_a_resumed_state_needs_no_device_of_the_rank_that_saved_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = SimpleNamespace(global_step=1, is_world_process_zero=True)
    args = SimpleNamespace(output_dir=tmp_path)
    (tmp_path / "checkpoint-1").mkdir()
    with Communicator.create(rank=0, world_size=1) as comm:
        callback = TransformersCallback(comm=comm)
        callback.on_train_begin(
            args, SimpleNamespace(global_step=0), None, model=model, optimizer=optimizer
        )
        optimizer.step()
        monkeypatch.setattr(torch.serialization, "location_tag", lambda _: "cuda:99")
        callback.on_save(args, state, None)
        callback.on_train_begin(args, state, None, model=model, optimizer=optimizer)
        assert callback.outer is not None
        assert callback.outer.iteration == 1
        callback.on_train_end(args, state, None)
