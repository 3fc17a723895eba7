"""References for tests: the papers' formulas, written as slow loops that are easy to check."""
