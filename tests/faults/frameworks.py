"""Ranks that train the reference model by Lightning and by Accelerate: on gloo, on backend
"ringcomm", and with the hook as the snippets of docs/FRAMEWORKS.md have it.

The libraries take seconds to import, which the nursery does once for all ranks (PRELOADED); the
test's own process goes without them.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults.rank import Rank
from readme import code
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ringcomm.torch  # noqa: F401
from ringcomm.errors import ConfigError
from ringcomm.train import models
from ringcomm.train.command_line import Options
from ringcomm.train.data import load

PRELOADED = (
    "torch._dynamo",
    "sklearn.datasets",
    "pytorch_lightning",
    "accelerate",
    "transformers.trainer",
    "transformers.models.gpt2",
)
STEPS, BATCH = 4, 16


def fresh_weights() -> torch.Tensor:
    """As all ranks begin with them."""
    return _weights(models.build("resnet8", load(Options()), seed=1))


def _weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def _start(rank: Rank) -> tuple[nn.Module, DataLoader[Any]]:
    """The model and the batches of all ranks, of which each takes its own."""
    os.environ["LOCAL_RANK"] = str(rank.number)
    warnings.simplefilter("ignore")  # what they think of few workers and short runs
    torch.set_num_threads(1)
    data = load(Options())
    model = models.build("resnet8", data, seed=1)
    images, labels = data.batch("train", torch.arange(2 * STEPS * BATCH))
    return model, DataLoader(TensorDataset(images, labels), batch_size=BATCH)


def _end(rank: Rank, model: nn.Module, folder: str, way: str) -> None:
    torch.save(_weights(model), f"{folder}/{way}-{rank.number}.pt")
    rank.emit("trained", backend=dist.get_backend())
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # without the seconds in which the interpreter would take all that apart


def _module(inner: nn.Module, registers: bool) -> Any:
    from pytorch_lightning import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def on_fit_start(self) -> None:
            if registers:
                exec(code("on_fit_start"), {"self": self})

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.inner(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    return Module()


def by_lightning(rank: Rank, way: str, folder: str) -> None:
    """gloo; backend; hook: given to the strategy; start: registered in on_fit_start; printed: the
    strategy as it is in docs/FRAMEWORKS.md, which leaves the hook out on a CPU."""
    import pytorch_lightning as lightning
    from pytorch_lightning.strategies import DDPStrategy

    model, loader = _start(rank)
    strategy = DDPStrategy(process_group_backend="gloo" if way == "gloo" else "ringcomm")
    if way == "printed":
        names: dict[str, Any] = {}
        exec(code("lightning"), names)
        strategy = names["strategy"]
    if way == "hook":
        names = {}
        exec(code("lightning").replace('"bf16"', '"none"'), names)
        strategy = names["strategy"]
        strategy._register_ddp_hooks = lambda: _register(strategy)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(_module(model, way == "start"), loader)
    _end(rank, model, folder, way)


def _register(strategy: Any) -> None:
    """What the strategy does of itself where it sees a GPU, and only there."""
    from pytorch_lightning.strategies.ddp import _register_ddp_comm_hook

    _register_ddp_comm_hook(
        strategy.model,
        strategy._ddp_comm_state,
        strategy._ddp_comm_hook,
        strategy._ddp_comm_wrapper,
    )


def by_accelerate(rank: Rank, way: str, folder: str) -> None:
    """gloo; backend; hook: registered on the prepared model; printed: that, with bf16."""
    inner, loader = _start(rank)
    names: dict[str, Any] = {"model": inner, "loader": loader, "torch": torch}
    names["optimizer"] = torch.optim.SGD(inner.parameters(), lr=0.1, momentum=0.9)
    printed = code("accelerate")
    if way != "printed":
        printed = printed.replace('"bf16"', '"none"')
    left_out = {
        "gloo": ("init_process_group", "register_comm_hook"),
        "backend": ("register_comm_hook",),
        "hook": (),
        "printed": (),
    }
    lines = [line for line in printed.splitlines() if not any(w in line for w in left_out[way])]
    exec("\n".join(lines), names)
    model, optimizer, accelerator = names["model"], names["optimizer"], names["accelerator"]
    for images, labels in names["loader"]:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(images), labels))
        optimizer.step()
    _end(rank, inner, folder, way)


def _trainer(*callbacks: Any, max_steps: int = STEPS, **settings: Any) -> Any:
    from pytorch_lightning import Trainer
    from pytorch_lightning.strategies import DDPStrategy

    return Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="ringcomm"),
        max_steps=max_steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=list(callbacks),
        num_sanity_val_steps=0,
        limit_val_batches=1,
        **settings,
    )


def outer_by_lightning(rank: Rank, folder: str) -> None:
    """The callback: a round and a last one, validation and a checkpoint in between."""
    import pytorch_lightning as lightning

    from ringcomm.torch.lightning import OuterStepCallback

    model, loader = _start(rank)
    seen: list[torch.Tensor] = []

    def validation_step(module: Any, batch: Any, number: int) -> None:
        if number == 0:
            seen.append(_weights(module.inner).clone())

    def on_save_checkpoint(module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["of the module"] = True

    class Saves(lightning.Callback):
        """Between two rounds, where each rank has weights of its own."""

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                for kind, weights_only in (("whole", False), ("weights", True)):
                    trainer.save_checkpoint(f"{folder}/{kind}.ckpt", weights_only=weights_only)
                with callback.outer.anchor():  # type: ignore[union-attr]
                    torch.save(_weights(model), f"{folder}/anchor-{rank.number}.pt")
                torch.save(_weights(model), f"{folder}/own-{rank.number}.pt")

    module = _module(model, False)
    type(module).validation_step = validation_step
    type(module).on_save_checkpoint = on_save_checkpoint
    callback = OuterStepCallback(every=3, outer="mean", compression="none")
    trainer = _trainer(callback, Saves(), val_check_interval=2)
    trainer.fit(module, loader, loader)
    path = f"{folder}/kept.ckpt"
    trainer.save_checkpoint(path)
    group: Any = dist.group.WORLD
    all_seen = group.comm.allgather(seen[0])
    assert torch.equal(all_seen[0], all_seen[1])  # the anchor, not what each has trained
    state = torch.load(path, weights_only=True)
    (own,) = [one for key, one in state["callbacks"].items() if key.startswith("OuterStepCallback")]
    last = torch.cat([own["anchor"][name].reshape(-1) for name, _ in module.named_parameters()])
    assert torch.equal(last, _weights(model))  # behind the last round, with all training
    anchor = torch.load(f"{folder}/anchor-0.pt")
    assert not torch.equal(anchor, torch.load(f"{folder}/own-0.pt"))
    for kind in ("whole", "weights"):
        state = torch.load(f"{folder}/{kind}.ckpt", weights_only=True)
        names = [name for name, _ in module.named_parameters()]
        kept = torch.cat([state["state_dict"][name].reshape(-1) for name in names])
        assert torch.equal(kept, anchor), kind
        assert state["of the module"]
        assert ("callbacks" in state) == (kind == "whole")
    _end(rank, model, folder, "outer-lightning")


def outer_of_folds_by_lightning(rank: Rank, folder: str) -> None:
    """One callback for several models: each begins from weights of its own, unless a checkpoint of
    this training is given."""
    import pytorch_lightning as lightning

    from ringcomm.torch.lightning import OuterStepCallback

    callback = OuterStepCallback(every=3, compression="none")
    begun: list[tuple[torch.Tensor, int]] = []

    class Sees(lightning.Callback):
        def on_train_start(self, _: Any, module: Any) -> None:
            assert callback.outer is not None
            begun.append((_weights(module).clone(), callback.outer.iteration))

    model, loader = _start(rank)
    module, fresh = _module(model, False), _weights(model).clone()
    type(module).test_step = lambda *_: None
    first = _trainer(callback, Sees())
    first.fit(module, loader)
    path = f"{folder}/first.ckpt"
    first.save_checkpoint(path)
    for tests in (False, True):
        if tests:
            _trainer(callback).test(module, loader, ckpt_path=path)
        model, _ = _start(rank)
        _trainer(callback, Sees()).fit(_module(model, False), loader)
        assert torch.equal(begun[-1][0], fresh), tests
        assert begun[-1][1] == 0
    _trainer(callback, Sees(), max_steps=STEPS + 1).fit(module, loader, ckpt_path=path)
    assert begun[-1][1] == STEPS
    _end(rank, model, folder, "outer-folds")


def outer_after_errors_by_lightning(rank: Rank, folder: str) -> None:
    """Trainings that raise, in a step and in validation, and others of that model after them."""
    import pytorch_lightning as lightning

    from ringcomm.torch.lightning import OuterStepCallback

    model, loader = _start(rank)
    module = _module(model, False)
    type(module).validation_step = lambda *_: None
    own_hook = module.on_save_checkpoint

    def require_anchor_saved(trainer: Any, callback: Any) -> None:
        path = f"{folder}/anchor.ckpt"
        trainer.save_checkpoint(path, weights_only=True)
        saved = torch.load(path, weights_only=True)["state_dict"]
        own = _weights(model)
        with callback.outer.anchor():
            assert torch.equal(torch.cat([saved[n].flatten() for n in names]), _weights(model))
            assert not torch.equal(own, _weights(model))
        dist.barrier()

    class Raises(lightning.Callback):
        """Between two rounds, where each rank has weights of its own."""

        where = "nowhere"

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                require_anchor_saved(trainer, callback)
                if self.where == "step":
                    raise KeyboardInterrupt

        def on_validation_batch_end(self, *_: Any) -> None:
            if self.where == "validation":
                raise RuntimeError("from a test")

    names = [name for name, _ in module.named_parameters()]
    first, other = (OuterStepCallback(every=3, compression="none") for _ in range(2))
    for callback, where in ((first, "step"), (first, "validation"), (other, "step")):
        raises = Raises()
        raises.where = where
        trainer = _trainer(callback, raises, val_check_interval=2)
        with pytest.raises((SystemExit, RuntimeError), match=r"^1$|from a test"):
            trainer.fit(module, loader, loader)
        require_anchor_saved(trainer, callback)
    callback = first
    _trainer(callback, Raises(), val_check_interval=2).fit(module, loader, loader)
    assert module.on_save_checkpoint == own_hook
    _end(rank, model, folder, "outer-errors")


def _arguments(**settings: Any) -> Any:
    """Makes a Trainer's settings for five steps on a CPU."""
    from transformers import TrainingArguments

    return TrainingArguments(
        "out",
        per_device_train_batch_size=4,
        max_steps=5,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **settings,
    )


def outer_by_transformers(rank: Rank, folder: str) -> None:
    """The callback, after a training that has raised: rounds, and a checkpoint that has the
    anchor's state beside it."""
    from transformers import Trainer, TrainerCallback

    from ringcomm.torch.transformers import OuterStepCallback

    model, dataset = _gpt2(rank, folder)
    dist.init_process_group("ringcomm")
    callback = OuterStepCallback(every=3, compression="int8")
    settings = _arguments(save_steps=4)

    class Raises(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("from a test")

    raises = Raises()
    trainer = Trainer(
        model=model, args=settings, train_dataset=dataset, callbacks=[callback, raises]
    )
    with pytest.raises(RuntimeError, match="from a test"):
        trainer.train()
    trainer.remove_callback(raises)
    trainer.train()
    dist.barrier()
    kept = torch.load("out/checkpoint-4/outer_step.pt", weights_only=True)
    assert kept
    if rank.number == 0:
        shutil.copytree("out/checkpoint-4", "moved")  # from where it resumes
        os.rename("out/checkpoint-4", "out/other")
    dist.barrier()
    found = []

    class Sees(TrainerCallback):
        def on_train_begin(self, _: Any, state: Any, control: Any, **__: Any) -> None:
            found.append(callback.outer.iteration)  # type: ignore[union-attr]
            callback.on_save(SimpleNamespace(output_dir="nowhere"), state, control)

    for resume_from, expected, told in (("moved", 4, 0), (None, 0, 1)):
        model, _ = _gpt2(rank, folder)
        callback = OuterStepCallback(resume_from=resume_from, every=3, compression="int8")
        callbacks = [callback, Sees()]
        trainer = Trainer(model=model, args=settings, train_dataset=dataset, callbacks=callbacks)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.train(resume_from_checkpoint="moved")
        assert found[-1] == expected, found
        assert sum("give OuterStepCallback(resume_from" in str(w.message) for w in caught) == told
        unsaved = sum("there is no nowhere/checkpoint-4" in str(w.message) for w in caught)
        assert unsaved == (rank.number == 0)
        dist.barrier()
    _end(rank, model, folder, "outer-transformers")


def best_by_transformers(rank: Rank, folder: str) -> None:
    """The best model is loaded after training that stops between two evaluations."""
    from transformers import Trainer, TrainerCallback

    from ringcomm.torch.transformers import OuterStepCallback

    model, dataset = _gpt2(rank, folder)
    dist.init_process_group("ringcomm")
    saved: list[torch.Tensor] = []

    class Stops(TrainerCallback):
        def on_save(self, *_: Any, **__: Any) -> None:
            saved.append(_weights(model).clone())

        def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
            control.should_training_stop = state.global_step == 3

    settings = _arguments(
        eval_strategy="steps", eval_steps=2, save_steps=2, load_best_model_at_end=True
    )
    callbacks = [OuterStepCallback(every=30), Stops()]
    Trainer(model, settings, None, dataset, dataset[:4], callbacks=callbacks).train()
    (best,) = saved
    assert torch.equal(_weights(model), best)
    _end(rank, model, folder, "best")


def attached_by_accelerate(rank: Rank, folder: str) -> None:
    """attach() of a model that prepare() has wrapped: the hook, and an optimizer of ours."""
    from accelerate import Accelerator

    from ringcomm.torch import attach
    from ringcomm.torch.optim import SGD

    inner, loader = _start(rank)
    dist.init_process_group("ringcomm")
    assert "Accelerator.prepare" in _refusal(lambda: attach(inner, compression="bf16"))
    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(inner, loader)
    state = attach(inner, compression="bf16")
    _train_a_step(accelerator, model, loader, torch.optim.SGD(inner.parameters(), lr=0.1))
    assert state.report().buckets > 0
    assert "has a hook already" in _refusal(lambda: attach(inner))
    other = models.build("resnet8", load(Options()), seed=1)
    optimizer = SGD(other.parameters(), lr=0.1, momentum=0.9, compression="onebit")
    wrapped, prepared = accelerator.prepare(other, optimizer)
    assert attach(other, prepared) is optimizer
    _train_a_step(accelerator, wrapped, loader, prepared)
    assert optimizer.carried > 0
    assert not wrapped.require_backward_grad_sync
    _end(rank, other, folder, "attached")


def _refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except ConfigError as error:
        return str(error)
    return "nothing was refused"


def _train_a_step(accelerator: Any, model: Any, loader: Any, optimizer: Any) -> None:
    images, labels = next(iter(loader))
    optimizer.zero_grad()
    accelerator.backward(nn.functional.cross_entropy(model(images), labels))
    optimizer.step()


def _gpt2(rank: Rank, folder: str) -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    """A GPT-2 of a few hundred parameters, and data."""
    from transformers import GPT2Config, GPT2LMHeadModel

    os.environ["LOCAL_RANK"] = str(rank.number)
    os.chdir(folder)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 8, "vocab_size": 16}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    tokens = torch.randint(0, 16, (16 * BATCH, 8), generator=torch.Generator().manual_seed(2))
    return model, [{"input_ids": row, "labels": row} for row in tokens]


def by_transformers(rank: Rank, folder: str) -> None:
    """The Trainer, of a GPT-2 of a few hundred parameters that is made here."""
    model, dataset = _gpt2(rank, folder)
    before = _weights(model).clone()
    exec(code("transformers"), {"model": model, "dataset": dataset})
    group: Any = dist.group.WORLD
    rank.emit("carried", sent=group.comm.stats()["payload_bytes"], weights=before.numel())
    assert not torch.equal(before, _weights(model))
    _end(rank, model, folder, "transformers")
