"""The DDP hook's size rules and its error feedback, with buckets made here: which parameter travels
how, what is kept under which name, checkpoints. (With DDP itself: test_hooks.py.)"""

from __future__ import annotations

import copy
import importlib.util
import pickle

import numpy as np
import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from ddp_buckets import LARGE, THRESHOLD, ByStep, Net, Scaler, gradients_of, reduce, trained
from quantised_reference import payload_bytes
from ranks import World, run_ranks
from tensors import stored
from torch import nn

from ringcomm import Communicator, ConfigError, FeedbackStore, TensorError
from ringcomm.torch import HookState
from ringcomm.torch.sync import pending
from ringcomm.torch.tensors import staged
from ringcomm.torch.transport import FlatTransport

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_left")]


def bf16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


# ---- size rules ----


@pytest.mark.parametrize(
    ("codec", "buckets"), [("int8", 1), ("fp8", 2), ("int4", 4), ("onebit", 2)]
)
def test_vectors_and_small_tensors_travel_at_bf16(codec: str, buckets: int) -> None:
    def body(comm: Communicator) -> None:
        model = Net()
        state = HookState(codec, comm, model=model, feedback=False, threshold=THRESHOLD)
        every = [gradients_of(model, rank, 0) for rank in range(2)]
        state.reset()
        got = reduce(state, model, every[comm.rank], buckets)
        small = 0
        for name, _ in trained(model):
            mean = (every[0][name] + every[1][name]) / 2
            if name in LARGE:
                assert not torch.equal(got[name], bf16(mean)), name
                assert (got[name] - mean).abs().max() < 0.4
            else:
                small += mean.numel()
                error = (got[name] - mean).abs()
                assert (error <= (every[0][name].abs() + every[1][name].abs()) * 2**-8).all(), name
        report = state.report()
        large = sum(payload_bytes(codec, every[0][name].numel()) for name in LARGE)
        assert report["wire_bytes"] == large + 2 * small
        assert report["buckets"] == buckets
        assert len(report["works"]) == buckets

    run_ranks(2, body)


def test_the_threshold_is_32_kib_by_default() -> None:
    model = nn.ModuleList([nn.Linear(64, 127), nn.Linear(64, 128), nn.Linear(64, 64).double()])
    state = HookState("int4", model=model)
    assert list(state.feedback) == ["1.weight", "2.weight"]
    assert [state.feedback[name].count for name in state.feedback] == [8192, 4096]
    assert list(HookState("onebit", model=model, threshold=0).feedback) == [
        "0.weight",
        "1.weight",
        "2.weight",
    ]
    for bad in (-1, 1.5, None, True):
        with pytest.raises(ConfigError, match="threshold: "):
            HookState("int4", model=model, threshold=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("codec", ["none", "bf16"])
def test_gentle_codecs_take_a_bucket_whole(codec: str) -> None:
    def body(comm: Communicator) -> None:
        model = Net()
        state = HookState(codec, comm, threshold=THRESHOLD)
        reduce(state, model, gradients_of(model, comm.rank, 0), buckets=2)
        assert comm.stats()["works"] == 3  # settings are compared in the first step

    run_ranks(2, body)


def test_sixteen_bit_gradients_travel_as_they_are() -> None:
    def body(comm: Communicator) -> None:
        model = Net(torch.bfloat16)
        state = HookState("onebit", comm, model=model, threshold=0)
        every = [gradients_of(model, rank, 0) for rank in range(2)]
        got = reduce(state, model, every[comm.rank])
        for name, _ in trained(model):
            mean = ((every[0][name].float() + every[1][name].float()) / 2).to(torch.bfloat16)
            assert torch.equal(got[name], mean)
        assert state.gather_state_dict()["feedback"]["tensors"] == {}

    run_ranks(2, body)


# ---- feedback ----


@pytest.mark.parametrize(("codec", "n"), [("int8", 2), ("fp8", 3), ("int4", 2), ("onebit", 3)])
def test_residuals_follow_the_parameter_when_buckets_change(codec: str, n: int) -> None:
    """The sum over all steps lacks what the state says, by name, though DDP lays its buckets out
    anew, the codec changes, and the run goes on from a checkpoint."""
    half = 12

    def body(comm: Communicator) -> None:
        model = Net()
        state = HookState(codec, comm, model=model, feedback=True, threshold=THRESHOLD)
        out = {name: np.zeros(p.shape) for name, p in trained(model) if name in LARGE}
        exact = copy.deepcopy(out)
        for step in range(2 * half):
            if step == half:
                kept = stored(state.gather_state_dict())
                state = HookState(
                    "int4", comm, model=nn.DataParallel(model), threshold=THRESHOLD, feedback=True
                )
                state.load_state_dict(kept)
            every = [gradients_of(model, rank, step) for rank in range(n)]
            got = reduce(state, model, every[comm.rank], buckets=1 if step == 0 else 1 + step % 4)
            for name in LARGE:
                out[name] += got[name].double().numpy()
                exact[name] += np.mean([x[name].double().numpy() for x in every], axis=0)
        saved = state.gather_state_dict()["feedback"]["tensors"]
        assert sorted(saved) == sorted(LARGE)
        for name in LARGE:
            left = (saved[name]["worker"] + saved[name]["owner"]).double().numpy()
            lacks = exact[name] - out[name]
            assert np.abs(lacks).max() > 1e-4
            assert np.abs(lacks - left.reshape(lacks.shape)).max() <= 1e-6 * 2 * half

    run_ranks(n, body)


def test_a_gradient_that_is_not_finite_leaves_the_residuals() -> None:
    def body(comm: Communicator) -> None:
        model = Net()
        state = HookState("onebit", comm, model=model, threshold=THRESHOLD)
        reduce(state, model, gradients_of(model, comm.rank, 0))
        before = {name: state.feedback[name].worker for name in LARGE}
        gradients = gradients_of(model, comm.rank, 1)
        if comm.rank == 1:
            gradients["embed"][3, 4] = float("inf")
        got = reduce(state, model, gradients)
        assert torch.isnan(got["embed"]).all()
        assert torch.isfinite(got["head"]).all()
        assert np.array_equal(state.feedback["embed"].worker, before["embed"])
        assert not np.array_equal(state.feedback["head"].worker, before["head"])

    run_ranks(2, body)


def test_the_loss_scale_rescales_what_is_left() -> None:
    def body(comm: Communicator) -> None:
        model, scaler = Net(), Scaler(1024.0)
        state = HookState("int4", comm, model=model, threshold=THRESHOLD, scaler=scaler)
        reduce(state, model, gradients_of(model, comm.rank, 0))
        before = state.feedback["embed"].worker
        assert before.any()
        scaler.scale = 512.0
        assert not state.flush()
        assert np.array_equal(state.feedback["embed"].worker, before / 2)
        saved = state.gather_state_dict()
        for told, scale in ((None, 1.0), (scaler, 512.0)):
            other = HookState("int4", comm, model=model, threshold=THRESHOLD, scaler=told)
            other.load_state_dict(saved)
            assert (other.loss_scale, other.steps) == (scale, 1)
            left = other.gather_state_dict()["feedback"]["tensors"]["embed"]
            whole = saved["feedback"]["tensors"]["embed"]
            assert torch.equal(left["worker"] * (512.0 / scale), whole["worker"])
        scaler.scale = 0
        with pytest.raises(ConfigError, match="loss_scale=0: give"):
            state.flush()
        with pytest.raises(ConfigError, match=r"give HookState\(\.\.\., scaler=\)"):
            state.loss_scale = 1024.0

    run_ranks(2, body)


@pytest.mark.parametrize(("codec", "restarts"), [("none", True), ("bf16", False)])
def test_a_gentle_codec_delivers_what_is_left(codec: str, restarts: bool) -> None:
    def body(comm: Communicator) -> None:
        model = Net()
        first_codec = "onebit" if restarts else ByStep("onebit", codec)
        state = HookState(first_codec, comm, model=model, threshold=THRESHOLD)  # type: ignore[arg-type]
        every = [[gradients_of(model, rank, step) for rank in range(2)] for step in range(2)]
        first = reduce(state, model, every[0][comm.rank])["embed"].clone()
        if restarts:
            saved = state.gather_state_dict()
            state = HookState(codec, comm, model=model, threshold=THRESHOLD)
            assert state.gather_state_dict() == {}
            state.load_state_dict(saved)
        second = reduce(state, model, every[1][comm.rank])["embed"]
        exact = sum((x["embed"] for step in every for x in step), torch.zeros(100, 48)) / 2
        tolerance = 1e-5 if codec == "none" else 2**-6
        assert (first + second - exact).abs().max() <= tolerance
        assert not state.feedback["embed"].worker.any()

    run_ranks(2, body)


def test_gradients_on_a_device_go_by_a_copy_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a GPU do: here the copy is of host memory, too."""

    def body(comm: Communicator) -> list[torch.Tensor]:
        model = Net()
        state = HookState("onebit", comm, model=model, threshold=THRESHOLD)
        steps = [reduce(state, model, gradients_of(model, comm.rank, s), 1 + s) for s in range(3)]
        return [got[name] for got in steps for name in sorted(got)]

    plain = run_ranks(2, body)
    monkeypatch.setattr(Communicator, "submit_in_place", lambda *_, **__: None)
    monkeypatch.setattr(pending, "memory_of", staged)
    copied = run_ranks(2, body)
    for one, other in zip(plain, copied, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# ---- what is refused ----


def test_what_a_state_refuses() -> None:
    model = Net()
    for codec in ("int4", "onebit"):
        with pytest.raises(ConfigError, match=r"by the names of the model's parameters; give Hook"):
            HookState(codec)
    with pytest.raises(ConfigError, match="by the names"):
        HookState("int8", feedback=True)
    with pytest.raises(ConfigError, match="feedback=3: give a FeedbackStore"):
        HookState("int8", feedback=3)  # type: ignore[arg-type]
    assert HookState("onebit", feedback=False).state_dict() == {}
    assert HookState("int8").state_dict() == {}
    state = HookState("bf16")
    with pytest.raises(ConfigError, match="a CodecPolicy, which chooses each step's codec"):
        state.compression = "onebit"
    assert state.compression == "bf16"
    store = FeedbackStore()
    store.add("head", 3)
    with pytest.raises(ConfigError, match="feedback of 'head' is of 3 elements, and the tensor"):
        HookState("onebit", model=model, feedback=store, threshold=0)


@pytest.mark.parametrize("before", [True, False])
def test_a_layer_that_is_trained_since_the_checkpoint(before: bool) -> None:
    """It starts from zero, whether it is trained before the state is loaded or after. One that is
    trained no more has something left, which is not lost in silence."""

    def body(comm: Communicator) -> None:
        def made() -> tuple[Net, HookState]:
            model = Net()
            return model, HookState("int4", comm, model=model, threshold=THRESHOLD)

        model, state = made()
        reduce(state, model, gradients_of(model, comm.rank, 0))
        for saved in (state.state_dict(), state.gather_state_dict()):
            model, state = made()
            if before:
                model.get_parameter("frozen").requires_grad_(True)
            state.load_state_dict(saved)
            model.get_parameter("frozen").requires_grad_(True)
            reduce(state, model, gradients_of(model, comm.rank, 1))
            assert state.feedback["frozen"].worker.any()
        more = state.gather_state_dict()
        assert "frozen" in more["feedback"]["tensors"]
        _, state = made()
        with pytest.raises(ConfigError, match=r"it has 'frozen', unknown here; .* strict=False"):
            state.load_state_dict(more)
        state.load_state_dict(more, strict=False)

    run_ranks(2, body)


def test_a_checkpoint_of_another_memory_format() -> None:
    """Residuals lie as the parameter does. Older states do not tell how."""

    def body(comm: Communicator) -> None:
        rows, last = nn.Conv2d(3, 4, 2), nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        one, other = (HookState("int4", comm, model=made, threshold=0) for made in (rows, last))
        for gathers in (False, True):
            for here, there in ((one, other), (other, one)):
                state = there.gather_state_dict() if gathers else there.state_dict()
                with pytest.raises(ConfigError, match=r"memory format: residuals of 'weight'"):
                    here.load_state_dict(state)
                there.load_state_dict(state)
                del state["feedback"]["strides"]
                here.load_state_dict(state)

    run_ranks(2, body)


def test_a_checkpoint_of_another_model() -> None:
    def body(comm: Communicator) -> None:
        saved = HookState("onebit", comm, model=Net(), threshold=THRESHOLD).state_dict()
        other = HookState("onebit", comm, model=nn.Linear(200, 50))
        with pytest.raises(ConfigError, match=r"another model, or of one .* it has 'embed'"):
            other.load_state_dict(saved)
        for none in (HookState("bf16", comm), HookState("int8", comm, model=Net(), feedback=False)):
            with pytest.raises(ConfigError, match="can keep none"):
                none.load_state_dict(saved)
        with pytest.raises(ConfigError, match="no state of a HookState"):
            other.load_state_dict({"residuals": 3})
        with pytest.raises(ConfigError, match="HookState: the state has format 2"):
            other.load_state_dict({**saved, "format": 2})
        other.load_state_dict({})
        HookState("bf16", comm).load_state_dict({})
        other.load_state_dict(saved, strict=False)

    run_ranks(2, body)


def test_a_parameter_of_another_model() -> None:
    def body(comm: Communicator) -> None:
        state = HookState("onebit", comm, model=Net(), threshold=THRESHOLD)
        stranger = Net()
        with pytest.raises(ConfigError, match="not among those of HookState's model"):
            reduce(state, stranger, gradients_of(stranger, comm.rank, 0))

    run_ranks(2, body)


def test_a_copy_needs_the_names_again() -> None:
    """torch.save of a wrapped model takes the hook's state along, without model or residuals."""

    def body(comm: Communicator) -> None:
        model = Net()
        state = HookState("onebit", comm, model=model, threshold=THRESHOLD)
        again = pickle.loads(pickle.dumps(state))
        assert (again.compression, again.threshold, len(again.feedback)) == ("onebit", 4096, 0)
        again.restore(again.__getstate__(), FlatTransport(comm))
        with pytest.raises(ConfigError, match="by the names"):
            reduce(again, model, gradients_of(model, comm.rank, 0))
        again.name_parameters(model)
        reduce(again, model, gradients_of(model, comm.rank, 0))
        assert list(again.feedback) == list(state.feedback)

    run_ranks(2, body)


def test_a_model_whose_gradients_cannot_be_compressed() -> None:
    with World(1) as world:
        state = HookState("int8", world.comms[0])
        model = Net()
        with pytest.raises(TensorError):
            world.comms[0].allreduce(torch.ones(3, dtype=torch.int32), compression="int8")
        assert reduce(state, model, gradients_of(model, 0, 0)).keys() == dict(trained(model)).keys()
