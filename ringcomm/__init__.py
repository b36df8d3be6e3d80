"""ringcomm: collective communication for training on a few servers over ordinary Ethernet.

    import ringcomm
    ringcomm.init()                                       # under torchrun, mpirun or srun
    ringcomm.allreduce(tensor, op="avg", compression="bf16")

``__all__`` is the stable interface, which ``dir`` shows; so are those of ringcomm.jax,
ringcomm.membership and ringcomm.torch, with its optim, outer and sparse. All else is internal:

    core                    the road to the C core, for all that communicates
    errors, config, codecs  used everywhere
"""

from __future__ import annotations

from importlib import metadata as _metadata

from .api import default_communicator, init, is_initialized, rank, shutdown, world_size
from .codecs import Compression
from .communicator import Communicator
from .config import Algorithm, Config
from .core import cuda
from .core.calls import Op
from .core.counters import LaneStats, RailStats, Stats
from .core.work import Work
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
