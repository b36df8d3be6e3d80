"""Methods by which ranks learn together: gradients, momentum, outer steps or largest gradients.

A Method makes the optimizer, prepares the model, and does the exchange between the ranks
in training. ``method_of`` chooses it by the options.

    Method      nothing: the base; in a world of one, for all but Momentum and Largest
    Gradients   DDP's buckets, by its own all-reduce                          every step
    Hooked      DDP's buckets, by ringcomm's hook                             every step
    Momentum    the optimizer's state, by ringcomm.torch.optim                every step
    Largest     the largest of gradients, by ringcomm.torch.sparse            every step
    Apart       the weights, by ringcomm.torch.OuterStep                      every --every steps

Invariants: methods that say "collective" must be called by all ranks in the same order.
"""

from __future__ import annotations

import contextlib
from typing import Any, cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..codecs import Compression
from ..communicator import Communicator
from ..errors import ConfigError, RingcommError
from ..torch import HookState, OuterStep, allreduce_hook
from ..torch.sync.exchange_report import CodecStretch
from . import optim
from .command_line import Options
from .distributed import World

#: Names of figures in the trainer's report -> in the hook's report of a step.
_OF_A_STEP = {
    "exposed_s": "exposed_s",
    "hidden_s": "hidden_s",
    "gradient_bytes_per_step": "payload_bytes",
    "wire_bytes_per_step": "wire_bytes",
    "shared_bytes_per_step": "shared_bytes",
    "buckets_per_step": "buckets",
}


class Method:
    """Base of all methods; by itself it trains alone.

    Attributes:
        optimizer: over the bare model's parameters.
        model: model to call for forward and backward, once ``connect`` was called.
    """

    def __init__(self, model: nn.Module, options: Options, world: World) -> None:
        """Make the optimizer; a collective for some methods."""
        self.bare, self.model = model, model
        self.options, self.world = options, world
        self.optimizer = self.make_optimizer(optim.groups(model, options))

    def make_optimizer(self, groups: optim.Groups) -> optim.Optimizer:
        """Make the optimizer that the options name."""
        return optim.make_optimizer(groups, self.options)

    def connect(self) -> None:
        """Take the weights of rank 0 and learn from the other ranks from now on. Collective."""

    def no_exchange(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which backward adds gradients up on this rank and exchanges none."""
        return contextlib.nullcontext()

    def evaluated(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the bare model has the weights to evaluate. Collective."""
        return contextlib.nullcontext()

    def finish(self) -> None:
        """Bring all ranks to the same weights after the last step. Collective."""

    def totals(self) -> dict[str, float]:
        """Return the exchanged bytes and seconds so far, by the names of their means per step in
        the report; the same names on all ranks, none if the method does not count."""
        return {}

    def start_account(self) -> None:
        """Start counting the exchanged bytes and seconds."""
        self._before = self.totals()

    def account(self, steps: int) -> dict[str, float]:
        """Return means over the ``steps`` since start_account(), by their names in the report."""
        return {name: (total - self._before[name]) / steps for name, total in self.totals().items()}

    def codecs(self) -> list[CodecStretch]:
        """Return the codecs of the whole run with their steps, if the codec changes."""
        return []

    @property
    def error(self) -> RingcommError | None:
        """Error of ringcomm behind a RuntimeError that hides it; None if there is none."""
        return None

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's part of a checkpoint. Collective."""
        return self.optimizer.state_dict()

    def gather_state_dict(self) -> dict[str, Any]:
        """Return the method's part of a checkpoint, the same on all ranks and for any number of
        them; may be empty. Collective."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of ``gather_state_dict`` that is not empty, after ``connect``. Raises
        ConfigError for one that does not fit; by itself, for more than a choice of codecs."""
        if not state.keys() <= {"policy", "format", "steps"}:
            raise ConfigError(
                f"the checkpoint of --method {self.options.method} holds what its ranks have still "
                "to deliver, which this run would lose; resume with two ranks or more, and without "
                "--no-hook"
            )


class Gradients(Method):
    """DDP, which exchanges gradients by itself."""

    def connect(self) -> None:
        """Wrap the model in DDP. Collective."""
        size = self.options.bucket_mb
        settings: dict[str, Any] = {} if size is None else {"bucket_cap_mb": size}
        self.model = DistributedDataParallel(self.bare, gradient_as_bucket_view=True, **settings)

    def no_exchange(self) -> contextlib.AbstractContextManager[None]:
        """Return DDP's no_sync()."""
        return cast(DistributedDataParallel, self.model).no_sync()


class Hooked(Gradients):
    """DDP with ringcomm's hook."""

    def connect(self) -> None:
        """Wrap the model in DDP. Raises ConfigError if ringcomm does not know the codec."""
        self._hook = self.world.agree(self._make_hook)
        super().connect()
        cast(DistributedDataParallel, self.model).register_comm_hook(self._hook, allreduce_hook)

    def _make_hook(self) -> HookState:
        return HookState(
            self.options.codec,
            self.world.comm,
            model=self.bare,
            pace="stale1" if self.options.method == "stale" else "every",
        )

    def start_account(self) -> None:
        """Reset the hook's report."""
        self._hook.reset()

    def account(self, steps: int) -> dict[str, float]:
        """Return means of the hook's report, over the steps that it remembers."""
        steps_reported = self._hook.report()["steps"]
        figures = {
            name: sum(step[key] for step in steps_reported) / max(1, len(steps_reported))
            for name, key in _OF_A_STEP.items()
        }
        sent = figures["wire_bytes_per_step"] + figures["shared_bytes_per_step"]
        return {**figures, "sent_bytes_per_step": sent}

    def codecs(self) -> list[CodecStretch]:
        """Return the codecs of the hook's report."""
        return self._hook.report().codecs

    @property
    def error(self) -> RingcommError | None:
        """Error that made backward fail: DDP turns all into RuntimeError."""
        return self._hook.error

    def finish(self) -> None:
        """Apply the last mean, which is still to come with method "stale"."""
        if self._hook.flush():
            self.optimizer.step()
            self.optimizer.zero_grad()

    def gather_state_dict(self) -> dict[str, Any]:
        """Return the hook's state. Collective."""
        return self._hook.gather_state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the hook's state."""
        self._hook.load_state_dict(state)


class Momentum(Method):
    """Optimizer that exchanges its own state. The model is in no DDP."""

    optimizer: Any

    def make_optimizer(self, groups: optim.Groups) -> optim.Optimizer:
        """Make an optimizer that exchanges. Collective."""
        self._comm = self.world.comm or Communicator.create(rank=0, world_size=1)
        return optim.make_exchanging_optimizer(groups, self.options, self._comm)

    def evaluated(self) -> contextlib.AbstractContextManager[None]:
        """Give all ranks rank 0's buffers, as DDP does: those of BatchNorm differ by rank."""
        for buffer in self.bare.buffers():
            self._comm.broadcast(buffer)
        return contextlib.nullcontext()

    def totals(self) -> dict[str, float]:
        """Return the optimizer's waiting time and bytes."""
        own = self.optimizer
        return {"exposed_s": own.waited_s, "sent_bytes_per_step": own.carried}

    def account(self, steps: int) -> dict[str, float]:
        """Return the optimizer's waiting time and bytes per step."""
        groups = self.optimizer.param_groups
        size = sum(p.nbytes for group in groups for p in group["params"])
        return {"gradient_bytes_per_step": size, **super().account(steps)}

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state for a world of any size. Collective."""
        return cast(dict[str, Any], self.optimizer.gather_state_dict())


class Largest(Momentum):
    """Optimizer on the CPU that exchanges the largest blocks of gradients."""

    def no_exchange(self) -> contextlib.AbstractContextManager[None]:
        """Return the optimizer's no_sync(), as its exchange begins in backward."""
        return cast(contextlib.AbstractContextManager[None], self.optimizer.no_sync())

    def evaluated(self) -> contextlib.AbstractContextManager[None]:
        """Wait for exchanges in flight, then do as the base."""
        self.optimizer.flush()
        return super().evaluated()


class Apart(Method):
    """OuterStep around any optimizer of torch. The model is in no DDP.

    A checkpoint has the anchor and rank 0's optimizer state, and not the ranks' own progress since
    the last round.
    """

    def connect(self) -> None:
        """Take the weights of rank 0, and exchange weights from now on. Collective."""
        self._outer = self.world.agree(self._make_outer)
        self._outer.attach()

    def _make_outer(self) -> OuterStep:
        own = self.optimizer
        return OuterStep(
            self.bare,
            own.parts if isinstance(own, optim.Together) else [own],
            every=self.options.every,
            compression=cast(Compression, self.options.codec),
            comm=self.world.comm,
        )

    def evaluated(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model has the anchor's weights."""
        return self._outer.anchor()

    def finish(self) -> None:
        """Make a last round. Collective."""
        self._outer.flush()
        self._outer.detach()
        self.evaluated = contextlib.nullcontext  # type: ignore[method-assign]

    def totals(self) -> dict[str, float]:
        """Return this rank's waiting time and the bytes of rounds."""
        report = self._outer.report()
        return {
            "exposed_s": report.waited_s,
            "gradient_bytes_per_step": report.payload_bytes,
            "sent_bytes_per_step": report.sent_bytes,
        }

    def gather_state_dict(self) -> dict[str, Any]:
        """Return OuterStep's state. Collective."""
        return self._outer.gather_state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore OuterStep's state."""
        self._outer.load_state_dict(state)


_METHODS: dict[str, type[Method]] = {
    "gradients": Hooked,
    "stale": Hooked,
    "momentum": Momentum,
    "outer": Apart,
    "sparse": Largest,
}


def method_of(model: nn.Module, options: Options, world: World) -> Method:
    """Make the method that the options name; a collective. Raises ConfigError."""
    kind = _METHODS[options.method] if options.hook else Gradients
    if world.size == 1 and not issubclass(kind, Momentum):
        kind = Method
    return kind(model, options, world)
