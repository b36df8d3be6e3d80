"""The emulated cluster (cluster.py, wiring.py), the jobs on it (job.py, site.py), and what
else the machine does meanwhile (burners.py, steal.py)."""
