"""Turns the arguments of ringcomm.init into a Mesh: identifies this rank, meets, connects.

Invariants: exactly one carrier is used to meet: an mpi4py communicator or a torch Store if the
caller gave one, else our own TCP rendezvous. It is closed before this returns, well or not.
"""

from __future__ import annotations

import dataclasses
import numbers
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

from ..config import Config
from ..errors import ConfigError
from . import mesh
from .launch import Identity, identify, placed
from .mesh import Mesh
from .rendezvous import Exchange, GatherExchange, StoreExchange, mpi_exchange
from .secret import Secret, load
from .system import typed_errors


@dataclasses.dataclass(frozen=True)
class Joined:
    """A mesh, with the settings to join some of its ranks again."""

    mesh: Mesh
    config: Config
    secret: Secret | None
    job: str
    epoch: int = 0


@typed_errors()
def join(
    config: Config,
    rank: int | None,
    world_size: int | None,
    init_method: str | None,
    timeout: float | None,
    mpi: Any,
    store: Any,
) -> Joined:
    """Finds the other ranks and connects to them; the arguments are those of ringcomm.init.

    Raises ConfigError, BootstrapError.
    """
    identity = identity_of(rank, world_size, init_method, mpi, store)
    if timeout is not None:
        config = config.replaced(connect_timeout=timeout)
    exchange: Exchange | None = None
    if mpi is not None:
        exchange = mpi_exchange(mpi)
    elif store is not None:
        exchange = StoreExchange(store, identity.rank, identity.world_size)
    secret = load(config)
    joined = mesh.join(identity, config, secret, exchange)
    return Joined(joined, config, secret, identity.job)


def identity_of(
    rank: int | None, world_size: int | None, init_method: str | None, mpi: Any, store: Any
) -> Identity:
    """Returns the Identity of this process by the arguments of ringcomm.init. Raises
    ConfigError."""
    if mpi is not None:
        if (rank, world_size, init_method, store) != (None, None, None, None):
            raise ConfigError(
                "mpi= already says who is who; leave out rank, world_size, init_method and store"
            )
        return _mpi_identity(mpi)
    rank, world_size = _plain(rank), _plain(world_size)
    if store is not None and rank is not None and world_size is not None:
        return placed(rank, world_size)
    return identify(rank, world_size, init_method)


def _plain(number: int | None) -> int | None:
    """Converts numpy's integers to Python's."""
    is_whole = isinstance(number, numbers.Integral) and not isinstance(number, bool)
    return int(cast(int, number)) if is_whole else number


@typed_errors()
def join_through_store(
    config: Config, rank: int, world_size: int, store: Any, job: str, patience: float
) -> Joined:
    """Joins ranks that have a torch Store of their own, as a torch process group has.

    Args:
        job: the group's name, the same on all ranks.
        patience: seconds to wait until all ranks have come to the store; from then on
            config.connect_timeout counts. The secret never goes there.

    Raises ConfigError, BootstrapError.
    """
    secret = load(config)
    exchange = StoreExchange(store, rank, world_size)
    if world_size > 1:
        exchange.allgather(b"", time.monotonic() + patience)
    identity = Identity(rank, world_size, launcher="torch", job=job)
    joined = mesh.join(identity, config, secret, exchange)
    return Joined(joined, config, secret, job)


def _mpi_identity(mpi: Any) -> Identity:
    try:
        rank, world_size = int(mpi.Get_rank()), int(mpi.Get_size())
    except (AttributeError, TypeError):
        raise ConfigError("mpi= takes an mpi4py communicator, such as MPI.COMM_WORLD") from None
    except RuntimeError as error:  # base of mpi4py's own exception, e.g. for COMM_NULL
        raise ConfigError(
            f"mpi= takes a communicator that this process belongs to: {error}"
        ) from error
    return Identity(rank, world_size, launcher="mpi4py", job="mpi4py")


@typed_errors()
def regroup(
    parent: Joined,
    members: Sequence[int],
    gather: Callable[[bytes, float], bytes],
    number: int,
    failed: Callable[[], bool],
) -> Joined | None:
    """Joins some ranks of a mesh anew, with lanes of their own.

    Args:
        members: ranks of the parent in their new order; empty on a rank that belongs to no
            group, which takes part in the exchange all the same and gets None.
        gather: concatenates equal-sized parts of all ranks of the parent, in order of rank.
        number: counts the regroupings of this parent; the same on all ranks.
        failed: returns True if the parent has failed, so that gather will raise.
    """
    config, epoch = parent.config, (parent.epoch * 1009 + number) % 2**32
    exchange = GatherExchange(gather, members, mesh.ROUNDS, config.connect_timeout, failed)
    if not members:
        exchange.close()
        return None
    job = f"{parent.job}/{number}:{','.join(map(str, members))}"
    rank = list(members).index(parent.mesh.rank)
    identity = Identity(rank, len(members), launcher="split", job=job)
    joined = mesh.join(identity, config, parent.secret, exchange, epoch)
    busy = max(joined.ranks_on_machine, parent.mesh.ranks_on_machine)  # counts other groups, too
    joined = dataclasses.replace(joined, ranks_on_machine=busy)
    return Joined(joined, config, parent.secret, job, epoch)
