"""What convergence.py is made of: how methods train (worker.py, train.py, methods.py), which runs
are due (plan.py, pool.py), and what their rows say (claims.py, stats.py, report.py)."""
