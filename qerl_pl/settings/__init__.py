"""Settings of a run, their checks before a model is loaded, and their comparison with those of the run's previous
start."""
