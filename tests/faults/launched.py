"""The program that test_launchers.py has started by launchers: every rank checks a sum and prints
one line of JSON.

    launched.py [--mpi | --group] [--tag N]

--mpi joins over MPI.COMM_WORLD, --group as PyTorch's process group; without either, the launcher's
environment alone has to do. --tag makes the sums of two jobs different.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys

import numpy as np

import ringcomm


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mpi", action="store_true")
    parser.add_argument("--group", action="store_true")
    parser.add_argument("--tag", type=int, default=1)
    options = parser.parse_args()
    if options.mpi:
        from mpi4py import MPI

        comm = ringcomm.init(mpi=MPI.COMM_WORLD)
    elif options.group:
        import torch.distributed

        importlib.import_module("ringcomm.torch")  # which registers the backend
        torch.distributed.init_process_group("ringcomm")
        comm = ringcomm.default_communicator()
    else:
        comm = ringcomm.init()
    # Sums of these are exact in bf16, which has 8 significant bits.
    tensor = np.full(100_003, options.tag * (comm.rank + 1), dtype=np.float32)
    ringcomm.allreduce(tensor, compression="bf16")
    values = sorted(set(tensor.tolist()))
    heavy = sorted({"torch", "mpi4py", "cupy"} & set(sys.modules))
    line = {"rank": comm.rank, "world": comm.world_size, "values": values, "heavy": heavy}
    os.write(1, (json.dumps(line) + "\n").encode())  # whole, among other ranks' lines
    if options.group:
        torch.distributed.destroy_process_group()
    else:
        ringcomm.shutdown()


if __name__ == "__main__":
    main()
