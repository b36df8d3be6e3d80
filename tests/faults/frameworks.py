"""Ranks that train the reference model by Lightning and by Accelerate: on gloo, on backend
"ringcomm", and with the hook as the README's snippets have it.

The libraries take seconds to import, which the nursery does once for all ranks (PRELOADED); the
test's own process goes without them.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from faults.rank import Rank
from readme import code
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ringcomm.torch  # noqa: F401
from ringcomm.train import models
from ringcomm.train.data import load
from ringcomm.train.options import Options

PRELOADED = ("torch._dynamo", "sklearn.datasets", "pytorch_lightning", "accelerate",
             "transformers.trainer", "transformers.models.gpt2")  # fmt: skip
STEPS, BATCH = 4, 16


def fresh_weights() -> torch.Tensor:
    """As all ranks begin with them."""
    return _weights(models.build("resnet8", load(Options()), width=4, dropout=0.0, seed=1))


def _weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def _start(rank: Rank) -> tuple[nn.Module, DataLoader[Any]]:
    """The model and the batches of all ranks, of which each takes its own."""
    os.environ["LOCAL_RANK"] = str(rank.number)
    warnings.simplefilter("ignore")  # what they think of few workers and short runs
    torch.set_num_threads(1)
    data = load(Options())
    model = models.build("resnet8", data, width=4, dropout=0.0, seed=1)
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
    strategy as it is in the README, which leaves the hook out on a CPU."""
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
        accelerator="cpu", devices=2, strategy=strategy, max_steps=STEPS, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(_module(model, way == "start"), loader)
    _end(rank, model, folder, way)


def _register(strategy: Any) -> None:
    """What the strategy does of itself where it sees a GPU, and only there."""
    from pytorch_lightning.strategies.ddp import _register_ddp_comm_hook

    _register_ddp_comm_hook(
        strategy.model, strategy._ddp_comm_state, strategy._ddp_comm_hook,
        strategy._ddp_comm_wrapper,
    )  # fmt: skip


def by_accelerate(rank: Rank, way: str, folder: str) -> None:
    """gloo; backend; hook: registered on the prepared model; printed: that, with bf16."""
    inner, loader = _start(rank)
    names: dict[str, Any] = {"model": inner, "loader": loader, "torch": torch}
    names["optimizer"] = torch.optim.SGD(inner.parameters(), lr=0.1, momentum=0.9)
    printed = code("accelerate")
    if way != "printed":
        printed = printed.replace('"bf16"', '"none"')
    left_out = {"gloo": ("init_process_group", "register_comm_hook"),
                "backend": ("register_comm_hook",), "hook": (), "printed": ()}  # fmt: skip
    lines = [line for line in printed.splitlines() if not any(w in line for w in left_out[way])]
    exec("\n".join(lines), names)
    model, optimizer, accelerator = names["model"], names["optimizer"], names["accelerator"]
    for images, labels in names["loader"]:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(images), labels))
        optimizer.step()
    _end(rank, inner, folder, way)


def by_transformers(rank: Rank, folder: str) -> None:
    """The Trainer, of a GPT-2 of a few hundred parameters that is made here."""
    from transformers import GPT2Config, GPT2LMHeadModel

    os.environ["LOCAL_RANK"] = str(rank.number)
    os.chdir(folder)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 8, "vocab_size": 16}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    before = _weights(model).clone()
    tokens = torch.randint(0, 16, (16 * BATCH, 8), generator=torch.Generator().manual_seed(2))
    dataset = [{"input_ids": row, "labels": row} for row in tokens]
    exec(code("transformers"), {"model": model, "dataset": dataset})
    group: Any = dist.group.WORLD
    rank.emit("carried", sent=group.comm.stats()["payload_bytes"], weights=before.numel())
    assert not torch.equal(before, _weights(model))
    _end(rank, model, folder, "transformers")
