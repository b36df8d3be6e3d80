"""Harm done to a job: what faults.py is made of (fault_lab.py, fault_rank.py, fault_table.py),
and strangers.py (crowd.py, strangers_rank.py)."""
