"""Registers backend "ringcomm" with torch.distributed, and makes its groups.

The ranks of a group find each other through the store that torch gives it: addresses and public
nonces go there, the secret never does. Each group has a communicator, and so lanes, of its own;
making one takes as long as a few round trips to the store.
"""

from __future__ import annotations

import datetime
import sys
from typing import Any

import torch.distributed as dist

from ..api import set_fallback
from ..bootstrap.join import join_through_store
from ..communicator import Communicator
from ..config import Config
from ..errors import ConfigError
from . import guards
from .group import RingcommGroup, world_comm
from .options import Options

NAME = "ringcomm"
_PrefixStore: Any = dist.PrefixStore  # type: ignore[attr-defined]


def register() -> None:
    """Registers "ringcomm" with ``init_process_group``, and makes the default group the
    communicator of ringcomm's functions. Called by ``import ringcomm.torch``, and from 2.14 on by
    torch when a group asks for the name (pyproject.toml's entry point). A second call does
    nothing."""
    set_fallback(world_comm)
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(made: Any, options: Any) -> RingcommGroup:
    """Makes a group. Called by torch for every new one, on each of its ranks.

    Raises ConfigError for a map such as "cpu:gloo,cuda:ringcomm": torch replaces the whole group by
    the returned one, which would carry the other backend's tensors, too.
    """
    _refuse_mixture(sys._getframe(1).f_locals.get("backend_config"))
    whole = not made.global_ranks_in_group
    return open_group(
        made.store, made.group_rank, made.group_size, made.timeout, options, made.group_id, whole
    )


def _refuse_mixture(config: Any) -> None:
    """Raises ConfigError if torch's BackendConfig gives a device to another backend.

    Args:
        config: a local variable of torch's function that makes groups, the only place that names
            the backends of all devices. None: a future torch has no such variable.
    """
    chosen = config.get_device_backend_map() if hasattr(config, "get_device_backend_map") else {}
    others = {device: name for device, name in chosen.items() if name != NAME}
    if others:
        wanted = ",".join(f"{device}:{name}" for device, name in chosen.items())
        raise ConfigError(
            f'backend "{wanted}": a group of ringcomm carries the tensors of all devices, so it '
            f"cannot leave those on {' and '.join(others)} to {' and '.join(others.values())}; "
            'give backend="ringcomm", and make another group by new_group(backend=...) for the rest'
        )


def open_group(
    store: Any,
    rank: int,
    size: int,
    timeout: datetime.timedelta,
    options: Any,
    name: str,
    whole: bool,
) -> RingcommGroup:
    """Joins the ranks of a group, on each of them.

    Args:
        timeout: limit of each collective of the group, and of waiting here for all ranks.
        options: an Options; a Config; None: the options of the default group, or of the
            environment.
        whole: whether it is the default group.

    Raises:
        ConfigError: (a ValueError) the settings cannot work.
        BootstrapError: a rank did not come, or could not be reached; its table names the ranks.
    """
    chosen = _options(options)
    seconds = timeout.total_seconds()
    config = chosen.config.replaced("torch", timeout=min(max(seconds, 0.001), 1e6))
    joined = join_through_store(config, rank, size, store, f"torch:{name}", seconds)
    comm = Communicator(joined, chosen.compression or "none")
    group = RingcommGroup(store, comm, chosen, _regroup)
    if whole:
        guards.watch_group(group)
    return group


def _options(given: Any) -> Options:
    if isinstance(given, Options):
        return given
    if isinstance(given, Config):
        options = Options()
        options.config = given
        return options
    if given is not None:
        raise ConfigError(f"pg_options: give a ringcomm.torch.Options, not {type(given).__name__}")
    default = dist.group.WORLD
    return default.options if isinstance(default, RingcommGroup) else Options()


def _regroup(
    parent: RingcommGroup, ranks: list[int], timeout: Any, options: Any, name: str
) -> RingcommGroup:
    seconds = datetime.timedelta(seconds=parent.comm.config.timeout)
    return open_group(
        _PrefixStore(f"{name}/", parent.get_group_store()),
        ranks.index(parent.comm.rank),
        len(ranks),
        timeout or seconds,
        options or parent.options,
        name,
        whole=False,
    )
