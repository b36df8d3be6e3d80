"""The methods that convergence.py compares, by name: how each is made from ringcomm's public API.

    Method    a line of the table: its builder and settings, and the rates that it is tuned over
    Place     where a builder finds itself: one rank, its communicator, its model
    Recipe    what a builder returns: what the training loop calls

A builder reimplements nothing. Baselines are torch's optimizers under the hook, and what is known
to be bad misuses the API as a user could.

Invariants: METHODS is in the order of value: an interrupted start has run the first ones. Margins
and verdicts are not here (claims.py). A method whose API is not built is missing, no failure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ringcomm import Communicator
from training import link
from training.lion import Lion
from training.model import CharGPT
from training.published import PublishedAdam

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
    model: nn.Module
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
        together: that context is a collective.
        flush: called on all ranks behind the last step; whether it has brought gradients, for
            which there is one step more.
    """

    optimizers: Sequence[torch.optim.Optimizer]
    hook: tuple[Any, Any] | None = None
    clips: bool = False
    around: Any = dataclasses.field(default_factory=contextlib.nullcontext)
    evaluated: Callable[[], Any] = contextlib.nullcontext
    together: bool = False
    flush: Callable[[], bool] = lambda: False


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
        tuned_as: the method whose rate it takes; of what differs from it by a control, by a codec,
            or by a share of the steps or of the rounds.
        sends: bytes per parameter and step by formula, where no counter sees them: torch's own
            hooks, the sparse exchange, and rounds with a delay, which have their own communicator.
        version: raised where ``build`` makes something else of ``options``, so that the method is
            run anew; an edit that changes no training leaves it.
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
    sends: float | None = None
    version: int = 1

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
    rest = torch.optim.AdamW(model.others(), lr=lr / 2, betas=BETAS, weight_decay=DECAY, fused=True)
    return [torch.optim.Muon(model.hidden(), lr=lr, momentum=0.95, weight_decay=DECAY), rest]


def sgd(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """SGD with momentum."""
    return [torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)]


def lion(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Lion; torch has none."""
    return [Lion(model.parameters(), lr=lr, weight_decay=10 * DECAY)]


INNER: dict[str, Callable[[Any, float], list[torch.optim.Optimizer]]] = {
    "adamw": adamw,
    "muon": muon,
    "sgd": sgd,
    "lion": lion,
}


# ---- every step ----


def hooked(place: Place, *, inner: str = "adamw", **settings: Any) -> Recipe:
    """An optimizer of torch under ringcomm's DDP hook."""
    from ringcomm.torch import HookState, allreduce_hook

    state = HookState(comm=place.comm, model=place.model, **settings)
    return Recipe(INNER[inner](place.model, place.lr), hook=(state, allreduce_hook))


def stale(place: Place, *, inner: str, correction: bool, compression: str = "none") -> Recipe:
    """The same one step stale; the first twentieth of the steps is dense."""
    from ringcomm.torch import HookState, Stale1, allreduce_hook

    pace = Stale1(dense_steps=place.steps // 20, correction=correction)
    state = HookState(compression, place.comm, model=place.model, pace=pace, force=True)
    optimizers = INNER[inner](place.model, place.lr)
    return Recipe(optimizers, hook=(state, allreduce_hook), flush=state.flush)


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


def torch_fp32(place: Place) -> Recipe:
    """What DDP does by itself, over gloo."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return Recipe(adamw(place.model, place.lr), hook=(None, default_hooks.allreduce_hook))


# ---- momentum on the wire ----


def wire(place: Place, *, kind: str, freeze: float | None = None, **settings: Any) -> Recipe:
    """An optimizer of ringcomm.torch.optim. ``freeze`` is a share of the steps; 1: never."""
    import ringcomm.torch.optim

    if kind == "ZeroOneAdam":
        settings["var_freeze_step"] = round((freeze or 0.0) * place.steps)
    elif freeze is not None:
        settings["freeze"] = max(1, round(freeze * place.steps))
    optimizer = getattr(ringcomm.torch.optim, kind)(
        place.model.parameters(), lr=place.lr, comm=place.comm, max_norm=place.clip, **settings
    )
    return Recipe([optimizer], clips=True)


def published(place: Place, *, freeze: float) -> Recipe:
    """1-bit Adam as its paper has it."""
    optimizer = PublishedAdam(
        place.model.parameters(),
        place.lr,
        BETAS,
        1e-8,
        DECAY,
        freeze=round(freeze * place.steps),
        max_norm=place.clip,
        comm=place.comm,
    )
    return Recipe([optimizer], clips=True)


def sharded(place: Place, *, gradients: Any, weights: Any = None, hosts: bool = False) -> Recipe:
    """FSDP2, of all ranks or of the two of a host, as two hosts."""
    from ringcomm.torch.fsdp import compress
    from training import shards

    across = place.comm.split(place.comm.rank % 2) if hosts else None
    parts = shards.shard(place.model, hosts)
    if gradients is not None or hosts:
        compress(place.model, gradients, weights, across=across)
    return Recipe(
        adamw(place.model, place.lr),
        around=contextlib.nullcontext() if across is None else across,
        evaluated=functools.partial(shards.gathered, parts),
        together=True,
    )


def muon_by_owner(place: Place, *, gradients: str) -> Recipe:
    """ringcomm's Muon for the blocks' matrices, OneBitAdam, never frozen, for what is left."""
    from ringcomm.torch.optim import Muon, OneBitAdam

    common: Any = {"comm": place.comm, "max_norm": place.clip, "weight_decay": DECAY}
    settings: Any = {"freeze": place.steps, "refresh": None, "dense": gradients, **common}
    rest = OneBitAdam(place.model.others(), place.lr / 2, BETAS, **settings)
    matrices = Muon(place.model.hidden(), place.lr, gradients=gradients, **common)
    return Recipe([matrices, rest], clips=True)


_ADAM: dict[str, Any] = {"kind": "OneBitAdam", "betas": BETAS, "weight_decay": DECAY}
_LAMB: dict[str, Any] = {"kind": "OneBitLamb", "betas": BETAS, "weight_decay": DECAY}
_LION: dict[str, Any] = {"kind": "Lion", "weight_decay": 10 * DECAY}
_PLAIN: dict[str, Any] = {"compression": "none", "dense": "none"}


def _wire(name: str, about: str, lrs: tuple[float, ...], **settings: Any) -> Method:
    return Method(name, about, wire, settings, lrs, (f"ringcomm.torch.optim.{settings['kind']}",))


# ---- the largest blocks ----


def stellatrain(place: Place, *, density: float = 1 / 64) -> Recipe:
    """StellaTrain's path: the largest blocks of each gradient, clipped on each rank for itself, and
    an Adam on the CPU that touches these alone."""
    import ringcomm.torch.sparse

    optimizer = ringcomm.torch.sparse.Adam(
        place.model.parameters(),
        lr=place.lr,
        betas=BETAS,
        weight_decay=DECAY,
        comm=place.comm,
        density=density,
        decoupled_weight_decay=True,
        overlap=False,
    )
    return Recipe([optimizer], around=optimizer)


def stellatrain_sgd(place: Place, *, density: float = 1 / 64) -> Recipe:
    """The same under SGD with momentum."""
    import ringcomm.torch.sparse

    optimizer = ringcomm.torch.sparse.SGD(
        place.model.parameters(),
        lr=place.lr,
        momentum=0.9,
        comm=place.comm,
        density=density,
        overlap=False,
    )
    return Recipe([optimizer], around=optimizer)


def sparse_sgd(place: Place, *, density: float, staleness: int) -> Recipe:
    """The same as StellaTrain has it for images: one step stale, nothing clipped."""
    import ringcomm.torch.sparse

    optimizer = ringcomm.torch.sparse.SGD(
        place.model.parameters(),
        lr=place.lr,
        momentum=0.9,
        comm=place.comm,
        density=density,
        staleness=staleness,
        overlap=False,
    )

    def flush() -> bool:
        optimizer.flush()
        return False

    return Recipe([optimizer], around=optimizer, flush=flush)


# ---- outer steps ----


def outer(
    place: Place,
    *,
    rule: tuple[Any, ...] = ("Nesterov", 0.7, 0.5),
    inner: str = "adamw",
    every: int | str = 10,
    alone: bool = False,
    codec: str = "default",
    **settings: Any,
) -> Recipe:
    """Ranks train apart, and an OuterStep brings them together. The rule by name and arguments; as
    rows were made under it, "Mean" is Nesterov without momentum, and "end" a round at the end.

    Args:
        alone: gradients are averaged in each step, and each rank has an OuterStep of its own.
    """
    import ringcomm.torch.outer as parts
    from ringcomm.torch import HookState, OuterStep, allreduce_hook

    optimizers = INNER[inner](place.model, place.lr)
    comm, hook = place.comm, None
    if alone:
        own = place.comm.split(place.comm.rank)
        assert own is not None
        comm = own
        hook = (HookState("none", place.comm, model=place.model), allreduce_hook)
    step = OuterStep(
        place.model,
        optimizers,
        every=None if every == "end" else every,
        outer="mean" if rule == ("Mean",) else getattr(parts, rule[0])(*rule[1:]),
        comm=comm,
        compression=codec,
        **settings,
    )

    def flush() -> bool:
        step.flush()
        return False

    return Recipe(optimizers, hook=hook, around=step, evaluated=step.anchor, flush=flush)


def _outer(name: str, about: str, **settings: Any) -> Method:
    lrs = MUON if settings.get("inner") == "muon" else ADAM
    return Method(name, about, outer, settings, lrs, ("ringcomm.torch.OuterStep",))


# ---- the list ----


def _hook(name: str, about: str, **settings: Any) -> Method:
    return Method(name, about, hooked, settings)


def _fewer(
    name: str, about: str, lrs: tuple[float, ...] = ADAM, tuned_as: str = "", **settings: Any
) -> Method:
    """A baseline that gets as much time as what is faster than it, not as many steps."""
    share = link.EQUAL_TIME[name]
    return Method(
        name,
        f"{about}, {share:.0%} of the steps",
        hooked,
        settings,
        lrs,
        share=share,
        tuned_as=tuned_as,
    )


_EVERY_STEP = (
    dataclasses.replace(_hook("adamw", "AdamW, DDP, float32"), settings=("T1", "T4")),
    _hook("bf16", "AdamW, bf16", compression="bf16"),
    dataclasses.replace(_hook("int8", "AdamW, int8", compression="int8"), settings=("T1", "T4")),
    dataclasses.replace(
        _hook("int4", "AdamW, int4 with feedback", compression="int4"), settings=("T1", "T4")
    ),
    dataclasses.replace(
        _hook("int2", "AdamW, int2 with feedback", compression="int2"), tuned_as="int4"
    ),
    _hook("onebit-adamw", "1-bit gradients under AdamW", compression="onebit", force=True),
    _hook("int4-no-feedback", "AdamW, int4 without feedback", compression="int4", feedback=False),
    Method(
        "adamw-other-seeds",
        "AdamW, seeds 11 to 18",
        hooked,
        seeds=tuple(range(11, 19)),
        tuned_as="adamw",
    ),
    Method("adamw-dealt", "AdamW, shards dealt to other ranks", hooked, deal=1, tuned_as="adamw"),
)

_BASELINES = (
    Method("accumulate-4", "AdamW, 4 batches a step: bytes of int8", hooked, accumulate=4),
    Method(
        "torch-fp32",
        "AdamW, DDP, gloo float32",
        torch_fp32,
        world="process",
        sends=6.0,
        settings=(),
        tuned_as="adamw",
    ),  # by the clock alone: sources/real.py
    Method("torch-fp16", "torch's fp16 hook, gloo", torch_fp16, world="process", sends=3.0),
    Method(
        "powersgd-4",
        "torch's PowerSGD hook, rank 4",
        powersgd,
        {"rank": 4},
        world="process",
        sends=0.54,
    ),
)

_WIRE = (
    dataclasses.replace(
        _wire("onebit-adam", "OneBitAdam as it is by default", ADAM, **_ADAM),
        settings=("T1", "T4"),
    ),
    dataclasses.replace(
        _wire(
            "onebit-adam-int8",
            "OneBitAdam, dense steps and renewals at int8",
            ADAM,
            **_ADAM,
            dense="int8",
        ),
        tuned_as="onebit-adam",
    ),
    dataclasses.replace(
        _wire(
            "adam-clipped",
            "OneBitAdam, never frozen, nothing compressed, clipped alike",
            ADAM,
            **_ADAM,
            **_PLAIN,
            refresh=None,
            freeze=1,
        ),
        tuned_as="adamw",
    ),
    _wire("onebit-adam-5", "OneBitAdam, frozen at 5 %", ADAM, **_ADAM, freeze=0.05),
    _wire(
        "freeze-5",
        "the variance frozen at 5 %, nothing compressed",
        ADAM,
        **_ADAM,
        **_PLAIN,
        refresh=None,
        freeze=0.05,
    ),
    Method(
        "onebit-adam-no-mask",
        "1-bit Adam as published, without a mask, frozen at 5 %",
        published,
        {"freeze": 0.05},
        ADAM,
    ),
    _wire("lamb", "LAMB, nothing compressed, never frozen", LAMB, **_LAMB, **_PLAIN, freeze=1),
    _wire("onebit-lamb", "OneBitLamb as it is by default", LAMB, **_LAMB),
    Method("lion", "Lion, DDP, float32", hooked, {"inner": "lion"}, LION),
    _wire("lion-momentum", "Lion, momentum at 1 bit", LION, **_LION),
    _wire(
        "zero-one-adam",
        "0/1 Adam",
        ADAM,
        kind="ZeroOneAdam",
        betas=BETAS,
        weight_decay=DECAY,
        freeze=0.2,
    ),
    _wire("sgd-onebit", "SGD, momentum at 1 bit", SGD, kind="SGD", momentum=0.9),
)

_OUTER = (
    _outer("outer", "OuterStep, H = 10, gamma .7, mu .5, float32", codec="none"),
    dataclasses.replace(
        _outer("outer-int4", "OuterStep, H = 10, int4 with feedback", codec="int4"),
        settings=("T1", "T4"),
    ),
    dataclasses.replace(
        _outer("outer-int2", "OuterStep, H = 10, int2 with feedback", codec="int2"),
        tuned_as="outer-int4",
    ),
    dataclasses.replace(
        _outer("outer-mean", "OuterStep, H = 10, mean", codec="none", rule=("Mean",)),
        settings=("T1", "T4"),
    ),
    _outer("outer-often", "OuterStep, H = 4, gamma .7, mu .5, float32", every=4, codec="none"),
    _outer(
        "outer-sparse", "OuterStep, H = 4, sparse, density 1/8", every=4, rule=("Sparse", 1 / 8)
    ),
    _outer(
        "outer-sparse-64",
        "OuterStep, H = 4, sparse, density 1/64",
        every=4,
        rule=("Sparse", 1 / 64),
    ),
    dataclasses.replace(
        _outer("outer-delayed", "OuterStep, H = 10, int4, applied 4 later", delay=4),
        sends=0.10,
    ),
    dataclasses.replace(
        _outer("outer-waits", "OuterStep, H = 6, int4, waits 4 more a round, 60% of them", every=6),
        share=0.6,
    ),
    dataclasses.replace(
        _outer("outer-fragments", "OuterStep, H = 10, int4, in 2 fragments", fragments=2),
        tuned_as="outer-int4",
    ),
    dataclasses.replace(
        _outer(
            "outer-momentum-.9",
            "OuterStep, H = 10, gamma .7, mu .9, float32",
            codec="none",
            rule=("Nesterov", 0.7, 0.9),
        ),
        settings=("T4",),
    ),
    _outer("outer-muon", "OuterStep, H = 10, int4, Muon inside", inner="muon"),
    dataclasses.replace(
        _outer("outer-muon-30", "OuterStep, H = 30, int4, Muon inside", inner="muon", every=30),
        tuned_as="outer-muon",
    ),
    _outer(
        "outer-k1", "AdamW, DDP, and an outer step of one worker, H = 10", codec="none", alone=True
    ),
    dataclasses.replace(
        _outer(
            "outer-end",
            "apart, and averaged once at the end",
            codec="none",
            rule=("Mean",),
            every="end",
        ),
        settings=("T4",),
    ),
    *(
        _fewer(name, f"AdamW, {codec}", tuned_as=tuned_as, compression=codec)
        for name, codec, tuned_as in (
            ("adamw-bf16-1g", "bf16", ""),
            ("adamw-int8-1g", "int8", ""),
            ("adamw-int4-1g", "int4", "int4"),
            ("adamw-waits", "int8", ""),
            ("int4-waits", "int4", "adamw-waits"),
            ("int4-waits-1g", "int4", "adamw-waits"),
        )
    ),
    _fewer("muon-int4-1g", "Muon, int4", MUON, "muon-int4", inner="muon", compression="int4"),
    dataclasses.replace(
        _wire(
            "onebit-adam-1g",
            f"OneBitAdam, dense at int8, {link.EQUAL_TIME['onebit-adam-1g']:.0%} of the steps",
            ADAM,
            **_ADAM,
            dense="int8",
            freeze=link.DENSE,
        ),
        share=link.EQUAL_TIME["onebit-adam-1g"],
        tuned_as="onebit-adam",
    ),
)

_STALE = (
    *(
        Method(
            f"{inner}-stale{ending}",
            f"{told}, one step stale, {words}",
            stale,
            {"inner": inner, "correction": correction},
            lrs,
            ("ringcomm.torch.Stale1", "ringcomm.torch.HookState:pace"),
            version=2 if correction else 1,
        )
        for inner, told, lrs in (
            ("adamw", "AdamW", ADAM),
            ("sgd", "SGD", SGD),
        )
        for ending, correction, words in (("", True, "corrected"), ("-raw", False, "not corrected"))
    ),
    Method(
        "int4-stale",
        "AdamW, int4, one step stale, corrected",
        stale,
        {"inner": "adamw", "correction": True, "compression": "int4"},
        tuned_as="adamw-stale",
        version=2,
    ),
)

_OTHER_OPTIMIZERS = (
    Method("muon", "Muon, DDP, float32", hooked, {"inner": "muon"}, MUON),
    Method("sgd", "SGD with momentum, DDP, float32", hooked, {"inner": "sgd"}, SGD),
    Method(
        "sgd-onebit-no-feedback",
        "1-bit gradients under SGD, without feedback",
        hooked,
        {"inner": "sgd", "compression": "onebit", "feedback": False},
        SGD,
    ),
    Method(
        "muon-int4",
        "Muon, int4 with feedback",
        hooked,
        {"inner": "muon", "compression": "int4"},
        MUON,
    ),
    *(
        Method(name, about, sharded, options, tuned_as="adamw", world="process", sends=sends)
        for name, about, options, sends in (
            ("fsdp", "AdamW, FSDP2, float32", {"gradients": None}, 9.0),
            (
                "fsdp-int8",
                "AdamW, FSDP2, gradients and weights at int8",
                {"gradients": "int8", "weights": "int8"},
                2.3,
            ),
            (
                "fsdp-hosts-int4",
                "AdamW, FSDP2 in two hosts, between them int4 with feedback",
                {"gradients": "int4", "hosts": True},
                0.27,
            ),
        )
    ),
    *(
        Method(
            f"muon-owner-{codec}",
            f"Muon by owner-compute, {codec}, updates at int4, clipped apart",
            muon_by_owner,
            {"gradients": codec},
            MUON,
            ("ringcomm.torch.optim.Muon",),
            tuned_as=tuned_as,
        )
        for codec, tuned_as in (("int8", ""), ("int4", "muon-owner-int8"))
    ),
)

_SLOW = (  # for links so slow that three times the steps take less time; see sources/slow.py
    Method(
        "stellatrain", "the largest 1/64 of the cache lines, sparse Adam", stellatrain, sends=0.10
    ),
    Method(
        "stellatrain-sgd",
        "the largest 1/64 of the cache lines, sparse SGD",
        stellatrain_sgd,
        {},
        SGD,
        sends=0.10,
    ),
    Method(
        "powersgd-4-long",
        "torch's PowerSGD hook, rank 4, 3 times the steps",
        powersgd,
        {"rank": 4},
        world="process",
        share=3.0,
        tuned_as="powersgd-4",
        sends=0.44,
    ),
    *(
        Method(f"{name}-long", about, build, options, share=3.0, tuned_as=name, sends=sends)
        for name, about, build, options, sends in (
            (
                "stellatrain",
                "the largest 1/64 of the cache lines, sparse Adam, 3 times the steps",
                stellatrain,
                {},
                0.10,
            ),
            (
                "outer-int4",
                "OuterStep, H = 30, int4, 3 times the steps",
                outer,
                {"every": 30},
                None,
            ),
            (
                "outer-sparse-64",
                "OuterStep, H = 30, sparse, density 1/64, 3 times the steps",
                outer,
                {"every": 30, "rule": ("Sparse", 1 / 64)},
                None,
            ),
        )
    ),
)

_DENSITIES = (100, 20, 8, 4)  # parts of which one travels


def _image(name: str, about: str, build: Callable[..., Recipe], **options: Any) -> Method:
    return Method(
        f"images-{name}",
        about,
        build,
        options,
        SGD,
        ("sklearn.datasets.load_digits",),
        settings=("T5",),
        seeds=(1, 2, 3),
    )


_IMAGES = (  # StellaTrain's own case: image classes under SGD with momentum
    *(
        _image(codec, f"SGD with momentum, DDP, {codec}", hooked, inner="sgd", compression=codec)
        for codec in ("none", "fp16", "int4")
    ),
    *(
        _image(
            f"sparse-{part}",
            f"the largest 1/{part} of the cache lines, sparse SGD, stale",
            sparse_sgd,
            density=1 / part,
            staleness=1,
        )
        for part in _DENSITIES
    ),
    *(
        _image(
            f"sparse-{part}-sync",
            f"the largest 1/{part} of the cache lines, sparse SGD",
            sparse_sgd,
            density=1 / part,
            staleness=0,
        )
        for part in (20, 8)
    ),
    *(
        Method(
            f"stellatrain-{part}",
            f"the largest 1/{part} of the cache lines, sparse Adam",
            stellatrain,
            {"density": 1 / part},
            seeds=(1, 2, 3),
        )
        for part in (20, 8)
    ),
)

METHODS = {
    method.name: method
    for method in (
        *_EVERY_STEP,
        *_WIRE,
        *_OUTER,
        *_OTHER_OPTIMIZERS,
        *_STALE,
        *_BASELINES,
        *_SLOW,
        *_IMAGES,
    )
}
