"""Options of a process group, for ``init_process_group(pg_options=...)``.

Invariants: checked when made; settings that are not given come from the environment
(Config.from_env, and RINGCOMM_COMPRESSION). A group without options of its own has those of the
default group.
"""

from __future__ import annotations

from typing import TypedDict

from typing_extensions import Unpack

from ..codecs import Compression, of_group
from ..config import REMOVED, Algorithm, Config, Recovery, compression_from_env
from ..errors import ConfigError
from .argument_checks import takes


class _ConfigFields(TypedDict, total=False):
    """Fields of Config, and ``timeout``, which is refused by name."""

    interfaces: tuple[str, ...]
    lanes: int
    probe: bool
    segment_bytes: int
    timeout: float
    connect_timeout: float
    heartbeat: float
    peer_timeout: float
    recovery: Recovery
    algorithm: Algorithm
    shared_memory: bool
    spin_us: int
    threads: int
    kernel_set: str
    congestion: tuple[str, ...]
    timeline: str
    insecure: bool
    secret_file: str
    secret_fd: int


class Options:
    """How a process group of backend "ringcomm" is built.

    Args:
        compression: how all-reduced float32 and float64 values travel where
            the op is sum or avg: None or "none", "bf16", "fp16", "int8" or "fp8". Default:
            RINGCOMM_COMPRESSION. The same on all ranks. Other calls are not compressed.
        settings: fields of ringcomm.Config, such as ``interfaces=("eth0", "eth1")``. Fields not
            given come from the environment. The group's timeout is torch's, not a setting.

    Attributes:
        compression: None or the codec's name.
        config: the ringcomm.Config.

    Raises:
        ConfigError: (a ValueError) a value that cannot work.
    """

    @takes(_ConfigFields, removed=REMOVED)
    def __init__(
        self, compression: Compression | None = None, **settings: Unpack[_ConfigFields]
    ) -> None:
        codec = of_group(compression_from_env() if compression is None else compression)
        if "timeout" in settings:
            raise ConfigError("give the timeout to init_process_group or new_group, not in Options")
        self.config = Config.from_env(**settings)
        self.compression = None if codec.name == "none" else codec.name

    def __repr__(self) -> str:
        return f"Options(compression={self.compression!r}, config={self.config!r})"
