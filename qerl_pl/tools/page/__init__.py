"""Make the HTML page of one or more runs, a single file with results, checks, settings and completions (``report
--html``)."""
