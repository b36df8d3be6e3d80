"""Rank of test_jax.py: its cases, each a function of the communicator, in the order given.

A rank is a fresh process, as JAX starts threads and does not survive a fork. It is of two devices
of JAX's CPU, and of 64 bits. The first case that fails ends it, which ends the others.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from readme import code
from reference import Array

import ringcomm.jax
from ringcomm import Communicator, ConfigError, ErrorFeedback, PeerLostError, TensorError

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_num_cpu_devices", 2)

DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64")
LARGE = 100_003  # elements that are more than ringcomm.fusion sends with others, as float32


def run(cases: Sequence[str]) -> None:
    """Runs these cases and prints how each ended: "" or a traceback."""
    comm = ringcomm.init()
    outcomes = {}
    for case in cases:
        try:
            globals()[case](comm)
            outcomes[case] = ""
        except BaseException:
            outcomes[case] = traceback.format_exc()
            break
    print(json.dumps(outcomes))
    sys.stdout.flush()
    os._exit(0)  # without a goodbye, which PeerLostError is about


def random(dtype: str, count: int, rank: int) -> Array:
    """Elements that are not the same on any two ranks."""
    values = np.random.default_rng([count, rank]).standard_normal(count) * 3
    return values.astype(jnp.dtype(dtype))


def mixed(rank: int) -> dict[str, Any]:
    """A tree of leaves of all dtypes, small and large."""
    small = [random(dtype, 60, rank).reshape(3, 4, 5) for dtype in DTYPES]
    large = [random(dtype, LARGE, rank) for dtype in ("float32", "bfloat16")]
    return {"a": small, "b": (large, {"none": None}), "c": [np.array(2.5), np.zeros((0, 3))]}


def roads(function: Callable[..., Any], **how: Any) -> list[Callable[[Any], Any]]:
    """The function out of jit, in jit, and in flight."""
    return [
        lambda tree: function(tree, **how),
        jax.jit(lambda tree: function(tree, **how)),
        lambda tree: function(tree, async_op=True, **how).wait(),
    ]


def assert_bits(ours: Any, expected: Any) -> None:
    """Asserts that two trees have the same structure and bits, and that the first is JAX's."""
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert isinstance(one, jax.Array)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.asarray(one).tobytes() == other.tobytes()


# ---- results ----


def an_array_has_the_bits_of_numpys(comm: Communicator) -> None:
    for dtype in DTYPES:
        mine = random(dtype, 1000, comm.rank)
        expected = ringcomm.allreduce(mine.copy())
        for road in roads(ringcomm.jax.allreduce):
            given = jnp.asarray(mine)
            assert_bits(road(given), expected)
            assert_bits(given, mine)


def a_tree_has_the_bits_of_numpys(comm: Communicator) -> None:
    mine = mixed(comm.rank)
    for op in ("avg", "max"):
        leaves, structure = jax.tree.flatten(jax.tree.map(np.copy, mine))
        expected = jax.tree.unflatten(structure, ringcomm.allreduce_many(leaves, op))
        for road in roads(ringcomm.jax.allreduce, op=op):
            assert_bits(road(jax.tree.map(jnp.asarray, mine)), expected)
        assert_bits(ringcomm.jax.allreduce(mine, op), expected)  # of numpy arrays


def a_mean_of_whole_numbers_is_numpys(comm: Communicator) -> None:
    ranks = [np.arange(-500, 500) + 3 * rank for rank in range(comm.world_size)]
    for dtype in ("float32", "float64"):
        expected = np.mean([one.astype(dtype) for one in ranks], axis=0, dtype=dtype)
        for road in roads(ringcomm.jax.pmean):
            assert_bits(road(jnp.asarray(ranks[comm.rank], dtype)), expected)


def compressed_it_has_the_bits_of_numpys(comm: Communicator) -> None:
    for compression in ("bf16", "fp16", "int8"):
        for count in (1000, LARGE):
            mine = random("float32", count, comm.rank)
            expected = ringcomm.allreduce(mine.copy(), "avg", compression=compression)
            for road in roads(ringcomm.jax.pmean, compression=compression):
                assert_bits(road(jnp.asarray(mine)), expected)


def feedback_goes_from_call_to_call(comm: Communicator) -> None:
    shapes = (1000, LARGE)

    def feedback() -> list[ErrorFeedback]:
        return [ErrorFeedback() for _ in shapes]

    own = feedback()
    ways = [roads(ringcomm.jax.pmean, compression="int4", feedback=feedback())[i] for i in range(3)]
    for step in range(3):
        mine = [random("float32", count, 10 * step + comm.rank) for count in shapes]
        copies = [one.copy() for one in mine]
        expected = ringcomm.allreduce_many(copies, "avg", compression="int4", feedback=own)
        for road in ways:
            assert_bits(road([jnp.asarray(one) for one in mine]), expected)


def nothing_is_copied(comm: Communicator) -> None:
    """Compares addresses: of JAX's arrays, and of what the collective read and wrote."""
    for dtype in DTYPES:
        for count in (1, LARGE):
            given = jnp.ones(count, dtype)
            with mock.patch.object(
                ringcomm.jax, "allreduce_many", wraps=ringcomm.jax.allreduce_many
            ) as called:
                result = ringcomm.jax.allreduce(given)
            (source,), (target,) = called.call_args.args[1], called.call_args.kwargs["out"]
            assert source.ctypes.data == given.unsafe_buffer_pointer()
            assert target.ctypes.data == result.unsafe_buffer_pointer()


def results_lie_where_their_arrays_do(comm: Communicator) -> None:
    first, second = jax.devices()
    for device in (first, second, None):
        given = jax.device_put(jnp.ones(5), device)
        result = ringcomm.jax.allreduce([given])[0]
        assert (result.devices(), result.committed) == (given.devices(), given.committed)


# ---- programs ----


def collectives_keep_their_order(comm: Communicator) -> None:
    """Functions return before their collectives have run, or might."""

    @jax.jit
    def three(x: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda _, c: ringcomm.jax.allreduce(c), x)

    n = comm.world_size
    for _ in range(20):
        one = jnp.ones(1000)
        first, second = three(one), ringcomm.jax.allreduce(2 * one)
        third, fourth = three(3 * one), three(4 * one)
        for ours, factor in ((first, n**3), (second, 2 * n), (third, 3 * n**3), (fourth, 4 * n**3)):
            assert (np.asarray(ours) == factor).all()


def in_control_flow(comm: Communicator) -> None:
    """A mean of what is equal everywhere is itself."""
    mean = ringcomm.jax.pmean

    @jax.jit
    def flow(x: Any) -> Any:
        x = jax.lax.scan(lambda carry, _: (mean(carry) + 1, None), x, length=2)[0]
        x = jax.lax.cond(x.sum() > 0, lambda v: mean(v) + 1, lambda v: v, x)
        return jax.lax.while_loop(lambda v: v[0] < 6, lambda v: mean(v) + 1, x)

    assert (np.asarray(flow(jnp.ones(3))) == 6).all()


def a_model_trains_as_one_process_does(comm: Communicator) -> None:
    """The loss after 60 steps is that of the whole batch within 1e-6, and within 1e-3 by bf16.

    In float64, where sums in another order differ by 1e-16 of the gradient, and a step of descent
    makes no difference much larger. bf16 rounds each gradient by 2^-9, on its way up and back.
    """
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 8))
    y = np.tanh(x @ rng.standard_normal((8, 2)))
    fresh = {"in": rng.standard_normal((8, 16)) / 3, "out": rng.standard_normal((16, 2)) / 4}

    def loss(model: Any, x: Any, y: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ model["in"]) @ model["out"] - y) ** 2)

    def trained(mean: Callable[[Any], Any], rows: slice) -> float:
        @jax.jit
        def step(model: Any) -> Any:
            gradients = mean(jax.grad(loss)(model, x[rows], y[rows]))
            return jax.tree.map(lambda p, g: p - 0.3 * g, model, gradients)

        model = jax.tree.map(jnp.asarray, fresh)
        for _ in range(60):
            model = step(model)
        return float(loss(model, x, y))

    share = slice(comm.rank, None, comm.world_size)
    alone = trained(lambda gradients: gradients, slice(None))
    assert alone < 0.1 * float(loss(fresh, x, y))
    assert abs(trained(ringcomm.jax.pmean, share) / alone - 1) < 1e-6
    in_bf16 = trained(lambda tree: ringcomm.jax.pmean(tree, compression="bf16"), share)
    assert 0 < abs(in_bf16 / alone - 1) < 1e-3


def the_page_says_how(comm: Communicator) -> None:
    """The step in docs/FRAMEWORKS.md, of a loss whose gradient is the batch, by whole numbers."""
    names = {"loss": lambda model, batch: jnp.vdot(model, batch)}
    exec(code("jax"), names)
    batch = jnp.full(3, 10.0 * comm.rank, jnp.float32)
    stepped = names["step"](jnp.zeros(3, jnp.float32), batch)
    assert_bits(stepped, np.full(3, -0.1 * 5 * (comm.world_size - 1), np.float32))


# ---- refusals ----


def what_cannot_work_is_refused(comm: Communicator) -> None:
    x = jnp.ones(3)
    for wrong in (x > 0, x.astype(jnp.uint32), x.astype(jnp.complex64), jax.random.key(0)):
        for mean in (ringcomm.jax.pmean, jax.jit(ringcomm.jax.pmean)):
            with pytest.raises(TensorError, match=r"^tree\['w'\]\[1\]: dtype .* or use float16"):
                mean({"w": [x, wrong]})
    mesh = jax.sharding.Mesh(np.array(jax.devices()), "i")
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
    with pytest.raises(TensorError, match=r"tree: it lies on .*; bring it to one CPU device by"):
        ringcomm.jax.pmean(jax.device_put(jnp.ones(4), spread))
    for mean in (ringcomm.jax.pmean, jax.jit(ringcomm.jax.pmean, static_argnames="compression")):
        with pytest.raises(ConfigError, match=r"int4.*needs feedback"):
            mean(x, compression="int4")
        with pytest.raises(ConfigError, match="did you mean int8"):
            mean(x, compression="int9")
        with pytest.raises(TensorError, match=r"compression='int8' takes float32"):
            mean(x.astype(jnp.int32), compression="int8")
    with pytest.raises(ConfigError, match="async_op=True does not go within jit"):
        jax.jit(lambda x: ringcomm.jax.pmean(x, async_op=True))(x)
    gradient = jax.grad(lambda x: ringcomm.jax.pmean(x).sum())
    for call in (gradient, jax.jit(gradient)):
        with pytest.raises(ConfigError, match="has no gradient"):
            call(x)
    with pytest.raises(ValueError, match="ordered"):  # which only an ordered effect is refused for
        jax.vmap(ringcomm.jax.pmean)(jnp.ones((2, 3)))


def errors_of_collectives_reach_the_caller(comm: Communicator) -> None:
    others = comm.split(0)
    mean = jax.jit(lambda x: ringcomm.jax.pmean(x, comm=others))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"MismatchError: .*f64\[3\]"):
        mean(jnp.ones(3 + comm.rank)).block_until_ready()
    others.close()


def a_death_raises(comm: Communicator) -> None:
    mean = jax.jit(ringcomm.jax.pmean)
    last = comm.world_size - 1
    mean(jnp.ones(3)).block_until_ready()
    if comm.rank == last:
        return  # run() ends it
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"PeerLostError: .*rank {last}"):
        mean(jnp.ones(3)).block_until_ready()
    assert isinstance(ringcomm.default_communicator().failure(), PeerLostError)
    with pytest.raises(PeerLostError):
        ringcomm.jax.pmean(jnp.ones(3))
