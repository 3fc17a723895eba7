"""Settings of a run: checks that need no model, and the differences between two starts of a run."""
