"""The formulas of the papers, written with loops over python floats: slow, obvious, and what the code is held to."""
