"""Runs of words, by which texts are compared."""

from __future__ import annotations

import re


def runs_of_words(text: str, num_words: int) -> list[tuple[str, ...]]:
    """Every run of ``num_words`` words in order; a shorter text is one run, one without words none.

    Case, punctuation and white space do not count.
    """
    words = re.findall(r"[^\W_]+", text.lower())
    last = max(0, len(words) - num_words)
    return [tuple(words[start : start + num_words]) for start in range(last + 1)] if words else []
