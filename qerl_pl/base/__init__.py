"""Base checkpoint of a run: found, checked, converted or quantised, and kept in a cache."""
