"""Settings of a run, their checks before a model is loaded, and their comparison with a run's previous start."""
