"""The reference trainer: what each rank sees, that models learn, resuming, the report.

A world of one in this process; test_train_ranks.py has two ranks, test_train_refusals.py what is
refused.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

torch = pytest.importorskip("torch")

from run_log import events  # noqa: E402

from ringcomm.errors import ConfigError  # noqa: E402
from ringcomm.torch.optim import ZeroOneAdam  # noqa: E402
from ringcomm.train import checkpoint, final_report, launcher, models, optim, sampling  # noqa: E402
from ringcomm.train.__main__ import main  # noqa: E402
from ringcomm.train.command_line import Options, _parser, parse  # noqa: E402
from ringcomm.train.data import TextWindows, load, stratified_split  # noqa: E402
from ringcomm.train.distributed import World  # noqa: E402
from ringcomm.train.engine import Engine, StepRecord  # noqa: E402
from ringcomm.train.methods import Method  # noqa: E402
from ringcomm.train.progress import Progress  # noqa: E402
from ringcomm.train.run import Run, train  # noqa: E402

pytestmark = pytest.mark.torch

_CHOICES = {action.dest: action.choices for action in _parser()._actions}
_METHODS, _OPTIMIZERS = _CHOICES["method"] or (), _CHOICES["optimizer"] or ()


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small work on a shared machine; the trainer sets the number for the whole process too."""
    before = torch.get_num_threads()
    monkeypatch.setattr(launcher, "default_threads", lambda: 1)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small(**changes: Any) -> Options:
    """A run of a second or so."""
    return dataclasses.replace(Options(steps=8), **changes)


def text_data() -> TextWindows:
    return TextWindows(b"for each rank in the ring: send, receive, add. " * 100, 32)


# ---- what each rank sees ----


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_together_see_what_one_process_sees(world_size: int, accumulate: int) -> None:
    def sampler(rank: int, size: int, parts: int) -> sampling.Sampler:
        return sampling.Sampler(50, 16, rank=rank, world_size=size, accumulate=parts, seed=3)

    whole = sampler(0, 1, 1)
    ranks = [sampler(rank, world_size, accumulate) for rank in range(world_size)]
    for step in range(2 * whole.steps_per_epoch):
        shares = [ranks[rank].share(step) for rank in range(world_size)]
        assert all(len(share) == accumulate for share in shares)
        assert len({len(part) for share in shares for part in share}) == 1
        together = torch.cat([part for share in shares for part in share])
        assert together.sort().values.equal(whole.share(step)[0].sort().values)


def test_an_epoch_repeats_no_sample_and_the_next_has_another_order() -> None:
    sampler = sampling.Sampler(50, 16, rank=0, world_size=1, accumulate=1, seed=0)
    epochs = [
        torch.cat([sampler.share(epoch * 3 + step)[0] for step in range(3)]) for epoch in (0, 1)
    ]
    assert all(len(epoch.unique()) == 48 for epoch in epochs)
    assert not epochs[0].equal(epochs[1])
    assert sampler.share(1)[0].equal(epochs[0][16:32])


def test_reading_ahead_yields_the_same_batches() -> None:
    data = load(Options())
    sampler = sampling.Sampler(data.sizes["train"], 64, rank=1, world_size=2, accumulate=2, seed=0)
    plain = list(sampling.batches(data, sampler, 20, 25))
    data.on_disk = True
    ahead = list(sampling.batches(data, sampler, 20, 25))
    assert len(plain) == len(ahead) == 5
    assert list(sampling.batches(data, sampler, 5, 5)) == []
    for a, b in zip(plain, ahead, strict=True):
        assert all(x.equal(y) for ab in zip(a, b, strict=True) for x, y in zip(*ab, strict=True))


# ---- data ----


def test_the_split_holds_out_a_fifth_of_each_class_and_nothing_twice() -> None:
    labels = torch.arange(100) % 4
    parts = stratified_split(labels)
    assert [len(part) for part in parts] == [80, 20]
    assert torch.cat(parts).unique().numel() == 100
    assert torch.bincount(labels[parts[1]]).tolist() == [5, 5, 5, 5]


def test_digits_are_the_real_ones() -> None:
    data = load(Options())
    assert data.shape == (1, 8, 8)
    assert sum(data.sizes.values()) == 1797
    assert data.fingerprint == load(Options()).fingerprint


def test_data_that_is_not_named_suits_the_model() -> None:
    named = [(model, parse(["--model", model]).data) for model in ("gpt-mini", "gpt-m", "vit-s")]
    assert named == [("gpt-mini", "stdlib-text"), ("gpt-m", "stdlib-text"), ("vit-s", "digits")]
    assert parse(["--model", "gpt-s", "--data", "stdlib-text:2"]).data == "stdlib-text:2"
    assert Options().data == "digits"


def test_text_targets_are_the_bytes_that_follow() -> None:
    data = load(Options(data="stdlib-text:0.05"))
    assert sum(data.sizes.values()) * 128 <= 50_000
    inputs, targets = data.batch("train", torch.tensor([0, 3]))
    assert inputs.shape == targets.shape == (2, 128)
    assert inputs[:, 1:].equal(targets[:, :-1])
    following, _ = data.batch("train", torch.tensor([1, 4]))
    assert targets[:, -1].equal(following[:, 0])


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    image = pytest.importorskip("PIL.Image")
    for name, level in (("bright", 255), ("dark", 0)):
        (tmp_path / name).mkdir()
        for number in range(10):
            image.new("RGB", (12, 9), (level, level, 0)).save(tmp_path / name / f"{number}.png")
    return tmp_path


def test_an_image_folder_is_split_resized_and_labelled(image_folder: Path) -> None:
    data = load(Options(data=f"folder:{image_folder}", image_size=8))
    assert data.sizes == {"train": 16, "held_out": 4}
    images, labels = data.batch("train", torch.arange(16))
    assert images.shape == (16, 3, 8, 8)
    assert images[labels == 0][:, :2].eq(1).all()
    assert images[labels == 1].eq(-1).all()


def test_an_image_folder_may_bring_its_own_split(image_folder: Path) -> None:
    for part, names in (("train", range(8)), ("val", range(8, 10))):
        for label in ("bright", "dark"):
            (image_folder / part / label).mkdir(parents=True)
            for number in names:
                source = image_folder / label / f"{number}.png"
                source.rename(image_folder / part / label / source.name)
    data = load(Options(data=f"folder:{image_folder}", image_size=8))
    assert data.sizes == {"train": 16, "held_out": 4}


@pytest.mark.parametrize("content", [b"no image", b"P6 2* 3 255\n", b"P6 99999 99999 255\n"])
def test_a_damaged_image_is_named(content: bytes, image_folder: Path) -> None:
    """Pillow raises ValueError for a size that is no number, and its own error for a large one."""
    (image_folder / "dark" / "0.png").write_bytes(content)
    data = load(Options(data=f"folder:{image_folder}"))

    def read_all() -> None:
        for part in ("train", "held_out"):
            data.batch(part, torch.arange(data.sizes[part]))

    with pytest.raises(ConfigError, match=r"dark/0\.png cannot be read"):
        read_all()


def test_a_file_that_is_not_there_is_named(image_folder: Path) -> None:
    (image_folder / "dark" / "10.png").symlink_to("/none.png")
    with pytest.raises(ConfigError, match=r"cannot be read: .*dark/10\.png"):
        load(Options(data=f"folder:{image_folder}"))


# ---- models and optimizers ----


@pytest.mark.parametrize("name", ["resnet8", "resnet20", "vit-mini", "vit-s", "gpt-mini", "gpt-s"])
def test_models_have_the_shape_of_their_targets(name: str) -> None:
    data = text_data() if name.startswith("gpt") else load(Options())
    inputs, targets = data.batch("train", torch.arange(2))
    model = models.build(name, data, seed=0)
    with torch.no_grad():
        assert model(inputs).shape == (*targets.shape, data.classes)
    assert not list(model.buffers())


@pytest.mark.parametrize("name", ["resnet8", "vit-mini", "gpt-mini"])
def test_training_lowers_the_loss_on_a_batch(name: str) -> None:
    options = small(model=name, batch=8)
    data = text_data() if name.startswith("gpt") else load(options)
    engine = Engine(models.build(name, data, seed=0), options, World())
    source = iter([[data.batch("train", torch.arange(8))]] * 20)
    losses = [engine.train_step(step, 20, source).loss for step in range(20)]
    assert losses[-1] < 0.96 * losses[0]


@pytest.mark.parametrize("kind", ["vit-m", "gpt-m"])
def test_models_of_size_m_have_25_million_parameters(kind: str) -> None:
    data = TextWindows(b"bytes " * 200, 32) if kind == "gpt-m" else load(Options())
    with torch.device("meta"):
        model = models.build(kind, data, seed=0)
    assert models.parameter_count(model) == pytest.approx(25e6, rel=0.03)


def test_weights_depend_on_the_seed_alone() -> None:
    data = load(Options())
    built = [models.build("resnet8", data, seed=seed) for seed in (1, 1, 2)]
    first, again, other = (torch.cat([p.flatten() for p in m.parameters()]) for m in built)
    assert first.equal(again)
    assert not first.equal(other)


def test_a_gpt_does_not_see_what_follows() -> None:
    model = models.build("gpt-mini", text_data(), seed=0).eval()
    tokens = torch.randint(256, (1, 32))
    changed = tokens.clone()
    changed[0, 20] += 1
    with torch.no_grad():
        difference = (model(tokens) - model(changed % 256)).abs().amax(-1)[0]
    assert difference[:20].max() == 0
    assert difference[20:].min() > 0


def test_accumulation_leaves_the_gradient_as_it_was() -> None:
    weights = []
    for accumulate in (1, 4):
        run = Run(small(accumulate=accumulate, steps=3), World())
        with Progress(run.steps, 0, quiet=True) as progress:
            run.train(progress)
        weights.append(torch.cat([p.detach().flatten() for p in run.engine.model.parameters()]))
    assert torch.allclose(*weights, rtol=1e-3, atol=1e-5)


def test_the_rate_rises_then_follows_a_cosine() -> None:
    rates = [optim.rate_at(step, 100, 2.0) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert rates[10] == 2.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(1.01)
    assert 0.02 <= rates[99] < 0.022


def test_vectors_do_not_decay() -> None:
    model = models.build("vit-mini", load(Options()), seed=0)
    options = Options(model="vit-mini")
    made = optim.make_optimizer(optim.groups(model, options), options)
    decaying, steady = made.param_groups
    assert decaying["weight_decay"] == 0.05
    assert steady["weight_decay"] == 0.0
    assert all(p.dim() == 1 for p in steady["params"])
    assert len(decaying["params"]) + len(steady["params"]) == len(list(model.parameters()))


# ---- checkpoints ----


class BrokenOffError(Exception):
    pass


@pytest.mark.parametrize(
    "task",
    [
        {"model": "resnet8", "batch": 128},
        {"model": "gpt-mini", "data": "stdlib-text:0.005", "batch": 4},
    ],
    ids=lambda task: task["model"],
)
def test_a_resumed_run_goes_on_bit_for_bit(
    task: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the end of an epoch, with momentum, and with Adam's moments."""

    def options(name: str, **changes: Any) -> Options:
        return small(
            steps=16,
            checkpoint_every=5,
            checkpoint=str(tmp_path / name),
            log_file=str(tmp_path / f"{name}.jsonl"),
            **task,
            **changes,
        )

    whole = train(options("whole"), World())

    step = Engine.train_step

    def break_off(engine: Engine, number: int, *rest: Any) -> Any:
        if number == 12:
            raise BrokenOffError
        return step(engine, number, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "train_step", break_off)
        with pytest.raises(BrokenOffError):
            train(options("broken"), World())
    resumed = train(options("broken", resume=True), World())

    curve = {
        e["step"]: (e["loss"], e["lr"], e["epoch"])
        for e in events(tmp_path / "broken.jsonl", "step")
    }
    expected = {
        e["step"]: (e["loss"], e["lr"], e["epoch"])
        for e in events(tmp_path / "whole.jsonl", "step")
    }
    assert sorted(expected) == list(range(1, 17))
    assert curve == expected
    assert resumed["held_out"] == whole["held_out"]
    assert resumed["measured_steps"] < whole["measured_steps"]
    states = [
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)
        for name in ("whole", "broken")
    ]
    assert states[0]["step"] == 16
    assert all(states[0]["model"][k].equal(states[1]["model"][k]) for k in states[0]["model"])


def test_resuming_a_finished_run_only_evaluates(tmp_path: Path) -> None:
    options = small(steps=3, checkpoint=str(tmp_path))
    first = train(options, World())
    again = train(dataclasses.replace(options, resume=True), World())
    assert again["held_out"] == first["held_out"]
    assert "step_s" not in again


def test_a_run_that_would_lose_what_the_ranks_have_left_is_refused(tmp_path: Path) -> None:
    """A finished run has none to go on with, and that of "auto" measures anew."""
    path = tmp_path / "checkpoint.pt"
    options = small(steps=3, checkpoint=str(tmp_path))
    train(options, World())
    state, again = torch.load(path, weights_only=True), dataclasses.replace(options, resume=True)
    common: dict[str, Any] = {"format": 1, "steps": 2}
    for own in ({"pace": {"means": {}}}, {"feedback": {}}, {"policy": {}, "feedback": {}}):
        torch.save({**state, "method": {**common, **own}}, path)
        train(again, World())
        torch.save({**state, "step": 2, "method": {**common, **own}}, path)
        with pytest.raises(ConfigError, match="lose; resume with two ranks or more"):
            train(again, World())
    torch.save({**state, "step": 2, "method": {**common, "policy": {"codec": "int8"}}}, path)
    train(again, World())


def test_resuming_where_nothing_is_starts_a_run(tmp_path: Path) -> None:
    train(small(steps=2, checkpoint=str(tmp_path / "new" / "folder"), resume=True), World())
    assert (tmp_path / "new" / "folder" / "checkpoint.pt").is_file()


def test_a_checkpoint_is_never_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = small(steps=3, checkpoint=str(tmp_path))
    train(options, World())
    kept = (tmp_path / "checkpoint.pt").read_bytes()
    with pytest.raises(ConfigError, match="add --resume"):
        train(options, World())

    def full_disk(state: Any, file: Any) -> None:
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(ConfigError, match="No space left"):
        checkpoint.save(tmp_path, {"step": 9})
    assert (tmp_path / "checkpoint.pt").read_bytes() == kept
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_checkpoint_that_does_not_fit_is_refused(size: int, tmp_path: Path) -> None:
    """The system takes a part of it, as where a disk gets full; torch.save says something else."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    state = {"step": 9, "model": {"weight": torch.zeros(size)}}
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"checkpoint\.pt cannot be written: File too large"):
            checkpoint.save(tmp_path, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_another_run_or_damaged_is_refused(tmp_path: Path) -> None:
    options = small(steps=2, checkpoint=str(tmp_path))
    train(options, World())
    with pytest.raises(ConfigError, match=r"--lr = 0\.1, this run has 0\.5"):
        train(dataclasses.replace(options, resume=True, lr=0.5), World())
    path = tmp_path / "checkpoint.pt"
    whole = path.read_bytes()
    renamed, empty = whole.replace(b"settings", b"settimgs"), b"\x80\x02."
    for content in (b"", whole[:100], whole[: len(whole) // 2], b"x" * 100, renamed, empty):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="damaged"):
            train(dataclasses.replace(options, resume=True), World())


def test_a_run_goes_on_with_the_settings_that_shape_its_curve(
    image_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A checkpoint of an earlier version lacks some of them, and loads."""
    images: dict[str, Any] = {"data": f"folder:{image_folder}", "image_size": 8, "batch": 4}
    for named, own, changes in (
        ("--image-size = 8, this run has 16", images, {"image_size": 16}),
        ("--every = 7, this run has 9", {"method": "outer", "every": 7}, {"every": 9}),
    ):
        path = tmp_path_factory.mktemp("kept") / "checkpoint.pt"
        options = small(steps=2, checkpoint=str(path.parent), **own)
        train(options, World())
        again = dataclasses.replace(options, resume=True)
        with pytest.raises(ConfigError, match=named):
            train(dataclasses.replace(again, **changes), World())
        state = torch.load(path, weights_only=True)
        del state["settings"][named.partition(" ")[0]]
        torch.save(state, path)
        train(again, World())


# ---- the report and the log ----


@pytest.mark.parametrize(
    ("method", "by"),
    [
        ("gradients", "ringcomm's hook"),
        ("stale", "ringcomm's hook"),
        ("outer", "OuterStep"),
        ("momentum", "ringcomm.torch.optim"),
        ("sparse", "ringcomm.torch.sparse"),
    ],
)
def test_the_report_fits_a_terminal_of_80_columns(method: str, by: str) -> None:
    """With long figures: no cell is broken over two lines."""
    parts, sizes = ("input_s", "exposed_s", "hidden_s"), ("gradient", "sent", "wire", "shared")
    measured = {
        "step_s": 299.9,
        **dict.fromkeys(parts, 99.9),
        **{f"{size}_bytes_per_step": 123.45e6 for size in sizes},
    }
    run = {
        "model": "resnet8",
        "data": "digits",
        "steps": 330,
        "world_size": 16,
        "hook": True,
        "backend": "ringcomm",
        "compression": "density 0.00012345",
        "batch": 1234567,
        "method": method,
    }
    built = final_report.build(run, {"loss": 123.4567, "perplexity": 12345.6789}, measured)
    lines = shown(built)
    for label, name, form, how in final_report._ROWS:
        if name in built:
            assert " ".join(f"{label} {form(built[name])} {how}".split()) in lines
    between = f"{by} over ringcomm, density 0.00012345 between ranks"
    assert between in " ".join(lines)


def shown(built: dict[str, Any]) -> list[str]:
    """The lines of a report, each with single spaces."""
    out = io.StringIO()
    Console(file=out, width=80, color_system=None).print(final_report.table(built))
    assert max(map(len, out.getvalue().splitlines())) <= 80
    return [" ".join(line.split()) for line in out.getvalue().splitlines()]


def test_the_report_splits_a_step_and_has_all_that_was_sent() -> None:
    """What goes through shared memory is sent, too."""
    run = {
        "model": "resnet8",
        "data": "digits",
        "steps": 9,
        "world_size": 2,
        "hook": True,
        "backend": "ringcomm",
        "compression": "bf16",
        "batch": 64,
        "method": "gradients",
    }
    measured = {
        "step_s": 0.5,
        "input_s": 0.1,
        "exposed_s": 0.1,
        "sent_bytes_per_step": 2e6,
        "wire_bytes_per_step": 0.0,
        "shared_bytes_per_step": 2e6,
    }
    lines = shown(final_report.build(run, {"loss": 1.0}, measured))
    assert "throughput 128 samples/s global batch / step" in lines
    assert "compute 300.00 ms step - input - exposed" in lines
    assert "efficiency 75.0% compute / (compute + exposed)" in lines
    assert "sent per step and rank 2.00 MB ports and shared memory" in lines
    assert "over ports 0 bytes by TCP" in lines
    assert not any("hidden" in line for line in lines)


def test_the_report_of_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "runs" / "log.jsonl"
    report = train(small(steps=24, log_file=str(log)), World())
    assert 0 <= report["held_out"]["accuracy"] <= 1
    assert report["held_out"]["loss"] > 0
    assert report["steps"] == 24
    assert report["measured_steps"] == 19
    assert report["step_s"] > report["input_s"] > 0
    assert report["samples_per_s"] == pytest.approx(64 / report["step_s"])
    assert [e["step"] for e in events(log, "step")] == list(range(1, 25))
    assert [e["step"] for e in events(log, "held_out")] == [22]
    assert len(events(log, "config")) == 1
    assert events(log, "report")[0]["held_out"] == report["held_out"]
    out = capsys.readouterr().out
    assert "held-out accuracy" in out
    assert "\x1b" not in out


def test_all_figures_are_means_over_the_latest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the hook remembers. Step n takes n seconds, in which others are waited for."""
    step, waited = Engine.train_step, [0.0]

    def slow(engine: Engine, number: int, *rest: Any) -> StepRecord:
        waited[0] += number
        return dataclasses.replace(step(engine, number, *rest), step_s=number, input_s=0.0)

    monkeypatch.setattr(Engine, "train_step", slow)
    monkeypatch.setattr(Method, "totals", lambda _: {"exposed_s": waited[0]})
    for remembered, measured in ((6, range(14, 20)), (1000, range(5, 20))):
        monkeypatch.setattr("ringcomm.train.run.KEPT", remembered)
        report = train(small(steps=20), World())
        assert report["measured_steps"] == len(measured)
        mean = pytest.approx(sum(measured) / len(measured))
        assert (report["step_s"], report["exposed_s"]) == (mean, mean)


def test_a_loss_that_is_not_finite_ends_the_run_and_spoils_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    arguments = f"--lr 1e30 --steps 6 --checkpoint {tmp_path} --log-file {log}"
    assert main([*arguments.split(), "--checkpoint-every", "3"]) == 2
    assert "lower --lr" in capsys.readouterr().err
    assert not (tmp_path / "checkpoint.pt").exists()
    assert all(json.loads(line) for line in log.read_text().splitlines())


def test_text_reports_perplexity() -> None:
    options = small(model="gpt-mini", data="stdlib-text:0.02", batch=8, steps=2)
    report = train(options, World())
    assert 1 < report["held_out"]["perplexity"] < 400


def test_a_perplexity_that_is_no_number_of_the_machine_is_infinite() -> None:
    run = Run(small(model="gpt-mini", data="stdlib-text:0.005", batch=8, steps=2), World())
    with torch.no_grad():
        for weight in run.engine.model.parameters():
            weight.mul_(100)
    figures = run.engine.evaluate(run.data)
    assert figures["perplexity"] == math.inf
    assert 710 < figures["loss"] < math.inf


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this PyTorch has no Muon")
def test_muon_trains_hidden_matrices_and_adamw_the_rest() -> None:
    run = Run(small(model="vit-mini", optimizer="muon", steps=2, batch=8), World())
    before = [p.detach().clone() for p in run.engine.model.parameters()]
    with Progress(run.steps, 0, quiet=True) as progress:
        run.train(progress)
    after = list(run.engine.model.parameters())
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    together = run.engine.method.optimizer
    assert [type(one).__name__ for one in together.parts] == ["Muon", "AdamW"]
    kept = together.state_dict()
    together.load_state_dict(kept)
    assert kept.keys() == {"0", "1"}


def _goes(method: str, optimizer: str) -> bool:
    own = {"momentum": set(_OPTIMIZERS) - {"muon"}, "sparse": {"sgd", "adamw"}}
    return optimizer in own.get(method, {"sgd", "adamw", "muon"})


def test_a_method_and_an_optimizer_that_do_not_go_together_are_refused() -> None:
    for method, optimizer in itertools.product(_METHODS, _OPTIMIZERS):
        given = ["--method", method, "--optimizer", optimizer, "--model", "vit-mini"]
        if _goes(method, optimizer):
            assert parse(given).optimizer == optimizer
        else:
            with pytest.raises(ConfigError, match="--method"):
                parse(given)


@pytest.mark.parametrize(
    ("method", "optimizer"),
    [
        (method, optimizer)
        for method in ("momentum", "sparse")  # the others differ from training alone by what ranks
        for optimizer in _OPTIMIZERS  # exchange
        if _goes(method, optimizer)
    ],
)
def test_a_method_and_an_optimizer_train(
    method: str, optimizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--method", method, "--optimizer", optimizer, "--steps", "2"]) == 0
    assert "held-out loss" in capsys.readouterr().out


def test_zero_one_adam_learns_its_variance_in_the_first_third_of_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[int] = []

    class Spied(ZeroOneAdam):
        def __init__(self, *args: Any, var_freeze_step: int, **settings: Any) -> None:
            given.append(var_freeze_step)
            super().__init__(*args, var_freeze_step=var_freeze_step, **settings)

    monkeypatch.setattr("ringcomm.torch.optim.ZeroOneAdam", Spied)
    Run(small(method="momentum", optimizer="zero-one-adam", steps=20), World())
    assert given == [6]
