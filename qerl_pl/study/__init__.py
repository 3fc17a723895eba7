"""Studies: train several configurations with several seeds each, and compare the results statistically.

A study compares arms (named configurations). Every arm is trained with every seed and, optionally, with every point of
a grid, which is one combination of values of options. Each such training with its evaluations is a run. A readout is a
number that summarises a run, such as its final accuracy.
"""
