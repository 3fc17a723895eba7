"""Settings of a run: checks that need no model, and comparison with the run's previous start."""
