"""What peers.py is made of: rounds of libraries by turns (rounds.py, standings.py), and every
row of --all (scenes.py, all_scenes.py, verdicts.py, output.py)."""
