"""The commands of ``python -m ringcomm``, one module each; for others its ``main``."""
