"""The DDP communication hook: gradient buckets reduced by ringcomm while backward goes on.

DDP calls the hook for a bucket as soon as its gradients are there. The hook submits an average
over all ranks and returns a Future, which a thread of ringcomm completes; DDP waits for the Futures
at the end of backward. So every bucket but the last ones travels while backward computes. On a GPU
the optimizer is launched while the last results are still being copied there.

A bucket travels whole, save with error feedback or a codec of few bits. Then each large parameter
of it travels by itself, with its own residuals, and what is left, vectors and small tensors, goes
together at bf16: that is next to nothing in bytes, and norms and biases bear the least rounding.

    bucket   | bias | weight ............ | norm | weight ........ |
    travels  | bf16 | onebit, feedback    | bf16 | onebit, feedback|     three all-reduces

Invariants: DDP does not divide when a hook is set, so the result is the mean, made once. A bucket's
memory is DDP's own and is reduced in place. What a parameter has left is kept under its name, never
by bucket: DDP lays the buckets out anew after the first step. All ranks submit the same works in
the same order, as that follows from the bucket, the settings and the number of the step. A step in
which a result is not finite leaves all residuals as they were.
"""

# No "from __future__ import annotations": DDP compares the hook's annotation with the class itself.
from collections.abc import Collection, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from ..api import default_communicator
from ..codecs import CODECS, Codec, Compression, parse, refuse_composed
from ..communicator import Communicator
from ..errors import ConfigError, RingcommError, TensorError
from ..feedback import ErrorFeedback, FeedbackStore
from . import profiling, silence
from .account import Account, HookReport
from .buckets import COMPRESSIBLE, Flight, Parts
from .group import RingcommGroup
from .optimizers import AdamWatch
from .ranges import in_flight
from .streams import Poison
from .tensors import require_dense


def _codec(compression: str | None) -> Codec:
    codec = parse(compression)
    refuse_composed(codec, "the hook")
    return codec


def default_of(group: Any) -> Communicator:
    """The communicator of a process group of backend "ringcomm", else ringcomm's default one."""
    return group.comm if isinstance(group, RingcommGroup) else default_communicator()


class HookState:
    """What the hook needs to know and to remember, and what it has measured.

    Args:
        compression: how float32 and float64 gradients travel: None or "none", "bf16", "fp16",
            "int8", "fp8", "int4", "onebit", "topk" or ringcomm.topk(density). From int8 on,
            parameters of one dimension and those below ``threshold`` travel at bf16. Gradients of
            16-bit models travel as they are.
        comm: the communicator; None: at the time of the first bucket, that of the default process
            group if its backend is "ringcomm", else ringcomm's default one.
        model: the model that is trained, in DDP or not. Its parameters' names are what residuals
            are kept by, so error feedback needs it.
        feedback: None: error feedback where the codec needs it (int4, onebit, topk). True: with
            int8 and fp8, too. A FeedbackStore: that one. False: none.
        threshold: bytes of a gradient below which it is small.
        warmup_steps: in that many first steps codecs from int8 on wait, and gradients travel at
            bf16: in the beginning they change fast, and what is kept of them is soon stale.
        scaler: a torch.amp.GradScaler. Its scale is read when a backward brings its first bucket,
            so that what is left of earlier steps follows it; ``loss_scale`` need not be set.
        force: do not warn of onebit under a plain Adam.

    A step with a gradient that is not finite leaves all residuals as they were, for GradScaler
    drops it. (Save those that none, bf16 or fp16 had just delivered.)

    With find_unused_parameters=True, DDP drops what arrives for a parameter that no rank has used
    in a step, and so what was left of it.

    Attributes:
        account: what it has measured.
        feedback: the FeedbackStore in use, by names of the model's parameters.
        steps: backwards whose gradients have all been submitted; a checkpoint keeps it.
        error: the first failure of a collective, None so far. DDP turns exceptions of Futures
            into RuntimeError; this one keeps its class.

    Raises ConfigError for a setting that cannot work.
    """

    def __init__(
        self,
        compression: Compression | None = None,
        comm: Communicator | None = None,
        *,
        model: torch.nn.Module | None = None,
        feedback: FeedbackStore | bool | None = None,
        threshold: int = 32 << 10,
        warmup_steps: int = 0,
        scaler: Any = None,
        force: bool = False,
    ) -> None:
        _require_whole("threshold", threshold, "bytes")
        _require_whole("warmup_steps", warmup_steps, "a number of steps")
        if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
            raise ConfigError(f"scaler={scaler!r}: give a torch.amp.GradScaler, or None")
        if feedback is not None and not isinstance(feedback, (bool, FeedbackStore)):
            raise ConfigError(f"feedback={feedback!r}: give a FeedbackStore, True, False or None")
        self.threshold = threshold
        self.warmup_steps = warmup_steps
        self.scaler = scaler
        self.force = force
        self.steps = 0
        self.feedback = feedback if isinstance(feedback, FeedbackStore) else FeedbackStore()
        self._wanted = None if feedback is None else feedback is not False
        self._names: dict[int, tuple[torch.Tensor, str]] = {}
        self._codec = _codec(compression)
        if model is not None:
            self.name_parameters(model)
        self._require_names()
        self._comm = comm
        self.error: RingcommError | None = None
        self.account = Account()
        self._step = _StepMemory()
        self._watch: AdamWatch | None = None
        silence.watch_hook(self)

    @property
    def parameter_ids(self) -> Collection[int]:
        """The model's parameters, by id(); empty without a model."""
        return self._names.keys()

    @property
    def comm(self) -> Communicator:
        """The communicator in use."""
        if self._comm is None:
            self._comm = default_of(dist.group.WORLD)
        return self._comm

    # ---- codec and feedback ----

    @property
    def compression(self) -> str:
        """The codec's name. It may be changed between two steps, on all ranks alike: residuals stay
        for the next codec, and one of none, bf16 and fp16 delivers them."""
        return self._codec.name

    @compression.setter
    def compression(self, compression: str | None) -> None:
        before, self._codec = self._codec, _codec(compression)
        try:
            self._require_names()
        except ConfigError:
            self._codec = before
            raise

    @property
    def loss_scale(self) -> float:
        """The factor that is in the gradients, 1.0 at first. With a GradScaler set it to
        ``scaler.get_scale()`` before each backward: what is left of earlier steps is rescaled."""
        return self.feedback.loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self.feedback.loss_scale = scale

    def name_parameters(self, model: torch.nn.Module) -> None:
        """Takes the parameters' names from the model, in DDP or not. Where the state was unpickled,
        it has none."""
        inner = getattr(model, "module", model)
        self._names = {
            id(parameter): (parameter, name.replace("_orig_mod.", ""))
            for name, parameter in inner.named_parameters()
        }
        if self._keeps:
            self._reserve()

    def _reserve(self) -> None:
        """An ErrorFeedback for each large parameter."""
        for parameter, name in self._names.values():
            if self._is_large(parameter):
                self.feedback[name].require_size(self._kept_of(parameter))

    def _kept_of(self, parameter: torch.Tensor) -> int:
        """Of how many of its elements this rank keeps residuals."""
        return parameter.numel()

    @property
    def _keeps(self) -> bool:
        """Whether residuals are kept."""
        if self._wanted is None:
            return self._codec.needs_feedback or len(self.feedback) > 0
        return self._wanted

    def _require_names(self) -> None:
        if self._keeps and not self._names:
            raise ConfigError(
                f"compression={self._codec.name!r} keeps error feedback by the names of the "
                "model's parameters; give HookState(..., model=model), or feedback=False to go "
                "without"
            )

    def _is_large(self, parameter: torch.Tensor) -> bool:
        """Whether it travels by itself; else it is left to bf16."""
        big = parameter.numel() * parameter.element_size() >= self.threshold
        trained = parameter.requires_grad and parameter.dtype in COMPRESSIBLE
        return trained and parameter.dim() > 1 and parameter.numel() > 0 and big

    def feedback_of(self, parameter: torch.Tensor) -> ErrorFeedback | Literal[False]:
        """The parameter's ErrorFeedback; False where none is kept. Raises ConfigError for a
        parameter that is not the model's."""
        if not self._keeps:
            return False
        if id(parameter) not in self._names:
            self._require_names()
            raise ConfigError("DDP brings a parameter that is not among those of HookState's model")
        return self.feedback[self._names[id(parameter)][1]]

    def state_dict(self, *, exact: bool = False) -> dict[str, Any]:
        """What a checkpoint must keep: the residuals, by parameter, and the steps where there is a
        warm-up. Empty where there is neither. A collective; see ``FeedbackStore.state_dict``.

        It fits a world of any size, and training goes on from it along the same curve, though not
        to the bit. With ``exact`` it does go on to the bit, in a world of the same size: the state
        is then this rank's own, to be saved by each rank in a file of its own. Nothing is sent."""
        state: dict[str, Any] = {"steps": self.steps} if self.warmup_steps else {}
        if self._keeps:
            self._step.settle()
            state["feedback"] = self.feedback.state_dict(self.comm, exact=exact)
        return state

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Goes on from what ``state_dict`` returned, in a world of any size (an exact one: of the
        same); an empty one starts from zero. A codec that leaves nothing delivers what was left.
        See ``FeedbackStore.load_state_dict``.

        Raises ConfigError if it is of another model or threshold, or if this state can keep no
        residuals: it has feedback=False, or no model. Or an exact one of another rank or world.
        """
        if not state:
            return
        steps, residuals = _read_state(state)
        if residuals is not None:
            if self._wanted is False or not self._names:
                raise ConfigError(
                    "the state holds residuals, and this hook can keep none; give HookState(..., "
                    "model=model) without feedback=False, or load {} to drop them"
                )
            self._step.settle()
            self._reserve()
            self.feedback.load_state_dict(residuals, self.comm, strict=strict)
        self.steps = steps

    # ---- a step ----

    def _begin_bucket(self) -> None:
        """Before any work of a bucket: what is due once in a step."""
        if self._step.running:
            return
        if self.error is not None:
            raise self.error
        silence.tidy()
        self._step.settle()
        self._step.running = True
        if self.scaler is not None:
            self.loss_scale = self.scaler.get_scale()
        if self._watch is not None:
            self._watch.end_if_seen()
        elif self._codec.name == "onebit" and self._names and not self.force:
            self._watch = AdamWatch(self, self._names)

    def _end_bucket(self, last: bool) -> None:
        """After the last submit of a bucket, ``last`` of its step."""
        if last:
            self._step.running = False
            self.steps += 1

    def _launch(
        self, bucket: GradBucket, gradients: torch.Tensor, last: bool
    ) -> torch.futures.Future[torch.Tensor]:
        """Submits a bucket; its gradients, once they are means."""
        codec = self._codec_of(gradients)
        flight = Flight(self, gradients, last)
        parts = None
        if self._is_cut(codec, gradients):
            parts = Parts(self, bucket, codec)
            for tensor, feedback in parts.large:
                flight.submit(tensor, codec.name, feedback)
            if parts.rest is not None:
                flight.submit(parts.rest, "bf16" if codec.quantises else codec.name, False)
        else:
            flight.submit(gradients, codec.name, False)
        self._end_bucket(last)
        return flight.future(parts)

    def _is_cut(self, codec: Codec, gradients: torch.Tensor) -> bool:
        """Whether large parameters travel by themselves."""
        return codec.quantises or (self._keeps and gradients.dtype in COMPRESSIBLE)

    def _codec_of(self, gradients: torch.Tensor) -> Codec:
        """What a bucket travels in."""
        if gradients.dtype not in COMPRESSIBLE:
            return CODECS["none"]
        waits = self._codec.quantises and self.steps < self.warmup_steps
        return CODECS["bf16"] if waits else self._codec

    # ---- what it measures ----

    def reset(self) -> None:
        """Starts a new report; the coming step counts from here on."""
        self.account.reset()

    def report(self) -> HookReport:
        """What happened since the last reset. ``print`` shows it as a table.

        Returns:
            A dictionary, whose values are attributes, too: buckets; payload_bytes (gradient bytes
            reduced, before compression); wire_bytes (payload that this rank sent over its ports
            for them, after compression, without frame headers); shared_bytes (what it put into the
            memory that ranks of one host share, which passes no port); rail_bytes (sent by each
            port, in rail order, with headers); comm_s (seconds from submission to completion,
            summed over buckets); works (a pair of time.perf_counter() values, submitted and done,
            per bucket); steps: a dictionary for each step that is over, of

                step_s      seconds from the end of the step before (first: from the reset)
                compute_s   of it, until backward had submitted its last bucket
                exposed_s   of it, from there until the last bucket was over
                hidden_s    of compute_s, in which buckets were in flight
                buckets, payload_bytes, wire_bytes, shared_bytes

            Only the buckets' own collectives count. What a HierarchicalState's local group moves is
            not among them. Of works and steps, those of the latest 1000 steps.
        """
        return self.account.report()

    def __getstate__(self) -> dict[str, Any]:
        return {
            "compression": self.compression, "feedback": self._wanted, "threshold": self.threshold,
            "warmup_steps": self.warmup_steps, "force": self.force, "steps": self.steps,
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        HookState.__init__(
            self, None, feedback=False, threshold=state["threshold"], force=state["force"],
            warmup_steps=state["warmup_steps"],
        )  # fmt: skip
        silence.forget(self)  # a copy, as in a checkpoint, need carry nothing
        self.steps = state["steps"]
        self._wanted, self._codec = state["feedback"], _codec(state["compression"])


class _StepMemory:
    """What the hook knows of the step in progress, or of the latest.

    Attributes:
        running: buckets of it are still to come.
        poison: of each bucket, whether a result was not finite; on all ranks alike.
        used: what a codec has changed residuals of that can be taken back.
    """

    def __init__(self) -> None:
        self.running = False
        self.poison: list[Poison] = []
        self.used: list[ErrorFeedback] = []

    def settle(self) -> None:
        """At its end: if it is going to be dropped, residuals are what they were before it."""
        if any(poison.is_there() for poison in self.poison):
            for feedback in self.used:
                feedback.undo()
        self.poison, self.used = [], []


def _require_whole(name: str, value: object, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{name}={value!r}: give {what}, 0 or more")


def _read_state(state: object) -> tuple[int, Mapping[str, Any] | None]:
    """(steps, residuals or None) of a state."""
    if not isinstance(state, Mapping) or not set(state) <= {"steps", "feedback"}:
        raise ConfigError("this is no state of a HookState: it has other keys than 'steps' and "
                          "'feedback'")  # fmt: skip
    steps, residuals = state.get("steps", 0), state.get("feedback")
    _require_whole("the state's steps", steps, "a number of steps")
    if residuals is not None and not isinstance(residuals, Mapping):
        raise ConfigError("this is no state of a HookState: its 'feedback' is no dictionary")
    return steps, residuals


def _require_dense(gradients: torch.Tensor, bucket: GradBucket) -> None:
    if gradients.layout != torch.strided:
        raise TensorError(
            f"the hook takes dense gradients, and these are {gradients.layout}: make the layer "
            "with sparse=False, or train without a hook on backend 'ringcomm', which takes both"
        )
    require_dense(gradients)
    device = bucket.parameters()[0].device
    if device != gradients.device:
        raise TensorError(
            f"the model is on {device}, and was on {gradients.device} when it was wrapped in DDP; "
            "move it first, then wrap it"
        )


def allreduce_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a gradient bucket over all ranks of ``state.comm``.

    Register with ``ddp.register_comm_hook(HookState(...), allreduce_hook)``. A failure raises at
    the end of backward: for want of a way through DDP as a RuntimeError with its text.
    ``state.error`` is the error itself, which every later backward raises.

    Raises ConfigError for another state than a HookState, and TensorError for gradients that are
    sparse, or on another device than their parameters, in backward and on every rank.
    """
    if not isinstance(state, HookState):
        raise ConfigError(
            f"allreduce_hook was registered with {state!r} as its state; use "
            "ddp.register_comm_hook(HookState(...), allreduce_hook)"
        )
    gradients, last = bucket.buffer(), bucket.is_last()
    _require_dense(gradients, bucket)
    state._begin_bucket()
    if state.error is not None:  # of an earlier bucket: DDP must see the step's end all the same
        state._end_bucket(last)
        return Flight(state, gradients, last).future(None)
    if not profiling.is_on():
        return state._launch(bucket, gradients, last)
    return in_flight(
        state.account, state._codec_of(gradients).name, gradients.nbytes,
        lambda: [rail.interface for rail in state.comm.rails], last,
        lambda: state._launch(bucket, gradients, last),
    )  # fmt: skip
