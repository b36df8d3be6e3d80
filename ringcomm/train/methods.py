"""How ranks learn from each other: by gradients, momentum, outer steps or the largest changes.

A Method makes the optimizer and prepares the model, and answers for what passes between the ranks
in training. ``method_of`` chooses it by the options.

    Alone       nothing, in a world of one
    Gradients   DDP's buckets, by ringcomm's hook or DDP's own all-reduce     every step
    Momentum    the optimizer's state, by ringcomm.torch.optim                every step
    Largest     the largest of gradients, by ringcomm.torch.sparse            every step
    Apart       the weights, by ringcomm.torch.OuterStep                      every so many steps

Invariants: methods that say "collective" must be called by all ranks in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..communicator import Communicator
from ..errors import RingcommError
from . import optim
from .distributed import World, sent_by
from .options import Options
from .plain import PlainState, plain_hook
from .timing import Traffic

if TYPE_CHECKING:
    from ringcomm.torch.outer.settings import OuterSettings


class Method:
    """What all have in common; by itself, training alone.

    Attributes:
        optimizer: over the bare model's parameters.
        model: what forward and backward go through, once ``connect`` was called.
        has_trial: whether a step can be made without the exchange.
    """

    has_trial = True

    def __init__(self, model: nn.Module, options: Options, world: World) -> None:
        """A collective for some methods."""
        self.bare, self.model = model, model
        self.options, self.world = options, world
        self.optimizer = self.make_optimizer(optim.groups(model, options))

    def make_optimizer(self, groups: optim.Groups) -> optim.Optimizer:
        """The optimizer of the options."""
        return optim.make_optimizer(groups, self.options)

    def connect(self) -> None:
        """Take the weights of rank 0 and learn from the other ranks from now on. Collective."""

    def no_exchange(self) -> contextlib.AbstractContextManager[None]:
        """Within it, backward adds gradients up on this rank and exchanges none."""
        return contextlib.nullcontext()

    def evaluated(self) -> contextlib.AbstractContextManager[None]:
        """Within it, the bare model has the weights that stand for all ranks. Collective."""
        return contextlib.nullcontext()

    def finish(self) -> None:
        """After the last step: all ranks come to the same weights. Collective."""

    def start_account(self) -> None:
        """Start a new account of the traffic."""

    def traffic(self) -> Traffic:
        """The account since it was started."""
        return _nothing()

    def codecs(self) -> list[dict[str, Any]]:
        """Which codec was in use when, in the whole run, where that changes."""
        return []

    @property
    def error(self) -> RingcommError | None:
        """ringcomm's error, where what raised it had to hide it."""
        return None

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's part of a checkpoint. Collective."""
        return self.optimizer.state_dict()

    def gather_state_dict(self) -> dict[str, Any]:
        """What else must be kept over a restart, the same on all ranks and for any number of them;
        empty if nothing. Collective."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give back what ``gather_state_dict`` returned, after ``connect``."""


class Gradients(Method):
    """DDP with a hook, ringcomm's or one that does what DDP does without."""

    _hook: Any

    def connect(self) -> None:
        """Wrap the model in DDP. Raises ConfigError if ringcomm does not know the codec."""
        hook = self.world.agree(self._make_hook)
        size: dict[str, Any] = {}
        if self.options.bucket_mb is not None:
            size["bucket_cap_mb"] = self.options.bucket_mb
        ddp = DistributedDataParallel(self.bare, gradient_as_bucket_view=True, **size)
        ddp.register_comm_hook(self._hook, hook)
        self.model = ddp

    def _make_hook(self) -> Callable[..., Any]:
        comm, options = self.world.comm, self.options
        if not options.hook:
            sent = (lambda: sent_by(comm)) if comm else None
            self._hook = PlainState(self.world.size, sent)
            return plain_hook
        from ringcomm.torch import HookState, allreduce_hook

        self._hook = HookState(
            options.codec, comm, model=self.bare, warmup_steps=options.dense_steps,
            force=options.force, pace="stale1" if options.method == "stale" else "every",
        )  # fmt: skip
        hook: Callable[..., Any] = allreduce_hook
        return hook

    def no_exchange(self) -> contextlib.AbstractContextManager[None]:
        """DDP's own."""
        assert isinstance(self.model, DistributedDataParallel)
        return self.model.no_sync()

    def start_account(self) -> None:
        """That of the hook."""
        self._hook.reset()

    def traffic(self) -> Traffic:
        """That of the hook."""
        account: Traffic = self._hook.report()
        return account

    def codecs(self) -> list[dict[str, Any]]:
        """As the hook's report tells."""
        return list(self._hook.report().get("codecs", []))

    @property
    def error(self) -> RingcommError | None:
        """The error that made backward fail: DDP turns all into RuntimeError."""
        error: RingcommError | None = getattr(getattr(self, "_hook", None), "error", None)
        return error

    def finish(self) -> None:
        """With staleness the last mean is still to be applied."""
        flush = getattr(self._hook, "flush", None)
        if flush is not None and flush():
            self.optimizer.step()
            self.optimizer.zero_grad()

    def gather_state_dict(self) -> dict[str, Any]:
        """That of ringcomm's hook. Collective."""
        save = getattr(self._hook, "gather_state_dict", None)
        return dict(save()) if save else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Into ringcomm's hook."""
        load = getattr(self._hook, "load_state_dict", None)
        if load and state:
            load(state)


class Momentum(Method):
    """An optimizer that exchanges its own state. The model is in no DDP."""

    has_trial = False
    optimizer: Any

    def make_optimizer(self, groups: optim.Groups) -> optim.Optimizer:
        """That of ringcomm.torch.optim. Collective."""
        self._comm = self.world.comm or Communicator.create(rank=0, world_size=1)
        return optim.make_wire_optimizer(groups, self.options, self._comm)

    def evaluated(self) -> contextlib.AbstractContextManager[None]:
        """With rank 0's buffers, as DDP has them: those of BatchNorm are each rank's own."""
        for buffer in self.bare.buffers():
            self._comm.broadcast(buffer)
        return contextlib.nullcontext()

    @property
    def sent(self) -> int:
        """Bytes by now."""
        return int(self.optimizer.carried)

    def start_account(self) -> None:
        """Start from what it has sent by now."""
        self._before = (self.sent, self.optimizer.waited_s)

    def traffic(self) -> Traffic:
        """What the optimizer has sent, and how long it has waited for."""
        sent, waited_s = self._before
        payload = sum(p.nbytes for group in self.optimizer.param_groups for p in group["params"])
        return _traffic(payload, self.sent - sent, self.optimizer.waited_s - waited_s)

    def optimizer_state(self) -> dict[str, Any]:
        """For a world of any size. Collective."""
        state: dict[str, Any] = self.optimizer.gather_state_dict()
        return state


class Largest(Momentum):
    """An optimizer on the CPU that exchanges the largest blocks of gradients."""

    def make_optimizer(self, groups: optim.Groups) -> optim.Optimizer:
        """That of ringcomm.torch.sparse. Collective."""
        self._comm = self.world.comm or Communicator.create(rank=0, world_size=1)
        return optim.make_sparse_optimizer(groups, self.options, self._comm)

    @property
    def sent(self) -> int:
        """Bytes by now."""
        return int(self.optimizer.sent_bytes)

    def no_exchange(self) -> contextlib.AbstractContextManager[None]:
        """The optimizer's own: it begins in backward."""
        paused: contextlib.AbstractContextManager[None] = self.optimizer.no_sync()
        return paused

    def evaluated(self) -> contextlib.AbstractContextManager[None]:
        """With all that is on its way."""
        self.optimizer.flush()
        return super().evaluated()


class Apart(Method):
    """OuterStep around any optimizer of torch. The model is in no DDP.

    A checkpoint has the anchor, and of the optimizer rank 0's state: what ranks have trained since
    the last round is not in it.
    """

    has_trial = False

    def connect(self) -> None:
        """Take the weights of rank 0, and exchange weights from now on. Collective."""
        from ringcomm.torch import OuterStep
        from ringcomm.torch.outer import Sparse

        options = self.options
        largest = options.sends_largest
        settings = cast("OuterSettings", {
            "every": options.every,
            "outer": Sparse(options.density) if largest else options.outer,
            "compression": None if largest else options.codec,
            "fragments": options.fragments, "delay": options.delay, "comm": self.world.comm,
        })  # fmt: skip
        self._outer = self.world.agree(
            lambda: OuterStep(self.bare, optim.parts(self.optimizer), **settings)
        )
        self._outer.attach()

    def evaluated(self) -> contextlib.AbstractContextManager[None]:
        """On the anchor."""
        return self._outer.anchor()

    def finish(self) -> None:
        """A last round. Collective."""
        self._outer.flush()
        self._outer.detach()
        self.evaluated = contextlib.nullcontext  # type: ignore[method-assign]

    def start_account(self) -> None:
        """Start from what it has sent by now."""
        report = self._outer.report()
        self._before = (report.payload_bytes, report.sent_bytes, report.waited_s)

    def traffic(self) -> Traffic:
        """What rounds have sent, and how long this rank has waited for them."""
        report = self._outer.report()
        payload, sent, waited = self._before
        return _traffic(
            report.payload_bytes - payload, report.sent_bytes - sent, report.waited_s - waited
        )

    def gather_state_dict(self) -> dict[str, Any]:
        """That of OuterStep. Collective."""
        return self._outer.gather_state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Into OuterStep."""
        if state:
            self._outer.load_state_dict(state)


_METHODS: dict[str, type[Method]] = {
    "gradients": Gradients, "stale": Gradients, "momentum": Momentum, "outer": Apart,
    "sparse": Largest,
}  # fmt: skip


def method_of(model: nn.Module, options: Options, world: World) -> Method:
    """The method of the options; a collective. Raises ConfigError as it does."""
    kind = _METHODS[options.method]
    if world.size == 1 and not issubclass(kind, Momentum):
        kind = Method
    return kind(model, options, world)


def _nothing() -> Traffic:
    return _traffic(0, 0, 0.0)


def _traffic(payload: int, sent: int, waited_s: float) -> Traffic:
    return Traffic(
        buckets=0, payload_bytes=payload, wire_bytes=sent, shared_bytes=0, comm_s=waited_s,
        works=[], waited_s=waited_s,
    )  # fmt: skip
