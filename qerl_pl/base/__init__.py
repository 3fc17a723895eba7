"""Base checkpoint as a run uses it: found, checked, converted or quantised, and kept in a cache."""
