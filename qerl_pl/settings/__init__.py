"""Checks of settings that need no model, and what changed between two starts of a run."""
