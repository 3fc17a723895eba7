"""Formulas of the papers as loops over Python floats: slow, easy to check, and the reference for the tests of the
code."""
