"""Helpers that all packages use: data types, collectives over ranks, metrics, seeds, timing and files."""
