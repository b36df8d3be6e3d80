"""ringcomm: collective communication for training on a few servers over ordinary Ethernet.

    import ringcomm
    ringcomm.init()                                       # under torchrun, mpirun or srun
    ringcomm.allreduce(tensor, op="avg", compression="bf16")

``__all__`` is the stable interface, which ``dir`` shows; so are those of ringcomm.membership and of
ringcomm.torch, with its optim, outer and sparse. Everything else is internal. Within the package:

    Communicator.run_collective, .run_in_place, .submit_in_place  calls on memory, or one tensor
    calls, devices, buffers, residuals, work                      what such calls are made of
    errors, config, codecs                                        used everywhere
"""

from __future__ import annotations

from importlib import metadata as _metadata

from . import cuda
from .api import default_communicator, init, is_initialized, rank, shutdown, world_size
from .calls import Op
from .codecs import Compression
from .communicator import Communicator
from .config import Algorithm, Config
from .counters import LaneStats, RailStats, Stats
from .errors import (
    AbortedError,
    AuthenticationError,
    BootstrapError,
    CommTimeoutError,
    ConfigError,
    DeviceError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    ProtocolError,
    RingcommError,
    TensorError,
)
from .feedback import ErrorFeedback, FeedbackStore
from .functions import (
    allgather,
    allreduce,
    allreduce_many,
    alltoall,
    barrier,
    broadcast,
    gather,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
)
from .work import Work

__version__ = _metadata.version("ringcomm")

__all__ = [
    "AbortedError",
    "Algorithm",
    "AuthenticationError",
    "BootstrapError",
    "CommTimeoutError",
    "Communicator",
    "Compression",
    "Config",
    "ConfigError",
    "DeviceError",
    "ErrorFeedback",
    "FeedbackStore",
    "LaneStats",
    "MismatchError",
    "NotInitializedError",
    "Op",
    "PeerLostError",
    "ProtocolError",
    "RailStats",
    "RingcommError",
    "Stats",
    "TensorError",
    "Work",
    "__version__",
    "allgather",
    "allreduce",
    "allreduce_many",
    "alltoall",
    "barrier",
    "broadcast",
    "cuda",
    "default_communicator",
    "gather",
    "init",
    "is_initialized",
    "rank",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "shutdown",
    "world_size",
]


def __dir__() -> list[str]:
    return __all__
