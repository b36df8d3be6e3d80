"""The DDP communication hook: gradient buckets reduced by ringcomm while backward goes on.

DDP calls the hook for a bucket as soon as its gradients are there. The hook submits an average
over all ranks and returns a Future, which a thread of ringcomm completes; DDP waits for the Futures
at the end of backward. So every bucket but the last ones travels while backward computes.

A bucket travels whole, save with error feedback or a codec of few bits. Then each large parameter
of it travels by itself, with its own residuals, and what is left, vectors and small tensors, goes
together at bf16: that is next to nothing in bytes, and norms and biases bear the least rounding.

    bucket   | bias | weight ............ | norm | weight ........ |
    travels  | bf16 | onebit, feedback    | bf16 | onebit, feedback|     three all-reduces

Invariants: DDP does not divide when a hook is set, so the result is the mean, made once. A bucket's
memory is DDP's own and is reduced in place. What a parameter has left is kept under its name, never
by bucket: DDP lays the buckets out anew after the first step. All ranks submit the same works in
the same order, as that follows from the bucket and the settings.
"""

# No "from __future__ import annotations": DDP compares the hook's annotation with the class itself.
import threading
import time
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from ..api import default_communicator
from ..codecs import CODECS, Codec, parse, refuse_composed
from ..communicator import Communicator
from ..errors import ConfigError, RingcommError
from ..feedback import ErrorFeedback, FeedbackStore
from ..work import Work

_COMPRESSIBLE = (torch.float32, torch.float64)


def _codec(compression: str | None) -> Codec:
    codec = parse(compression)
    refuse_composed(codec, "the hook")
    return codec


class HookState:
    """What the hook needs to know and to remember, and what it has measured.

    Args:
        compression: how float32 and float64 gradients travel: None or "none", "bf16", "fp16",
            "int8", "fp8", "int4" or "onebit". From int8 on, parameters of one dimension and those
            below ``threshold`` travel at bf16. Gradients of 16-bit models travel as they are.
        comm: the communicator; None: the default one at the time of the first bucket.
        model: the model that is trained, in DDP or not. Its parameters' names are what residuals
            are kept by, so error feedback needs it.
        feedback: None: error feedback where the codec needs it (int4, onebit). True: with int8 and
            fp8, too. A FeedbackStore: that one. False: none.
        threshold: bytes of a gradient below which it is small.

    With find_unused_parameters=True, DDP drops what arrives for a parameter that no rank has used
    in a step, and so what was left of it.

    Attributes:
        feedback: the FeedbackStore in use, by names of the model's parameters.
        error: the first failure of a collective, None so far. DDP turns exceptions of Futures
            into RuntimeError; this one keeps its class.

    Raises ConfigError for a setting that cannot work.
    """

    def __init__(
        self,
        compression: str | None = None,
        comm: Communicator | None = None,
        *,
        model: torch.nn.Module | None = None,
        feedback: FeedbackStore | bool | None = None,
        threshold: int = 32 << 10,
    ) -> None:
        if isinstance(threshold, bool) or not isinstance(threshold, int) or threshold < 0:
            raise ConfigError(f"threshold={threshold!r}: give bytes, 0 or more")
        if feedback is not None and not isinstance(feedback, (bool, FeedbackStore)):
            raise ConfigError(f"feedback={feedback!r}: give a FeedbackStore, True, False or None")
        self.threshold = threshold
        self.feedback = feedback if isinstance(feedback, FeedbackStore) else FeedbackStore()
        self._wanted = None if feedback is None else feedback is not False
        self._names: dict[int, tuple[torch.Tensor, str]] = {}
        self._codec = _codec(compression)
        if model is not None:
            self.name_parameters(model)
        self._require_names()
        self._comm = comm
        self.error: RingcommError | None = None
        self._lock = threading.Lock()
        self._wire_before = 0
        self._zero()

    @property
    def comm(self) -> Communicator:
        """The communicator in use."""
        if self._comm is None:
            self._comm = default_communicator()
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
                self.feedback[name].require_size(parameter.numel())

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
        trained = parameter.requires_grad and parameter.dtype in _COMPRESSIBLE
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

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep: the residuals, by parameter. Empty where none are kept. A
        collective; see ``FeedbackStore.state_dict``."""
        return {"feedback": self.feedback.state_dict(self.comm)} if self._keeps else {}

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Goes on from what ``state_dict`` returned, in a world of any size; an empty one starts
        from zero. A codec that leaves nothing delivers what was left. See
        ``FeedbackStore.load_state_dict``.

        Raises ConfigError if it is of another model or threshold, or if this state can keep no
        residuals: it has feedback=False, or no model.
        """
        if not state:
            return
        if self._wanted is False or not self._names:
            raise ConfigError(
                "the state holds residuals, and this hook can keep none; give HookState(..., "
                "model=model) without feedback=False, or load {} to drop them"
            )
        if not isinstance(state, Mapping) or not isinstance(state.get("feedback"), Mapping):
            raise ConfigError("this is no state of a HookState: it has no 'feedback'")
        self._reserve()
        self.feedback.load_state_dict(state["feedback"], self.comm, strict=strict)

    # ---- what it measures ----

    def _zero(self) -> None:
        self._buckets = 0
        self._gradient_bytes = 0
        self._works: list[tuple[float, float]] = []

    def reset(self) -> None:
        """Starts a new report."""
        with self._lock:
            self._zero()
            self._wire_before = self.comm.stats()["payload_bytes"]

    def report(self) -> dict[str, Any]:
        """What happened since the last reset.

        Returns:
            buckets; payload_bytes (gradient bytes reduced, before compression); wire_bytes
            (payload bytes that this rank sent, after compression); comm_s (seconds from submission
            to completion, summed over buckets); works (a pair of time.perf_counter() values,
            submitted and done, per bucket).
        """
        with self._lock:
            return {
                "buckets": self._buckets,
                "payload_bytes": self._gradient_bytes,
                "wire_bytes": self.comm.stats()["payload_bytes"] - self._wire_before,
                "comm_s": sum(done - submitted for submitted, done in self._works),
                "works": list(self._works),
            }

    def _count(self, nbytes: int, submitted: float, done: float) -> None:
        with self._lock:
            self._buckets += 1
            self._gradient_bytes += nbytes
            self._works.append((submitted, done))

    def __getstate__(self) -> dict[str, Any]:
        return {
            "compression": self.compression, "feedback": self._wanted, "threshold": self.threshold,
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(  # type: ignore[misc]
            None, feedback=False, threshold=state["threshold"]
        )
        self._wanted, self._codec = state["feedback"], _codec(state["compression"])


# ---- the parts of a bucket ----


class _Parts:
    """A bucket cut into what travels by itself."""

    def __init__(self, state: HookState, bucket: GradBucket) -> None:
        self._buffer = bucket.buffer()
        self.large: list[tuple[torch.Tensor, ErrorFeedback | Literal[False]]] = []
        self._small: list[torch.Tensor] = []
        end = 0
        for parameter, start, stop in self._spans(bucket):
            if state._is_large(parameter):
                self._leave(end, start)
                self.large.append((self._buffer[start:stop], state.feedback_of(parameter)))
                end = stop
        self._leave(end, self._buffer.numel())
        self.rest = self._pack()

    def _spans(self, bucket: GradBucket) -> list[tuple[torch.Tensor, int, int]]:
        """(parameter, start, stop) in the buffer, in order of place."""
        base, item = self._buffer.data_ptr(), self._buffer.element_size()
        spans = []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if gradient.numel():
                start = (gradient.data_ptr() - base) // item
                spans.append((parameter, start, start + gradient.numel()))
        return sorted(spans, key=lambda span: span[1])

    def _leave(self, start: int, stop: int) -> None:
        if start < stop:
            self._small.append(self._buffer[start:stop])

    def _pack(self) -> torch.Tensor | None:
        if len(self._small) > 1:
            return torch.cat(self._small)
        return self._small[0] if self._small else None

    def unpack(self) -> None:
        """Brings the result of ``rest`` to its place."""
        if self.rest is not None and len(self._small) > 1:
            start = 0
            for part in self._small:
                part.copy_(self.rest[start : start + part.numel()])
                start += part.numel()


class _Flight:
    """The works of a bucket, and a Future of all of them."""

    def __init__(self, state: HookState, bucket: GradBucket) -> None:
        self._state = state
        self._gradients = bucket.buffer()
        self._lock = threading.Lock()
        self._works: list[Work] = []
        self._open = 1
        # Typed as Any: the generic alias cannot be called on every supported torch.
        self._future: Any = torch.futures.Future()
        self._submitted = time.perf_counter()

    def submit(
        self, tensor: torch.Tensor, compression: str | None,
        feedback: ErrorFeedback | Literal[False],
    ) -> None:  # fmt: skip
        """Averages a part of the bucket."""
        with self._lock:
            self._open += 1
        self._state.comm.allreduce(
            tensor, "avg", compression=compression, feedback=feedback, async_op=True,
            on_done=self._over,
        )  # fmt: skip

    def _over(self, work: Work | None) -> None:
        with self._lock:
            if work is not None:
                self._works.append(work)
            self._open -= 1
            last = self._open == 0
        if last:
            self._state._count(self._gradients.nbytes, self._submitted, time.perf_counter())
            self._future.set_result(self._works)

    def landed(self, parts: _Parts | None) -> torch.futures.Future[torch.Tensor]:
        """After the last submit: the bucket's gradients, once all its works are over."""

        def result(finished: Any) -> torch.Tensor:
            for work in finished.value():
                error = work.exception()
                if error is not None:
                    if self._state.error is None:
                        self._state.error = error
                    raise error
            if parts is not None:
                parts.unpack()
            return self._gradients

        future = self._future.then(result)
        self._over(None)
        return future  # type: ignore[no-any-return]


def allreduce_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a gradient bucket over all ranks of ``state.comm``.

    Register with ``ddp.register_comm_hook(HookState(...), allreduce_hook)``. A failure raises in
    backward: as the ringcomm error itself if a later bucket meets it, else, for want of a way
    through DDP, as a RuntimeError with its text. ``state.error`` is the error itself either way.
    """
    if state.error is not None:
        raise state.error
    gradients = bucket.buffer()
    codec = state._codec if gradients.dtype in _COMPRESSIBLE else CODECS["none"]
    flight = _Flight(state, bucket)
    if not codec.quantises and not (state._keeps and gradients.dtype in _COMPRESSIBLE):
        flight.submit(gradients, codec.name, False)
        return flight.landed(None)
    parts = _Parts(state, bucket)
    for tensor, feedback in parts.large:
        flight.submit(tensor, codec.name, feedback)
    if parts.rest is not None:
        flight.submit(parts.rest, "bf16" if codec.quantises else codec.name, False)
    return flight.landed(parts)
