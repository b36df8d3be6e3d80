"""ExchangingOptimizer: an optimizer whose step contains the exchange between the ranks.

    WireOptimizer      averages its own state, a span at a time               wire.py
    Muon               has each matrix's update computed by its owner         muon.py
    SparseOptimizer    sends the largest blocks of gradients by buckets       torch/sparse

Buckets of parameters (Span, Owned, HostBucket) are called spans here. This module finds the
parameters that have no span yet, and the subclass lays them out (``_add``). With overlap, a span's
exchange begins in backward, as soon as all its gradients are computed (Overlap). The subclass
defines the exchange and the update (``_step``).

Invariants: all ranks have the same parameters when the optimizer is made, and lay out the same
ones in the same order. Nothing else exchanges the gradients of these parameters. Exchanges begin in
the order of the layout, whatever order backward has; the step begins the remaining ones. If a
gradient changes after its exchange has begun, the step notices and raises: the gradient sent would
not be the one applied.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import torch

from ...communicator import Communicator, require_same
from ...core.calls import naming
from ...errors import ConfigError, RingcommError, warn_caller
from ...exact import Checkpointed
from ..argument_checks import require
from ..group import default_comm
from ..guards import refuse_others
from ..sync.account import Account
from ..sync.agreement import Verdict, agree, require_alike
from ..sync.exchange_report import ExchangeReport
from . import saved
from .span import IndexedParameter, ParameterBucket, require_dense

_PATIENCE = 3  # steps without a gradient until the error


class BegunExchange(Protocol):
    """Exchange that has begun (SpanExchanges, BucketRound)."""

    def cancel(self) -> None:
        """Ends the exchange without an update."""


S = TypeVar("S", bound=ParameterBucket)
F = TypeVar("F", bound=BegunExchange)


class ExchangingOptimizer(Checkpointed, torch.optim.Optimizer, Generic[S, F]):
    """Base of optimizers that exchange by themselves.

    Making one is a collective: all ranks start from rank 0's parameters. (Buffers, as those of
    BatchNorm, are not exchanged.) ``step`` is a collective, too. The model is not in
    DistributedDataParallel, or ``ringcomm.torch.attach`` has stopped its exchange.

    Args:
        params, defaults: as in torch.optim.Optimizer.
        comm: the communicator; None: that of the default process group if its backend is
            "ringcomm", else ringcomm's default one.
        launch: begins the exchange of a span in backward, with ``overlap``; None: without.
        fixed: settings beside ``defaults``, by name, that must be the same on all ranks.
        method: the method's name in saved states.

    Raises MismatchError on all ranks if they make different optimizers, with other settings, or
    of other parameters. It cannot be copied or pickled, which raises TypeError.

    Attributes:
        steps: number of steps made.
        skipped: number of steps, or parts of them, skipped as a gradient was not finite.
        account: bytes and times of the exchanges.
    """

    _step_supports_amp_scaling = True  # a GradScaler must not decide on one rank alone

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        comm: Communicator | None,
        launch: Callable[[S], F] | None,
        fixed: Mapping[str, object],
        method: str,
    ) -> None:
        self._method = method
        self._comm = default_comm() if comm is None else comm
        require(
            "comm, give a ringcomm.Communicator", repr(comm), isinstance(self._comm, Communicator)
        )
        self._overlap = None if launch is None else Overlap(launch)
        self._spans: list[S] = []
        self._silent = 0
        self._calls = 0  # of step(), since the parameters last changed
        self.steps = 0
        self.skipped = 0
        self.account = Account()
        with naming(f"{type(self).__name__}()", "an optimizer's constructor"):
            require_alike(self._comm, {"optimizer": method, "overlap": launch is not None, **fixed})
            super().__init__(params, defaults)

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} cannot be copied or pickled; use state_dict()")

    @property
    def comm(self) -> Communicator:
        """The communicator in use."""
        return self._comm

    # ---- methods of subclasses ----

    def _add(self, new: Sequence[IndexedParameter]) -> None:
        """Lays out parameters in further ``_spans``."""
        raise NotImplementedError

    def _step(self) -> None:
        """Does the exchange and the update, after the checks of ``step``."""
        raise NotImplementedError

    def _read(self, tensors: Mapping[int, Any], own: Mapping[str, Any]) -> Callable[[], None]:
        """Reads a state, and returns what takes it. Changes nothing, and raises ConfigError for a
        state that does not fit.

        Args:
            tensors: by the number of each parameter, as in torch.optim's form.
            own: what ``_state_with`` was given when it was saved.
        """
        raise NotImplementedError

    # ---- for the caller ----

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group as torch.optim does. A collective, which broadcasts rank 0's parameters."""
        super().add_param_group(param_group)
        parameters = self.param_groups[-1]["params"]
        try:
            for parameter in parameters:
                self._refuse(parameter)
            about = [(list(p.shape), p.dtype, p.requires_grad) for p in parameters]
            with naming(f"add_param_group() of {type(self).__name__}"):
                require_same(self._comm, about, "parameters")
                for work in [self._comm.broadcast(p.detach(), async_op=True) for p in parameters]:
                    work.wait()
        except Exception:
            self.param_groups.pop()
            raise
        self._calls = 0

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context for backwards that only accumulate. Only ``overlap`` needs it."""
        return contextlib.nullcontext() if self._overlap is None else self._overlap.paused()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchanges with all ranks, and steps. A collective. Returns the closure's result.

        Raises:
            ConfigError: a DistributedDataParallel or a hook sends the gradients of the same
                parameters; or they have changed since ``overlap`` began to send them; or a
                GradScaler is used, which ``overlap`` does not allow; or a parameter has another
                size, dtype or device than before, as after ``model.bfloat16()``.
            MismatchError: the ranks train different parameters, are at different steps, or have
                different hyperparameters.
            RingcommError: in three steps this rank has had no gradient; or a collective failed.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        with torch.no_grad(), naming(f"step() of {type(self).__name__}"):
            self._extend()
            self._calls += 1  # calls 1, 4, 16, 64, ... check: a check takes a tenth of a second
            is_due = self._calls & (self._calls - 1) == 0 and self._calls.bit_length() % 2 == 1
            if is_due and self._comm.world_size > 1:
                refuse_others({id(one.parameter) for one in self._indexed()}, type(self).__name__)
            self._step()
            self.account.end_step()
        return loss

    # ---- measurements ----

    @property
    def carried(self) -> int:
        """Bytes that this rank has sent since ``reset_report``, over links or through shared
        memory, but for agreements, and exchanges that ``zero_grad`` or a load has dropped."""
        return self.account.sent.total

    @property
    def waited_s(self) -> float:
        """Seconds that steps have waited for exchanges since ``reset_report``."""
        return self.account.waited_s

    def reset_report(self) -> None:
        """Starts a new report; the coming step counts from now on."""
        self.account.reset()

    def report(self) -> ExchangeReport:
        """Returns the figures since the last reset, as ``HookState.report`` does; ``print`` shows
        them as a table. Of a step, ``exposed_s`` is the time that it has waited for exchanges, and
        ``hidden_s`` that in which others were in flight."""
        return self.account.report()

    # ---- layout and checks ----

    def _refuse(self, parameter: torch.Tensor) -> None:
        """Raises an error for a parameter that the optimizer does not take."""
        require_dense(parameter, "a parameter")

    def _extend(self) -> None:
        """Lays out parameters that are new, or trained for the first time."""
        known = {index for span in self._spans for index in span.indices}
        new = [
            one
            for one in self._indexed()
            if one.index not in known and one.parameter.requires_grad and one.parameter.numel()
        ]
        if new:
            require_same(self._comm, [one.index for one in new], "parameters that are trained")
            self._add(new)

    def _alike(self) -> dict[str, object]:
        """Returns the values that must be the same on all ranks before a step, by name."""
        return {"steps": self.steps} | {
            f"param_groups[{number}][{name!r}]": group[name]
            for number, group in enumerate(self.param_groups)
            for name in sorted(group)
            if name not in ("params", "param_names")
        }

    def _indexed(self) -> list[IndexedParameter]:
        every = [(n, p) for n, group in enumerate(self.param_groups) for p in group["params"]]
        return [IndexedParameter(index, group, p) for index, (group, p) in enumerate(every)]

    def _agree(self, max_norm: float | None = None) -> Verdict:
        """Agrees with all ranks on this step, and counts one that is left out; ``max_norm`` as in
        WireOptimizer."""
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        verdict = agree(
            self._comm,
            [place.gradient() for span in self._spans for place in span.slices],
            loss_scale=1.0 if scale is None else float(scale),
            found_inf=found_inf is not None and float(found_inf) > 0,
            max_norm=max_norm,
            alike=self._alike(),
        )
        if not verdict.finite:
            self._skip("the step is left out", warn=found_inf is None)
        return verdict

    def _require_active(self, has_gradient: bool) -> None:
        """Raises RingcommError if this rank has had no gradient for several steps."""
        self._silent = 0 if has_gradient else self._silent + 1
        if self._silent >= _PATIENCE:
            raise RingcommError(
                f"in {_PATIENCE} steps this {type(self).__name__} has had no gradient of any of "
                f"its parameters on rank {self._comm.rank}: are they those of the model that is "
                "trained? Make the optimizer when the model is final, and on its device"
            )

    def _skip(self, what: str, warn: bool = True) -> None:
        """Counts a skipped step or part of it, and warns of the first one."""
        self.skipped += 1
        if self.skipped == 1 and warn:
            warn_caller(
                f"a gradient is not finite: {what} on all ranks (the optimizer's attribute "
                "skipped counts them)"
            )

    # ---- states ----

    def _state_with(self, **own: Any) -> dict[str, Any]:
        """Returns a state in torch.optim's form, with this class's counts and ``own`` under a key
        of ringcomm's."""
        state = torch.optim.Optimizer.state_dict(self)
        state["state"] = {index: dict(one) for index, one in state["state"].items()}
        state[saved.KEY] = {
            "format": saved.FORMAT,
            "method": self._method,
            "steps": self.steps,
            "skipped": self.skipped,
            **own,
        }
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what ``state_dict`` or ``gather_state_dict`` returned. Nothing is sent; each
        rank loads its own, or all load the same. Parameters that are not in it begin anew.

        Raises ConfigError for a state of another method or model, or ``state_dict`` of a world of
        another size. (With ``state_dict`` of another rank of as many, residuals start from zero,
        with a warning.)
        """
        own = saved.require_method(state_dict, self._method)
        take = self._read(state_dict["state"], own)
        torch.optim.Optimizer.load_state_dict(
            self, {"state": {}, "param_groups": state_dict["param_groups"]}
        )
        self.steps, self.skipped = int(own["steps"]), int(own["skipped"])
        take()


class Overlap(Generic[S, F]):
    """Launches the exchanges of spans from hooks of their parameters.

    Args:
        launch: begins a span's exchange.

    Attributes:
        is_in_step: whether backward has computed a gradient since the last step: then exchanges
            have begun, on some rank at least.
    """

    def __init__(self, launch: Callable[[S], F]) -> None:
        self._launch = launch
        self._spans: list[S] = []
        self._paused = False
        self._handles: list[Any] = []
        self.reset()

    def watch(self, spans: Sequence[S]) -> None:
        """Watches the parameters of these spans from now on, and no others. Drops exchanges that
        have begun."""
        self.cancel()
        self.stop()
        self._spans, self._handles = [], []
        self.reset()
        self.extend(spans)

    def stop(self) -> None:
        """Watches no parameters any more."""
        for handle in self._handles:
            handle.remove()

    def extend(self, spans: Sequence[S]) -> None:
        """Watches these spans as well, after the others. Keeps exchanges that have begun; ``take``
        sends gradients that were computed before."""
        for number, span in enumerate(spans, len(self._spans)):
            for place in span.slices:
                parameter: Any = place.tensor
                hook = functools.partial(self._arrived, number)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        self._spans += spans
        self._lacking += [len(span.slices) for span in spans]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Returns a context in which backwards begin nothing."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def require_unchanged(self) -> None:
        """Begins the remaining exchanges. Raises ConfigError if a gradient has changed since its
        exchange began."""
        changed = any(
            place.tensor.grad is not known or (known is not None and known._version != version)
            for span in self._spans[: len(self._begun)]
            for place in span.slices
            for known, version in [self._versions[place.index]]
        )
        self._begin_rest()
        if changed:
            raise ConfigError(
                "gradients have changed since overlap=True began to send them in backward, as by "
                "clip_grad_norm_ or GradScaler.unscale_. Make the optimizer with overlap=False; "
                "those of ringcomm.torch.optim clip by max_norm= then"
            )

    def take(self) -> list[F]:
        """Begins the remaining exchanges, and returns those of all spans."""
        self._begin_rest()
        begun = self._begun
        self.reset()
        return begun

    def cancel(self) -> None:
        """Drops the exchanges of a step that is not made, on all ranks alike: as ranks may have
        begun unlike numbers of them, each begins all if it has a gradient. Raises the first error,
        when all are dropped."""
        if self.is_in_step:
            self._begin_rest()
        begun = self._begun
        self.reset()
        failed: RingcommError | None = None
        for exchange in begun:
            try:
                exchange.cancel()
            except RingcommError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _begin_rest(self) -> None:
        while len(self._begun) < len(self._spans):
            self._begin()

    def reset(self) -> None:
        """Forgets what a backward has begun."""
        self._begun: list[F] = []
        self.is_in_step = False
        self._versions: dict[int, tuple[torch.Tensor | None, int]] = {}
        self._lacking = [len(span.slices) for span in self._spans]  # gradients that each one lacks

    def _arrived(self, number: int, _: torch.Tensor) -> None:
        if self._paused:
            return
        if number < len(self._begun):
            raise ConfigError(
                "a second backward adds to gradients that overlap=True has begun to send; make all "
                "but the last one before a step under optimizer.no_sync(), or use overlap=False "
                "(with reentrant checkpoints, too)"
            )
        self.is_in_step = True
        self._lacking[number] -= 1
        while len(self._begun) < len(self._spans) and self._lacking[len(self._begun)] <= 0:
            self._begin()

    def _begin(self) -> None:
        span = self._spans[len(self._begun)]
        for place in span.slices:
            gradient = place.tensor.grad
            self._versions[place.index] = (gradient, 0 if gradient is None else gradient._version)
        with torch.no_grad():
            self._begun.append(self._launch(span))
