"""Score completions."""
