"""Studies: train every arm (a named configuration) with every seed, and compare the arms statistically."""
