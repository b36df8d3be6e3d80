"""One rank of one library's job, as peers.py starts it: sweep.py, with oneCCL among its libraries.

The options are sweep.py's. Owns nothing but that addition.
"""

from __future__ import annotations

import sys

import sweep
from _libraries import PEERS
from _oneccl import OneCclPeer

if __name__ == "__main__":
    PEERS[OneCclPeer.name] = OneCclPeer
    sys.exit(sweep.main())
