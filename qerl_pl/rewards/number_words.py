"""Read whole numbers below a million in English words."""

from __future__ import annotations

import re

_ONES = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
_TEENS = ["ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_VALUES = {
    "zero": 0,
    **{word: value for value, word in enumerate(_ONES + _TEENS, 1)},
    **{word: 10 * value for value, word in enumerate(_TENS, 2)},
}
_BELOW_10 = f"(?:{'|'.join(_ONES)})"
_BELOW_100 = f"(?:(?:{'|'.join(_TENS)})(?:[ -]{_BELOW_10})?|{'|'.join(_TEENS)}|{_BELOW_10})"
_BELOW_1000 = f"(?:{_BELOW_10} hundred(?:(?: and)? {_BELOW_100})?|{_BELOW_100})"
_WHOLE = re.compile(
    rf"\b(?:{_BELOW_1000} thousand(?:,?(?: and)? {_BELOW_1000})?|{_BELOW_1000}|zero)\b(?!-)", re.IGNORECASE
)
# Matches names of fractions: "half", "thirds", "hundredths".
PART = re.compile(
    r"\b(?:half|halves|third|quarter|(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|\w*teen|\w+tie|hundred|thousand"
    r"|million|billion)th)s?\b",
    re.IGNORECASE,
)
# Matches a word that is, or multiplies, a number.
NUMBER_WORD = re.compile(
    rf"\b(?:zero|one|{'|'.join(_ONES[1:] + _TEENS + _TENS)}"
    r"|(?:ten|hundred|thousand|million|billion|trillion|dozen)s?)\b",
    re.IGNORECASE,
)


def in_digits(text: str) -> str:
    """Replace whole numbers written as English words by digits; a text with digits or fractions in words is not
    changed."""
    if re.search(r"\d", text) or PART.search(text):
        return text
    return _WHOLE.sub(lambda match: str(_value(match.group().lower())), text)


def _value(words: str) -> int:
    total = below_1000 = 0
    for word in re.findall("[a-z]+", words):
        if word == "thousand":
            total, below_1000 = 1000 * below_1000, 0
        elif word == "hundred":
            below_1000 *= 100
        elif word != "and":
            below_1000 += _VALUES[word]
    return total + below_1000
