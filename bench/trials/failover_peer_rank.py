"""One rank of failover_peers.py: another library's all-reduces without end, each one checked.

    python bench/trials/failover_peer_rank.py --subject gloo|mpi SOCKET BYTES

It says over a Unix socket, one JSON message each, when every call ended and whether its result was
right, or why it failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from libraries.adapters import PEERS
from libraries.peer import What


def main() -> None:
    """Works until it is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--subject", choices=sorted(PEERS), required=True)
    parser.add_argument("socket")
    parser.add_argument("bytes", type=int)
    options = parser.parse_args()
    events = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    events.connect(options.socket)

    def say(**fields: Any) -> None:
        events.send(json.dumps(fields).encode())

    try:
        peer = PEERS[options.subject]()
        peer.setup(None)
        say(rank=peer.rank)
        count = options.bytes // 4
        call = peer.prepare(What("allreduce", "sum", "f32"), count)
        values = np.arange(count) % 251
        for turn in itertools.count(1):
            call.fill(((values + turn % 7) * (peer.rank + 1)).astype(np.float32))
            result = call.read(call.run())
            expected = (values + turn % 7) * (peer.world * (peer.world + 1) // 2)
            say(ended=time.monotonic(), step=[bool(np.array_equal(result, expected)), 0.0])
    except Exception as error:
        say(failed=f"{type(error).__name__}: {error}"[:120])


if __name__ == "__main__":
    main()
