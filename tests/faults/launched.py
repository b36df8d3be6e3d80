"""The program that test_launchers.py has started by launchers: every rank checks a sum and prints
one line of JSON.

    launched.py [--mpi | --store] [--tag N]

--mpi joins over MPI.COMM_WORLD, --store over a torch Store that rank 0 hosts; without either, the
launcher's environment alone has to do. --tag makes the sums of two jobs different.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from typing import Any

import numpy as np

import ringcomm


def _store() -> Any:
    """A store beside the one that torchrun's agent keeps at MASTER_PORT."""
    import torch.distributed

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return torch.distributed.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]) + 1,
        world_size,
        rank == 0,
        datetime.timedelta(seconds=30),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mpi", action="store_true")
    parser.add_argument("--store", action="store_true")
    parser.add_argument("--tag", type=int, default=1)
    options = parser.parse_args()
    if options.mpi:
        from mpi4py import MPI

        comm = ringcomm.init(mpi=MPI.COMM_WORLD)
    elif options.store:
        store = _store()  # rank 0 serves it until all are in, which the sum below shows
        comm = ringcomm.init(store=store)
    else:
        comm = ringcomm.init()
    # Sums of these are exact in bf16, which has 8 significant bits.
    tensor = np.full(100_003, options.tag * (comm.rank + 1), dtype=np.float32)
    ringcomm.allreduce(tensor, compression="bf16")
    values = sorted(set(tensor.tolist()))
    heavy = sorted({"torch", "mpi4py", "cupy"} & set(sys.modules))
    line = {"rank": comm.rank, "world": comm.world_size, "values": values, "heavy": heavy}
    os.write(1, (json.dumps(line) + "\n").encode())  # whole, among other ranks' lines
    ringcomm.shutdown()


if __name__ == "__main__":
    main()
