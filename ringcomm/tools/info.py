"""``python -m ringcomm``: shows the installation, the machine's abilities and the settings."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from .. import __version__
from ..bootstrap import secret
from ..bootstrap.interfaces import Interface, choose, list_interfaces
from ..codecs import of_group
from ..config import OTHER_VARIABLES, Config, compression_from_env
from ..core import cuda, native
from ..errors import ConfigError


def _state(port: Interface) -> str:
    if not port.up:
        return "down"
    return "up" if port.running else "no carrier"


def _ports(names: Sequence[str]) -> Table:
    table = Table("interface", "address", "Mbit/s", "state", "used", box=None, pad_edge=False)
    try:
        chosen = {port.name for port in choose(names, single_host=False)}
    except ConfigError:
        chosen = set()
    for port in list_interfaces():
        addresses = ", ".join(str(address) for address in port.usable) or "-"
        speed = str(port.mbit_per_s) if port.mbit_per_s else "-"
        alone = "one host only" if port.loopback and not names else "no"
        used = "yes" if port.name in chosen else alone
        table.add_row(port.name, addresses, speed, _state(port), used)
    return table


def _settings(config: Config) -> Table:
    """Makes the table of the settings that ``ringcomm.init()`` would use here, with their
    sources."""
    table = Table("setting", "value", "from", box=None, pad_edge=False)
    for name, source in config.sources().items():
        table.add_row(name, config.shown(name) or "-", source)
    for name in sorted(set(OTHER_VARIABLES) & set(os.environ)):
        value = "is set" if name == secret.VARIABLE else os.environ[name]
        table.add_row(name.removeprefix("RINGCOMM_").lower(), value, name)
    return table


def _kernel_sets(wanted: str) -> str:
    fastest = [name for name, supported in native.kernel_sets() if supported][-1]
    return ", ".join(
        f"[bold]{name} (chosen)[/bold]"
        if name == (wanted or fastest)
        else name
        if supported
        else f"{name} (not on this CPU)"
        for name, supported in native.kernel_sets()
    )


def main() -> int:
    """Prints version, kernel sets, CUDA, interfaces and settings; returns 1 where a setting is
    refused, or a port, kernel set, codec or secret cannot be used here."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    reason, count = cuda.why_not(), cuda.device_count()
    gpus = f"yes: {count} GPU{'s' if count > 1 else ''}" if reason is None else f"no: {reason}"
    console.print(f"ringcomm {__version__}, Python {sys.version.split()[0]}")
    console.print(f"CUDA         {gpus}")
    try:
        config = Config()
        console.print(f"kernel sets  {_kernel_sets(config.kernel_set)}")
        console.print(_ports(config.interfaces))
        console.print()
        console.print(_settings(config))
        native.require_kernel_set(config.kernel_set)
        if config.interfaces:
            choose(config.interfaces, single_host=False)
        of_group(compression_from_env())
        secret.check(config)
    except ConfigError as error:
        console.print(f"settings     {error}", soft_wrap=True)
        return 1
    return 0
