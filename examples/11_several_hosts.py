"""Sums over three hosts with two network ports each, emulated on this machine by bench/netlab.py.

netlab sets what you set on real hosts: a secret, the ports to use, and torchrun's variables. On
these start it by torchrun or mpirun, as README.md has it under "Several hosts".

Command (as root):

    python bench/netlab.py --hosts 3 --nics 100,100 -- python examples/11_several_hosts.py

Expected output:

    3 ranks, sum 6.0
    eth0 was used: True
    eth1 was used: True

If it fails:

- netlab needs root, iproute2, and the right to make network namespaces, which containers often
  lack; it says which is missing.
- ConfigError that asks for a secret, on real hosts: make one by `python -m ringcomm keygen FILE`,
  copy it to every host, and name it in RINGCOMM_SECRET_FILE.
- BootstrapError, on real hosts: firewalls have to pass TCP between them; its table says where not.
"""

import numpy as np

import ringcomm

comm = ringcomm.init()
x = np.full(1_000_000, comm.rank + 1, dtype=np.float32)
ringcomm.allreduce(x)  # each port carries a share, by its speed

if comm.rank == 0:
    print(f"{comm.world_size} ranks, sum {x[0]}")
    for rail in comm.stats()["rails"]:
        print(f"{rail['interface']} was used: {rail['sent_bytes'] > 0}")
ringcomm.shutdown()
