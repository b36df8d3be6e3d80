"""What OuterStep refuses, and what it is warned of."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from faults import outer as ranks
from faults.job import Job, Nursery
from outer_training import net, train, weights
from ranks import World, run_ranks
from torch import nn

import ringcomm.torch
from ringcomm import Communicator, ConfigError, MismatchError, PeerLostError
from ringcomm.membership import Membership
from ringcomm.torch import OuterStep, SilenceWarning
from ringcomm.torch.outer import step
from ringcomm.torch.outer.rounds import Rounds
from ringcomm.torch.sync.account import Account

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_left")]


@pytest.fixture
def comm() -> Iterator[Communicator]:
    with World(1) as world:
        yield world.comms[0]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.01)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"every": 0}, "Invalid every: 0"),
        ({"every": "end"}, "Invalid every: 'end'; give a number of iterations, or None"),
        ({"fragments": 0}, "Invalid fragments: 0"),
        ({"every": 2, "fragments": 3}, "Invalid fragments: 3"),
        ({"every": None, "fragments": 2}, "Invalid fragments: 2"),
        ({"delay": -1}, "Invalid delay: -1"),
        ({"every": 4, "delay": 4}, "less than every / fragments = 4"),
        ({"every": 4, "fragments": 2, "delay": 2}, "less than every / fragments = 2"),
        ({"every": None, "delay": 1}, "Invalid delay: 1"),
        ({"compression": "int3"}, "compression='int3' is unknown"),
        ({"compression": "onebit-deepspeed"}, "has been removed"),
        ({"compression": "int8", "codec": "int8"}, "codec= is compression= by its old name"),
        ({"compresion": "int8"}, "did you mean compression?"),
        ({"feedback": "yes"}, "feedback='yes'"),
        ({"outer": "adam"}, "give one of mean, nesterov, sparse"),
        ({"outer": "sgd"}, "give Nesterov(gamma, mu=0)"),
        ({"merge": "carry"}, "merge= is gone: what is trained during a delay is added"),
        ({"scaler": 3}, "give a torch.amp.GradScaler"),
        ({"peers": 5}, "peers= is gone: give a Membership as comm="),
        ({"min_peers": 2}, "min_peers= is gone: give comm=ringcomm.membership.Membership(min"),
        ({"grace_s": 9}, "grace_s= is gone: give comm=ringcomm.membership.Membership(grace_s"),
        ({"outer": "sparse", "compression": "int8"}, "a sparse rule sends bf16"),
        ({"outer": "sparse", "compression": None}, "a sparse rule sends bf16"),
        ({"outer": "sparse", "compression": "int3"}, "compression='int3' is unknown"),
        ({"outer": "sparse", "feedback": False}, "feedback=False: a sparse rule always keeps"),
        ({"compression": "bf16", "feedback": True}, "feedback=True: bf16 keeps no rounding errors"),
        ({"timeout": -1}, "Invalid timeout: -1"),
        ({"comm": 5}, "give a ringcomm.Communicator, a Membership, or None"),
        ({"comm": Membership}, "give a ringcomm.Communicator, a Membership, or None"),
    ],
    ids=str,
)
def test_bad_settings(comm: Communicator, given: dict[str, Any], text: str) -> None:
    model = net()
    with pytest.raises(ConfigError) as caught:
        OuterStep(model, sgd(model), **{"comm": comm, **given})
    assert text in str(caught.value)


def test_the_old_name_of_compression_answers(comm: Communicator) -> None:
    model = net()
    settings: dict[str, Any] = {"comm": comm, "codec": "int3"}
    with (
        pytest.warns(DeprecationWarning, match="codec= is compression= now"),
        pytest.raises(ConfigError, match="compression='int3' is unknown"),
    ):
        OuterStep(model, sgd(model), **settings)


def test_models_and_optimizers_that_do_not_fit(comm: Communicator) -> None:
    model = net()
    with pytest.raises(ConfigError, match="none of the model's trained parameters"):
        OuterStep(model, sgd(net()), comm=comm)
    with pytest.raises(ConfigError, match="give a torch"):
        OuterStep(model.parameters(), sgd(model), comm=comm)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no parameter that is trained"):
        OuterStep(net().requires_grad_(False), None, comm=comm)
    outer = OuterStep(model, sgd(model), comm=comm)
    with pytest.raises(ConfigError, match="not attached"):
        outer.flush()
    with outer:
        with pytest.raises(ConfigError, match="attached already"):
            outer.attach()
        with pytest.raises(ConfigError, match="give optimizer=None"):
            outer.tick()
    outer.detach()  # harmless


def warned(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer, 0, range(steps))
    return [str(w.message) for w in caught if w.category is SilenceWarning]


def test_an_outer_step_that_counts_nothing_is_told(comm: Communicator) -> None:
    """Another optimizer than the one that it was given steps."""
    model = net()
    with OuterStep(model, sgd(model), every=2, comm=comm):
        texts = warned(model, sgd(model))
    assert len(texts) == 1
    assert "has counted no iteration" in texts[0]


def test_one_that_counts_is_not(comm: Communicator) -> None:
    model = net()
    optimizer = sgd(model)
    with OuterStep(model, optimizer, every=100, comm=comm):  # it has yet to exchange
        assert warned(model, optimizer) == []
    assert warned(model, sgd(model)) == []  # detached
    with OuterStep(net(), None, comm=comm):
        assert warned(model, optimizer) == []  # of another model


def test_one_that_is_never_attached_is_told(comm: Communicator) -> None:
    model = net()
    optimizer = sgd(model)
    outer = OuterStep(model, optimizer, every=2, comm=comm)
    texts = warned(model, optimizer)
    assert len(texts) == 1
    assert "is not attached" in texts[0]
    with outer:
        assert warned(model, optimizer) == []


# ---- left without its end ----


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_that_is_detached_before_its_only_round(ranks: int) -> None:
    """A rank alone has nobody to exchange with."""

    def rank(comm: Communicator) -> None:
        model = net()
        optimizer = sgd(model)
        outer = OuterStep(model, optimizer, every=None, comm=comm).attach()
        train(model, optimizer, 0, range(3))
        outer.detach()
        with outer:
            train(model, optimizer, 0, range(3))
            outer.flush()
            outer.detach()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SilenceWarning)
        run_ranks(ranks, rank)
    texts = [str(one.message) for one in caught if one.category is SilenceWarning]
    assert len(texts) == (ranks if ranks > 1 else 0)
    assert all("without flush(): 3 iterations" in text for text in texts)
    assert all(one.filename == __file__ for one in caught if one.category is SilenceWarning)


def forgotten(model: nn.Module, outer: OuterStep, optimizer: torch.optim.Optimizer) -> None:
    warned(model, optimizer)


def unended(model: nn.Module, outer: OuterStep, optimizer: torch.optim.Optimizer) -> None:
    outer.attach()
    train(model, optimizer, 0, range(3))


def raised(
    kind: type[BaseException], model: nn.Module, outer: OuterStep, optimizer: torch.optim.Optimizer
) -> None:
    with contextlib.suppress(kind), outer:
        train(model, optimizer, 0, range(3))
        raise kind


def ended(model: nn.Module, outer: OuterStep, optimizer: torch.optim.Optimizer) -> None:
    with outer:
        train(model, optimizer, 0, range(3))


@pytest.mark.parametrize(
    ("leave", "text"),
    [
        (forgotten, "never attached"),
        (unended, "3 iterations of this rank are in no round"),
        (partial(raised, SystemExit), "3 iterations of this rank are in no round"),
        (partial(raised, ZeroDivisionError), ""),
        (ended, ""),
    ],
)
def test_the_last_word(
    comm: Communicator,
    caplog: pytest.LogCaptureFixture,
    text: str,
    leave: Callable[[nn.Module, OuterStep, torch.optim.Optimizer], None],
) -> None:
    model = net()
    optimizer = sgd(model)
    leave(model, OuterStep(model, optimizer, every=None, comm=comm), optimizer)
    del model, optimizer
    gc.collect()
    said = [record.message for record in caplog.records if "OuterStep was" in record.message]
    assert len(said) == bool(text), said
    assert text in "".join(said)


def test_the_last_word_at_exit(torch_nursery: Nursery) -> None:
    """Of what lives to the end of the program."""
    with Job(torch_nursery, 1) as job:
        job.start(ranks.left_attached)
        assert job.wait_exit(0).code == 0, job.story()
        assert "OuterStep was left without its end: 1 iterations" in job.printed(0)


def test_a_lost_rank_is_said_with_what_goes_on_without_one() -> None:
    def rank(comm: Communicator) -> None:
        model = net()
        optimizer = sgd(model)
        OuterStep(model, optimizer, every=2, comm=comm).attach()
        if comm.rank == 1:
            comm.close()
            return
        for _ in range(2):  # told again, it is said once
            with pytest.raises(PeerLostError) as caught:
                train(model, optimizer, 0, range(2))
        assert str(caught.value).count("OuterStep(comm=Membership())") == 1

    run_ranks(2, rank)


# ---- the weights ----


def test_within_the_anchor(comm: Communicator) -> None:
    model = net()
    optimizer = sgd(model)
    with OuterStep(model, optimizer, every=10, comm=comm) as outer:
        train(model, optimizer, 0, range(4))
        saved = outer.gather_state_dict()
        with outer.anchor():
            for call in (outer.flush, outer.detach, lambda: outer.load_state_dict(saved)):
                with pytest.raises(ConfigError, match=r"within outer\.anchor"):
                    call()


def test_a_parameter_that_is_trained_from_later_on(comm: Communicator) -> None:
    model = net()
    model[0].weight.requires_grad_(False)  # type: ignore[index]
    optimizer = sgd(model)
    outer = OuterStep(model, optimizer, every=2, comm=comm)
    outer.attach()
    train(model, optimizer, 0, range(3))
    model[0].weight.requires_grad_(True)  # type: ignore[index]
    with pytest.raises(ConfigError, match=r"'0\.weight' is trained since"):
        train(model, optimizer, 0, range(3, 4))
    outer.detach()
    with OuterStep(model, optimizer, every=2, comm=comm):
        train(model, optimizer, 0, range(4))


def test_weights_that_are_not_trained_and_differ() -> None:
    def rank(comm: Communicator) -> None:
        model = net(seed=comm.rank)
        model[0].requires_grad_(False)  # type: ignore[index]
        with pytest.raises(MismatchError, match="weights that are not trained"):
            OuterStep(model, sgd(model), comm=comm).attach()

    run_ranks(2, rank)


@pytest.mark.parametrize(
    ("owner", "name"), [(Communicator, "split"), (step, "follow_steps")], ids=["meeting", "hooks"]
)
def test_an_attach_that_fails_leaves_nothing(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one takes rank 0's weights as they are then."""
    works, failing = getattr(owner, name), threading.Semaphore(2)

    def fails_twice(*args: Any) -> Any:
        if failing.acquire(blocking=False):
            raise ZeroDivisionError
        return works(*args)

    monkeypatch.setattr(owner, name, fails_twice)

    def rank(comm: Communicator) -> float:
        model = net()
        optimizer = sgd(model)
        outer = OuterStep(model, optimizer, delay=1, comm=comm)
        with pytest.raises(ZeroDivisionError):
            outer.attach()
        comm.barrier()
        assert not optimizer._optimizer_step_post_hooks
        assert not model._forward_pre_hooks
        with torch.no_grad():
            model[0].bias.fill_(comm.rank + 1.0)  # type: ignore[index]
        with outer:
            return float(weights(model).max())

    assert run_ranks(2, rank) == [1.0, 1.0]


@pytest.mark.parametrize("has_scaler", [False, True])
@pytest.mark.parametrize(("owner", "name"), [(Rounds, "start"), (Account, "resume")])
def test_an_attach_that_is_interrupted_leaves_the_watch_alone(
    owner: Any, name: str, has_scaler: bool, comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its first call or its last: nothing counts iterations, which is told; the next attach()
    counts each once."""
    model = net()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu") if has_scaler else None
    outer = OuterStep(model, optimizer, every=9, delay=1, scaler=scaler, comm=comm)

    def is_interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, is_interrupted)
        with pytest.raises(KeyboardInterrupt):
            outer.attach()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert not model._forward_pre_hooks
    assert "update" not in vars(scaler or optimizer)
    (text,) = warned(model, optimizer)
    assert "OuterStep is not attached" in text
    assert outer.iteration == 0
    with outer:
        if scaler is None:
            optimizer.step()
        else:
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
        assert outer.iteration == 1


def test_two_on_one_model(comm: Communicator) -> None:
    model = net()
    other = OuterStep(model, None, comm=comm)
    with OuterStep(model, None, comm=comm):
        with pytest.raises(ConfigError, match="another one is attached"):
            other.attach()
        with OuterStep(net(), None, comm=comm):
            pass
    with other:
        pass


def test_an_optimizer_that_exchanges_by_itself(comm: Communicator) -> None:
    model = net()
    optimizer = ringcomm.torch.optim.SGD(model.parameters(), lr=0.1, comm=comm)
    with pytest.raises(ConfigError, match="SGD exchanges in each of its steps"):
        OuterStep(model, optimizer, comm=comm)


def test_nothing_stays_behind(comm: Communicator) -> None:
    model = net()
    optimizer = sgd(model)
    with pytest.raises(ZeroDivisionError), OuterStep(model, optimizer, every=2, comm=comm):
        raise ZeroDivisionError
    assert not optimizer._optimizer_step_post_hooks
    assert not model._forward_pre_hooks


def test_a_compiled_model(comm: Communicator) -> None:
    model = net()
    compiled = torch.compile(model, backend="eager")
    optimizer = sgd(model)
    with OuterStep(compiled, optimizer, every=2, comm=comm) as outer:  # type: ignore[arg-type]
        train(compiled, optimizer, 0, range(4))  # type: ignore[arg-type]
        assert outer.rounds == 2
        names = {name for name, _ in model.named_parameters()}
        assert set(outer.state_dict()["anchor"]) == names
