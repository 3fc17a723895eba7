"""Studies: train every arm (a named configuration) with every seed, in ordinary runs, and compare the arms
statistically."""
