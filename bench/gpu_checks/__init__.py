"""What gpu_check.py is made of: a module with run(options) for each step, and the
programs of its ranks."""
