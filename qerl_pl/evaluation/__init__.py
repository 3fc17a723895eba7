"""Evaluations: batches that are kept while one goes on, what identifies them, and pass@k."""
