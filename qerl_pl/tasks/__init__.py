"""Generated tasks."""
