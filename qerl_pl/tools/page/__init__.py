"""Make the HTML page of runs, a single file with results, checks, settings and completions (``report --html``)."""
