"""Curves of finished and running runs, read from their event files."""
