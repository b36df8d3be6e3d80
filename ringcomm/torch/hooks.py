"""The DDP communication hook: ringcomm reduces gradient buckets while backward runs.

DDP calls the hook for a bucket as soon as its gradients are computed. The hook submits an average
over all ranks and returns a Future, which a thread of ringcomm completes; DDP waits for the Futures
at the end of backward. So every bucket but the last ones travels while backward computes. On a GPU
the optimizer is launched while the last results are still being copied there.

The state consists of parts that know only each other's interfaces:

    codec policy    the codec of each step                 codec_policy.py
    pace            which step's mean a backward gets      pace.py, stale.py
    transport       the way to the other ranks and back    transport.py, trips.py
    residuals       codec errors to add later, by name     named_feedback.py
    account         bytes and times                        account.py

A bucket travels whole, except with error feedback or a codec of few bits. Then each large parameter
of it travels by itself, with its own residuals, and all vectors and small tensors go together at
bf16 (buckets.py): they are few bytes, and norms and biases tolerate the least rounding.

Invariants: DDP does not divide when a hook is set, so the result is the mean, made once. A bucket's
memory is DDP's own and is reduced in place. All ranks submit the same works in the same order,
which follows from the bucket, the settings and the number of the step.
"""

# No "from __future__ import annotations": DDP compares the hook's annotation with the class itself.
from collections.abc import Collection, Mapping
from typing import Any, Literal, NoReturn, TypedDict

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from ..codecs import CODECS, Compression
from ..communicator import Communicator
from ..core.calls import naming
from ..errors import ConfigError, RingcommError, TensorError
from ..exact import Checkpointed, require_format
from ..feedback import ErrorFeedback, FeedbackStore
from . import guards, profiling
from .argument_checks import require_able, require_truth, require_whole, takes
from .buckets import GradientBucket
from .codec_policy import CodecPolicy, needs_feedback, policy_of
from .guards import ONEBIT, AdamWatch
from .named_feedback import COMPRESSIBLE, NamedFeedback
from .stale import Stale1, pace_of
from .sync.account import Account
from .sync.agreement import require_alike
from .sync.exchange_report import ExchangeReport
from .transport import BucketInFlight, FlatTransport, GradientFuture, Transport

_FORMAT = 1  # of states; those without a number have it, too
#: Removed arguments and their replacements; see ``names_arguments``.
REMOVED = {"policy": "has been removed: give the CodecPolicy as compression="}


class HookSettings(TypedDict, total=False):
    """Arguments of HookState that other functions pass on unchanged."""

    comm: Communicator | None
    feedback: FeedbackStore | bool | None
    threshold: int
    warmup_steps: int
    scaler: Any
    force: bool
    pace: Literal["every", "stale1"] | Stale1
    transport: Transport | None


class HookState(Checkpointed):
    """Settings, residuals and measurements of the gradient hook.

    Args:
        compression: how float32 and float64 gradients travel: None or "none", "bf16", "fp16",
            "int8", "fp8", "int4", "int2" or "onebit". From int8 on, parameters of one dimension and
            those below ``threshold`` travel at bf16. Gradients of 16-bit models are not compressed.
            Complex ones travel as pairs of real numbers, from int8 on at bf16.
            "auto": none, bf16 or int8, chosen by measurements of link and model, and anew as they
            change. A CodecPolicy, such as Auto(model, allow=["int4"]): it chooses for each step.
        comm: the communicator; None: at the time of the first bucket, that of the default process
            group if its backend is "ringcomm", else ringcomm's default one. A DDP over some of its
            ranks needs one of these.
        model: the model that is trained, in DDP or not. Error feedback needs it, as residuals are
            kept by its parameters' names.
        feedback: None: error feedback where the codec needs it (int4, int2, onebit). True: with
            int8 and fp8, too. A FeedbackStore: residuals are kept in it. False: none.
        threshold: bytes of a gradient below which it is small.
        warmup_steps: number of first steps in which bf16 replaces int8 and harsher codecs: in the
            beginning gradients change fast, and residuals are soon stale. (A CodecPolicy has a
            number of its own.)
        scaler: a torch.amp.GradScaler, or an object with its ``get_scale()``: the factor that is in
            the gradients. It is read when a backward brings its first bucket, and residuals of
            earlier steps are scaled to it.
        force: take onebit under an optimizer that divides by its own mean square, as Adam and
            RMSprop do, and do not warn of staleness under Adam. Without it the first
            ``optimizer.step()`` raises ConfigError for onebit, before anything is stepped.
        pace: "every": each step gets its own mean, and waits for it. "stale1", or Stale1(...): it
            gets the mean of the step before, and a transfer may take a whole step; needs ``model``,
            a codec of 4 bits or more, and a DDP without find_unused_parameters. The first 100
            steps, or Stale1(dense_steps=...), are as with "every". See ``flush``.
        transport: the way of buckets to the other ranks; None: all-reduces by ``comm``.

    A step with a gradient that is not finite leaves all residuals as they were, as GradScaler
    skips the step. (Except residuals that none, bf16 or fp16 have just delivered.)

    With find_unused_parameters=True, DDP drops the mean of a parameter that no rank has used in a
    step, and with it the residual in that mean; pace="stale1" refuses the setting.

    Attributes:
        account: bytes and times.
        residuals: residuals by parameter, and whether the latest step was finite.
        steps: backwards whose gradients have all been submitted; a checkpoint keeps it, unless its
            state is empty.
        error: the first failure of a collective, None so far, which every later backward raises.
            DDP turns exceptions of Futures into RuntimeError; this one keeps its class.

    Raises ConfigError for a setting that cannot work. Settings are the same on all ranks: the first
    backward compares them, and raises MismatchError, which names the one that differs, on all.
    """

    @takes(removed=REMOVED)
    def __init__(
        self,
        compression: Compression | Literal["auto"] | CodecPolicy | None = None,
        comm: Communicator | None = None,
        *,
        model: torch.nn.Module | None = None,
        feedback: FeedbackStore | bool | None = None,
        threshold: int = 32 << 10,
        warmup_steps: int = 0,
        scaler: Any = None,
        force: bool = False,
        pace: Literal["every", "stale1"] | Stale1 = "every",
        transport: Transport | None = None,
    ) -> None:
        for name, value in (
            ("comm", comm),
            ("model", model),
            ("scaler", scaler),
            ("transport", transport),
        ):
            require_able(name, value)
        if feedback is not None and not isinstance(feedback, (bool, FeedbackStore)):
            raise ConfigError(f"feedback={feedback!r}: give a FeedbackStore, True, False or None")
        self.threshold = require_whole("threshold", threshold, 0)
        self.warmup_steps = require_whole("warmup_steps", warmup_steps, 0)
        self.scaler = scaler
        self.force = require_truth("force", force)
        self.steps = 0
        self.account = Account()
        self.transport = FlatTransport(comm) if transport is None else transport
        self.residuals = NamedFeedback(feedback, self.threshold, self.transport.kept_of)
        self.transport.bind(self.account, self.residuals)
        self._pace_setting = Stale1() if pace == "stale1" else pace
        self._pace = pace_of(self._pace_setting, self.transport, self.account, self.residuals)
        self._policy = policy_of(compression, warmup_steps, model)
        if model is not None:
            self.name_parameters(model)
        self._pace.require(self._policy.codecs)
        self.residuals.set_codec(self.compression, needs_feedback(self._policy))
        self._is_compared = False
        self._watch: AdamWatch | None = None
        guards.watch_hook(self)

    @property
    def comm(self) -> Communicator:
        """The communicator in use."""
        return self.transport.comm

    @property
    def error(self) -> RingcommError | None:
        """First failure of a collective; None so far."""
        return self.transport.error

    # ---- codec and feedback ----

    @property
    def compression(self) -> str:
        """Name of the codec or the policy. When a policy changes the codec, residuals are kept for
        the next one; none, bf16 and fp16 deliver them."""
        return self._policy.name

    @compression.setter
    def compression(self, compression: object) -> NoReturn:
        raise ConfigError(
            "compression is for the whole life of a HookState: give HookState("
            "compression=) a CodecPolicy, which chooses each step's codec"
        )

    @property
    def feedback(self) -> FeedbackStore:
        """Residuals by names of the model's parameters."""
        return self.residuals.store

    @property
    def loss_scale(self) -> float:
        """Factor that is in the gradients, as last read from ``scaler``; 1.0 without one."""
        return self.residuals.loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: object) -> NoReturn:
        raise ConfigError(
            "loss_scale is what the scaler says: give HookState(..., scaler=) the "
            "GradScaler, or what has its get_scale()"
        )

    def _follow_scaler(self) -> None:
        """Reads the loss scale of the coming gradients, and scales residuals of earlier steps to
        it."""
        if self.scaler is None:
            return
        scale = self.scaler.get_scale()
        if scale != self.loss_scale:
            self._pace.finish_previous_step(self.steps)
        self.residuals.scale_to(scale)

    @property
    def parameter_ids(self) -> Collection[int]:
        """id() of each parameter of the model; empty without a model."""
        return self.residuals.parameter_ids

    def name_parameters(self, model: torch.nn.Module) -> None:
        """Takes the parameters' names from the model, in DDP or not; an unpickled state has no
        names. Raises ConfigError for an object that is no model."""
        require_able("model", model)
        self.residuals.name_parameters(model)
        self._pace.take_model(model)

    def feedback_of(self, parameter: torch.Tensor) -> ErrorFeedback | Literal[False]:
        """Returns the parameter's ErrorFeedback; False if none is kept. Raises ConfigError for a
        parameter that is not the model's."""
        return self.residuals.feedback_of(parameter) or False

    # ---- checkpoints, and the end ----

    def saved(self, *, own: bool) -> dict[str, Any]:
        """Returns residuals and gradients in flight, by parameter, the policy's state, and the
        number of steps beside any of these or a warm-up. Empty if there is nothing to keep."""
        self._pace.finish_previous_step(self.steps)
        policy = self._policy.state_dict()
        if policy and not own:
            policy = self.transport.exchange.shared(policy)
        parts = {"policy": policy, "pace": self._pace.saved(own)}
        state: dict[str, Any] = {key: part for key, part in parts.items() if part}
        if self.residuals.keeps:
            self.residuals.commit_or_undo()
            feedback = self.transport.joined(self.feedback.saved(self.comm, own=own))
            state["feedback"] = {**feedback, "strides": self.residuals.saved_strides()}
        if self.warmup_steps or state:
            state |= {"format": _FORMAT, "steps": self.steps}
        return state

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Restores what ``state_dict`` or ``gather_state_dict`` returned; an empty state changes
        nothing. Nothing is sent; each rank loads its own, or all load the same. Load the model's
        weights first. A codec without residuals delivers those in the state. Parameters that are
        not in it, trained only since, start from zero.

        Args:
            strict: False: ignores residuals of parameters that are not trained, or small, here.

        Raises:
            ConfigError: the state is of another model, memory format or threshold, or
                ``state_dict`` of a world of another size; or this hook can keep no residuals, with
                feedback=False or no model. (With ``state_dict`` of another rank of as many,
                residuals start from zero, with a warning.)
        """
        if not state:
            return
        steps = _steps_of(state)
        self._pace.finish_previous_step(self.steps)
        residuals, policy, pace = (
            _mapping_of(state, key) for key in ("feedback", "policy", "pace")
        )
        self._pace.require_state(pace or {})
        before = self._policy.state_dict()
        if policy is not None:
            self._policy.load_state_dict(policy)
        if residuals is not None:
            try:
                self._load_residuals(residuals, strict)
            except Exception:
                if policy is not None:
                    self._policy.load_state_dict(before)
                raise
        self._pace.restore(pace or {})
        self.steps = steps

    def _load_residuals(self, saved: Mapping[str, Any], strict: bool) -> None:
        if not self.residuals.can_keep:
            raise ConfigError(
                "the state holds residuals, and this hook can keep none; give HookState(..., "
                "model=model) without feedback=False, or load {} to drop them"
            )
        self.residuals.commit_or_undo()
        self.residuals.load(self.transport.divided(saved), self.comm, strict)
        is_told = self.scaler is not None  # it scales them when the next step begins
        self.residuals.scale_to(self.feedback.loss_scale if is_told else self.loss_scale)

    def flush(self) -> bool:
        """Applies the late gradient of pace="stale1": waits for the gradient in flight and writes
        its mean over ``parameter.grad``; a grad that is None stays so where the mean is zero, as of
        a parameter that no rank has used. Returns whether there was one.

            if state.flush():               # all ranks, right after optimizer.step()
                optimizer.step()

        Call it at the end of training, so that no gradient is lost, and before an evaluation or a
        checkpoint of the model that needs all of them. The optimizer step of the next backward gets
        zeros. ``state_dict`` needs no flush: it has the gradients in flight. Raises the error of a
        transfer that failed."""
        self._pace.finish_previous_step(self.steps)
        self.residuals.commit_or_undo()  # before they follow the scaler: that cannot be undone
        self._follow_scaler()
        return self._pace.flush()

    # ---- a step ----

    def launch(self, bucket: GradBucket) -> GradientFuture:
        """Takes a bucket from DDP, and returns the Future for ``allreduce_hook``."""
        gradients = GradientBucket.from_ddp(bucket)
        if bucket.index() == 0:
            self._begin_step(gradients)
        if self._watch is not None:
            self._watch.see(one.tensor for one in gradients.slices)
        if self.error is not None:  # an earlier bucket failed, but DDP must see the step's end
            failed = BucketInFlight(self.transport, gradients)
            future = failed.future()
            failed.complete()
        else:
            known = gradients.buffer.dtype in COMPRESSIBLE
            try:
                codec = self._policy.codec(self.steps) if known else CODECS["none"]
                self._policy.look(gradients, self.loss_scale)
                if profiling.is_on():
                    future = profiling.bucket_range(
                        self.account,
                        gradients,
                        codec.name,
                        lambda: [rail.interface for rail in self.comm.rails],
                        lambda: self._pace.launch(gradients, codec),
                    )
                else:
                    future = self._pace.launch(gradients, codec)
            except BaseException as error:  # backward ends here
                if not isinstance(error, RingcommError):
                    text = f"a bucket was not sent: {type(error).__name__}: {error}"
                    self.transport.error = self.error or RingcommError(text)
                elif self.account.position or not isinstance(error, ConfigError):
                    self.transport.error = self.error or error  # some of the step may be in flight
                raise
        if gradients.last:
            self.steps += 1
        return future

    def _begin_step(self, bucket: GradientBucket) -> None:
        """Does what is due once in a step, before its first bucket. The step before may lack its
        last one, as backward has raised."""
        self._pace.finish_previous_step(self.steps)
        if self.error is not None:
            raise self.error
        self.account.drop_step()
        self.transport.begin(bucket)
        self.residuals.commit_or_undo()
        finite = self.residuals.take_verdict()
        for report in self.account.unreported_steps():
            self._policy.note(report, finite)
        self._follow_scaler()
        comm = self.comm
        try:
            self._require_alike(comm)
        except RingcommError as error:  # raised by this step's Futures
            self.transport.error = error
            return
        try:
            with naming("the agreement of HookState('auto')"):
                self._policy.begin(self.steps, self.transport.exchange)
        except RingcommError as error:  # backward ends here
            self.transport.error = self.error or error
            raise
        self.account.note_codec(self.steps, self._policy.codec(self.steps).name)
        self._watch_adam()

    def _require_alike(self, comm: Communicator) -> None:
        """Compares the settings of all ranks, once in the life of the state. A collective; raises
        MismatchError on all ranks where settings differ."""
        if self._is_compared:
            return
        self._is_compared = True
        name, codecs = self.compression, [codec.name for codec in self._policy.codecs]
        about: dict[str, object] = {
            "compression": name if codecs == [name] else f"{name} of {', '.join(codecs)}",
            "threshold": self.threshold,
            "warmup_steps": self.warmup_steps,
            "pace": self._pace_setting,
            "feedback": self.residuals.keeps,
            "steps": self.steps,
        }
        if comm.world_size > 1:
            with naming("the agreement of HookState on its settings"):
                require_alike(comm, about)

    def _watch_adam(self) -> None:
        """Starts a watch if the codec, now or after a warm-up, or the pace does not suit every
        optimizer."""
        codecs = self._policy.name, self._policy.codec(self.steps).name
        unsuited = ONEBIT if "onebit" in codecs else self._pace.under_adam
        is_watched = self._watch is not None and self._watch.unsuited is unsuited
        if unsuited is not None and not is_watched and not self.force:
            self._watch = AdamWatch(unsuited)

    # ---- measurements ----

    def reset(self) -> None:
        """Starts a new report; the coming step counts from now on."""
        self.account.reset()

    def report(self) -> ExchangeReport:
        """Returns the figures since the last reset; ``print`` shows them as a table.

        Returns:
            A dictionary, whose values are attributes, too: buckets; payload_bytes (gradient bytes
            reduced, before compression); wire_bytes (payload that this rank sent over its ports
            for them, after compression, without frame headers); shared_bytes (written to memory
            that ranks of one host share, and sent over no port); rail_bytes (sent by each
            port, in rail order, with headers); comm_s (seconds from submission to completion,
            summed over buckets); works (a pair of time.perf_counter() values, submitted and done,
            per bucket); steps: a dictionary for each step that is over, of

                step_s      seconds from the end of the step before (first: from the reset)
                compute_s   of it, until backward had submitted its last bucket
                backward_s  of it, since backward had submitted its first one
                exposed_s   of it, from the last submission until the last bucket was over
                hidden_s    of compute_s, in which buckets were in flight
                in_flight_s hidden and exposed
                deferred    whether its means are for the step after, as with pace="stale1"
                buckets, payload_bytes, wire_bytes, shared_bytes

            and codecs: of the whole run, a dictionary of codec, first and last for each run of
            steps with one codec, in order.

            Only the buckets' own collectives count, not the traffic of a HierarchicalState's local
            group. works and steps are those of the latest 1000 steps.
        """
        return self.account.report()

    # ---- copies ----

    def __getstate__(self) -> dict[str, Any]:
        return {
            "policy": self._policy,
            "feedback": self.residuals.wanted,
            "threshold": self.threshold,
            "warmup_steps": self.warmup_steps,
            "force": self.force,
            "steps": self.steps,
            "pace": self._pace_setting,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.restore(state, FlatTransport(None))

    def restore(self, state: dict[str, Any], transport: Transport) -> None:
        """Makes this a copy from a pickled state, without model or residuals."""
        HookState.__init__(
            self,
            state["policy"],
            feedback=False,
            threshold=state["threshold"],
            force=state["force"],
            warmup_steps=state["warmup_steps"],
            transport=transport,
        )
        guards.unwatch(self)  # a copy may never be used
        self.steps = state["steps"]
        self._pace_setting = state["pace"]
        self._pace = pace_of(self._pace_setting, transport, self.account, self.residuals)
        self.residuals.wanted = state["feedback"]


def _steps_of(state: object) -> int:
    """Returns the number of steps in a HookState's state. Raises ConfigError for anything else."""
    keys = {"format", "steps", "feedback", "policy", "pace"}
    if not isinstance(state, Mapping) or not set(state) <= keys:
        raise ConfigError(
            "this is no state of a HookState: it has other keys than 'steps', "
            "'feedback', 'policy' and 'pace'"
        )
    require_format({"format": _FORMAT, **state}, _FORMAT, "HookState")
    return require_whole("number of steps in the state", state.get("steps", 0), 0)


def _mapping_of(state: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    found = state.get(key)
    if found is not None and not isinstance(found, Mapping):
        raise ConfigError(f"this is no state of a HookState: its {key!r} is no dictionary")
    return found


def _require_dense(gradients: torch.Tensor, bucket: GradBucket) -> None:
    if gradients.layout != torch.strided:
        raise TensorError(
            f"the hook takes dense gradients, and these are {gradients.layout}: make the layer "
            "with sparse=False, or train without a hook on backend 'ringcomm', which takes both"
        )
    if gradients.device.type not in ("cpu", "cuda"):
        raise TensorError(f"a gradient on device '{gradients.device}' is not supported")
    device = bucket.parameters()[0].device
    if device != gradients.device:
        raise TensorError(
            f"the model is on {device}, and was on {gradients.device} when it was wrapped in DDP; "
            "move it first, then wrap it"
        )


def allreduce_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a gradient bucket over all ranks of ``state.comm``.

    Register with ``ddp.register_comm_hook(HookState(...), allreduce_hook)``. A failure raises at
    the end of backward, where DDP makes it a RuntimeError with the error's text; ``state.error`` is
    the error itself, which every later backward raises.

    Raises ConfigError for another state than a HookState, or under torch's python_reducer, and
    TensorError for gradients that are sparse, or on another device than their parameters, in
    backward and on every rank.
    """
    if not isinstance(state, HookState):
        raise ConfigError(
            f"allreduce_hook was registered with {state!r} as its state; use "
            "ddp.register_comm_hook(HookState(...), allreduce_hook)"
        )
    if not hasattr(bucket, "buffer"):
        raise ConfigError(
            "allreduce_hook takes buckets of gradients, and DDP brings single ones under "
            "torch._dynamo.config.optimize_ddp = 'python_reducer'; leave that at its default"
        )
    _require_dense(bucket.buffer(), bucket)
    return state.launch(bucket)
