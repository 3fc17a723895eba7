"""The page of a run: one HTML file with results, checks, settings and completions, made by ``report --html``."""
