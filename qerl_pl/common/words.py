"""Word n-grams, by which texts are compared."""

from __future__ import annotations

import re


def runs_of_words(text: str, num_words: int) -> list[tuple[str, ...]]:
    """List all sequences of ``num_words`` consecutive words (n-grams) of a text, ignoring case, punctuation and white
    space.

    A shorter text gives one n-gram of all its words; a text without words gives none.
    """
    words = re.findall(r"[^\W_]+", text.lower())
    last = max(0, len(words) - num_words)
    return [tuple(words[start : start + num_words]) for start in range(last + 1)] if words else []
