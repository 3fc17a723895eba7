"""Studies: a grid of arms and seeds as ordinary runs, and what they say together."""
