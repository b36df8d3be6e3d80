"""Measurements: the loop of sweep.py (timing.py, closed_form.py), what bare streams carry
(floor.py, physical.py, control.py), types of options (options.py), and rank programs (idle.py,
shift.py, codec_rank.py)."""
