"""Settings of a run: checks that need no model, comparison with the run's previous start, and a flat table for
loggers."""
