"""The libraries that are measured: one face for all (peer.py), each behind it (adapters.py),
and where each is found and how it is started (contenders.py)."""
