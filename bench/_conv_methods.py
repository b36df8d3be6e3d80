"""The methods that convergence.py compares, by name: how each is made from ringcomm's public API.

    Method    a line of the table: its builder and settings, and the rates that it is tuned over
    Place     where a builder finds itself: one rank, its communicator, its model
    Recipe    what a builder returns: what the training loop calls

A builder reimplements nothing. Baselines are torch's optimizers under the hook, and what is known
to be bad either misuses the API as a user could, or is in _conv_bad.py.

Invariants: METHODS is in the order of value: an interrupted start has run the first ones. Margins
and verdicts are not here (_conv_claims.py). A method whose API is not built is missing, no failure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from _conv_model import CharGPT
from torch import nn

from ringcomm import Communicator

BETAS, DECAY = (0.9, 0.95), 0.1

ADAM = (2.5e-3, 5e-3, 1e-2, 2e-2)
MUON = (5e-3, 1e-2, 2e-2, 4e-2)
SGD = (0.1, 0.2, 0.4, 0.8)
LION = (5e-4, 1e-3, 2e-3, 4e-3)
LAMB = (5e-3, 1e-2, 2e-2, 4e-2)


@dataclasses.dataclass(frozen=True)
class Place:
    """One rank of a run.

    Attributes:
        steps: optimizer steps of the run.
        clip: the norm to which gradients are to be clipped.
    """

    comm: Communicator
    model: CharGPT
    lr: float
    steps: int
    clip: float


@dataclasses.dataclass
class Recipe:
    """How one rank trains.

    Attributes:
        optimizers: stepped one after the other, their rates scheduled alike.
        hook: state and function of DDP's communication hook; None: gradients stay apart.
        clips: the optimizer clips by itself, as one whose exchange is in its step.
        around: entered before the first step and left behind the last.
        evaluated: a context in which the model has the weights that are to be judged.
        flush: called before an evaluation, on all ranks.
    """

    optimizers: Sequence[torch.optim.Optimizer]
    hook: tuple[Any, Any] | None = None
    clips: bool = False
    around: Any = dataclasses.field(default_factory=contextlib.nullcontext)
    evaluated: Callable[[], Any] = contextlib.nullcontext
    flush: Callable[[], Any] = lambda: None


@dataclasses.dataclass(frozen=True)
class Method:
    """A line of the table.

    Attributes:
        about: in the table's words.
        build: makes its Recipe of a Place and ``options``.
        lrs: the grid that it is tuned over.
        needs: what must be there, as "module.Class" or "module.Class:argument".
        share: of the steps of the setting; of a baseline that gets as much time, not as many steps.
        accumulate: batches for each optimizer step.
        world: "thread" or, for what needs torch.distributed, "process".
        deal: by how many ranks the shards are dealt on.
        tuned_as: the method whose rate it takes; only of controls that are that method.
        bits: sent per parameter and step by formula, where no counter of ringcomm sees it.
    """

    name: str
    about: str
    build: Callable[..., Recipe]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    lrs: tuple[float, ...] = ADAM
    needs: tuple[str, ...] = ()
    settings: tuple[str, ...] = ("T1",)
    seeds: tuple[int, ...] = tuple(range(1, 9))
    share: float = 1.0
    accumulate: int = 1
    world: str = "thread"
    deal: int = 0
    tuned_as: str = ""

    def missing(self) -> str:
        """What is not built yet of what it needs; empty if nothing."""
        return next((need for need in self.needs if not _is_there(need)), "")


def _is_there(need: str) -> bool:
    path, _, argument = need.partition(":")
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError:
        return False
    if found is None:
        return False
    return not argument or argument in inspect.signature(found).parameters


# ---- inner optimizers ----


def adamw(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """AdamW as all methods have it."""
    return [
        torch.optim.AdamW(model.parameters(), lr=lr, betas=BETAS, weight_decay=DECAY, fused=True)
    ]


def muon(model: CharGPT, lr: float) -> list[torch.optim.Optimizer]:
    """torch's Muon for the blocks' matrices, AdamW at half the rate for what is left."""
    rest = torch.optim.AdamW(
        model.others(), lr=lr / 2, betas=BETAS, weight_decay=DECAY, fused=True
    )
    return [torch.optim.Muon(model.hidden(), lr=lr, momentum=0.95, weight_decay=DECAY), rest]


def sgd(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """SGD with momentum."""
    return [torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)]


INNER: dict[str, Callable[[Any, float], list[torch.optim.Optimizer]]] = {
    "adamw": adamw, "muon": muon, "sgd": sgd,
}  # fmt: skip


# ---- every step ----


def hooked(place: Place, *, inner: str = "adamw", **settings: Any) -> Recipe:
    """An optimizer of torch under ringcomm's DDP hook."""
    from ringcomm.torch import HookState, allreduce_hook

    state = HookState(comm=place.comm, model=place.model, **settings)
    flush = getattr(state, "flush", lambda: None)
    return Recipe(INNER[inner](place.model, place.lr), hook=(state, allreduce_hook), flush=flush)


def powersgd(place: Place, *, rank: int) -> Recipe:
    """torch's own PowerSGD hook, over gloo."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=rank, start_powerSGD_iter=10
    )
    return Recipe(adamw(place.model, place.lr), hook=(state, powerSGD_hook.powerSGD_hook))


def torch_fp16(place: Place) -> Recipe:
    """torch's own fp16 hook, over gloo; its bf16 hook is for NCCL alone."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return Recipe(adamw(place.model, place.lr), hook=(None, default_hooks.fp16_compress_hook))


def _hook(name: str, about: str, **settings: Any) -> Method:
    return Method(name, about, hooked, settings)


_EVERY_STEP = (
    dataclasses.replace(_hook("adamw", "AdamW, DDP, float32"), settings=("T1", "T4")),
    _hook("bf16", "AdamW, bf16", compression="bf16"),
    dataclasses.replace(_hook("int8", "AdamW, int8", compression="int8"), settings=("T1", "T4")),
    dataclasses.replace(
        _hook("int4", "AdamW, int4 with feedback", compression="int4"), settings=("T1", "T4")
    ),
    _hook("onebit-adamw", "1-bit gradients under AdamW", compression="onebit", force=True),
    _hook(
        "int4-no-feedback", "AdamW, int4 without feedback", compression="int4", feedback=False
    ),
    Method(
        "adamw-other-seeds", "AdamW, seeds 11 to 18", hooked, seeds=tuple(range(11, 19)),
        tuned_as="adamw",
    ),
    Method("adamw-dealt", "AdamW, shards dealt to other ranks", hooked, deal=1, tuned_as="adamw"),
)  # fmt: skip

_BASELINES = (
    _hook("topk", "AdamW, top 1 % with feedback", compression="topk"),
    Method(
        "accumulate-4", "AdamW, 4 batches a step: bytes of int8", hooked, accumulate=4,
    ),
    Method("torch-fp16", "torch's fp16 hook, gloo", torch_fp16, world="process"),
    Method("powersgd-4", "torch's PowerSGD hook, rank 4", powersgd, {"rank": 4}, world="process"),
)  # fmt: skip

_OTHER_OPTIMIZERS = (
    Method(
        "muon", "Muon, DDP, float32", hooked, {"inner": "muon"}, MUON, settings=("T1", "T4")
    ),
    Method("sgd", "SGD with momentum, DDP, float32", hooked, {"inner": "sgd"}, SGD),
    Method("muon-int4", "Muon, int4 with feedback", hooked,
           {"inner": "muon", "compression": "int4"}, MUON),
)  # fmt: skip

METHODS = {method.name: method for method in (*_EVERY_STEP, *_OTHER_OPTIMIZERS, *_BASELINES)}
