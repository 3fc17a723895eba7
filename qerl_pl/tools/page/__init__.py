"""The page of a run: one HTML file with curves, verdicts, settings and completions, made by ``report --html``."""
