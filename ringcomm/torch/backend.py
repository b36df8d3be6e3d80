"""Registers backend "ringcomm" with torch.distributed, and makes its groups.

The ranks of a group find each other through the store that torch gives it: addresses and public
nonces go there, the secret never does. Each group has a communicator, and so lanes, of its own;
making one takes as long as a few round trips to the store.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from ..api import set_fallback
from ..config import Config
from ..errors import ConfigError
from . import detail, guards
from .group import RingcommGroup, connect, options_of, world_comm
from .options import Options
from .stand_in import ASKS_BACKENDS

NAME = "ringcomm"
_PrefixStore: Any = dist.PrefixStore  # type: ignore[attr-defined]
_C10D: Any = torch._C._distributed_c10d


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

    torch replaces the whole group by the returned one, so in a map such as
    "cpu:ringcomm,cuda:nccl" that one gets the Backends of the other devices, too.

    Raises:
        ConfigError: such a map, before torch 2.14; or options that are not ringcomm's.
        BootstrapError: a rank did not come, or could not be reached.
    """
    # A variable of torch's caller alone names the backends of all devices; a future one lacks it.
    config: Any = sys._getframe(1).f_locals.get("backend_config")
    names = config.get_device_backend_map() if hasattr(config, "get_device_backend_map") else {}
    others = {device: name for device, name in names.items() if name != NAME}
    ours = options if not others or isinstance(options, (Options, Config)) else None
    torchs = _with_others(made, others, options if ours is None else None) if others else None
    chosen, place = options_of(ours), (made.group_rank, made.group_size)
    if getattr(made, "enable_reconfigure", False):
        group = RingcommGroup(made.store, None, chosen, others, torchs, place)
        group.set_timeout(made.timeout)
        return group
    comm = connect(made.store, *place, made.timeout, chosen, made.group_id)
    group = RingcommGroup(made.store, comm, chosen, others, torchs)
    if not made.global_ranks_in_group:
        guards.watch_group(group)
    return group


def _with_others(made: Any, others: dict[str, str], options: Any) -> Any:
    """Returns the process group that torch was about to make, with the Backends of all device types
    but ringcomm's; torch has registered those that the map names before ringcomm's.

    Raises ConfigError before torch 2.14, which makes its own backends without creators.
    """
    if not ASKS_BACKENDS:
        raise ConfigError(
            "before PyTorch 2.14 a group of ringcomm carries the tensors of all devices, so it "
            f"cannot leave those on {' and '.join(others)} to {' and '.join(others.values())}; "
            'give backend="ringcomm", and make another group by new_group(backend=...) for the rest'
        )
    group, kinds = made.process_group, dist.Backend.backend_type_map
    here = [device.type for device in group._device_types]
    for device, name in others.items():
        kind = kinds.get(name, dist.ProcessGroup.BackendType.CUSTOM)
        group._set_default_backend(kind)
        if device not in here:
            backend = _made_by_torch(made, options, device, name)
            group._register_backend(torch.device(device), kind, backend)
    group._set_group_name(made.group_id)
    if detail.checks_nan():
        _C10D.NanCheckHook.attach(group)
    return group


def _made_by_torch(made: Any, options: Any, device: str, name: str) -> Any:
    """Makes the Backend of a device type as torch would."""
    plugin = dist.Backend._plugins[name.upper()]
    store = _PrefixStore(f"{device}/", made.store.underlying_store)
    if not plugin.extended_api:
        return plugin.creator_fn(store, made.group_rank, made.group_size, made.timeout)
    asked = _C10D._DistributedBackendOptions()
    for field in (
        *("group_rank", "group_size", "timeout", "group_id", "global_ranks_in_group"),
        *("process_group", "enable_reconfigure"),
    ):
        setattr(asked, field, getattr(made, field))
    asked.store = store
    return plugin.creator_fn(asked, options)
