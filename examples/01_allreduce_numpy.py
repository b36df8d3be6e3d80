"""Sums and averages numpy arrays over two ranks, in place, and computes while a sum travels.

Command:

    torchrun --standalone --nproc-per-node 2 examples/01_allreduce_numpy.py

Expected output:

    rank 0 of 2
    sum 3.0
    mean 1.5
    gathered [1.0, 2.0]
    sum in the background 3.0

If it fails:

- "rank 0 of 1": no launcher started it. Use torchrun, mpirun or srun, which number the ranks.
- "No module named ringcomm", or "the C core has not been built": `pip install -e .` in this folder.
- BootstrapError: its table names the rank that did not arrive. See whether that one has failed
  before, and whether RINGCOMM_INTERFACES names ports that this machine has.
"""

import numpy as np

import ringcomm

comm = ringcomm.init()  # finds its rank in the launcher's environment
mine = comm.rank + 1  # 1 on rank 0, 2 on rank 1

total = np.full(1_000_000, mine, dtype=np.float32)
ringcomm.allreduce(total)  # in place

mean = np.full(1_000_000, mine, dtype=np.float32)
ringcomm.allreduce(mean, "avg", compression="bf16")  # travels in half of the bytes

every = ringcomm.allgather(np.array([mine], dtype=np.float32))

later = np.full(1_000_000, mine, dtype=np.float32)
work = ringcomm.allreduce(later, async_op=True)  # returns at once
np.sort(np.arange(100_000))  # a computation of yours
work.wait()

if comm.rank == 0:
    print(f"rank {comm.rank} of {comm.world_size}")
    print("sum", total[0])
    print("mean", mean[-1])
    print("gathered", every[:, 0].tolist())
    print("sum in the background", later.max())
ringcomm.shutdown()
