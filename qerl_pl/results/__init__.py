"""Read the curves of finished and running training runs from their event files."""
