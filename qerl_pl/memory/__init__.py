"""How much memory a run takes, what fits, and what happens when it did not."""
