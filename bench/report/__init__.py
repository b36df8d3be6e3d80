"""What becomes of figures: rows in files (rows.py), tables of text (columns.py), and all that
sweep.py shows (table.py)."""
