"""Prompts: sources of problems and the data module that serves them."""
