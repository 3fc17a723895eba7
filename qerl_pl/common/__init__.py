"""Helpers that all packages of qerl_pl use: data types, collectives over ranks, metrics, seeds, timing and files."""
