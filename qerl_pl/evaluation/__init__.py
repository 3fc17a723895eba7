"""Evaluate a policy on held-out problems: sampling and scoring, a cache of finished batches, and pass@k."""
