"""Read whole numbers below a million that are written in English words, and numbers in Chinese characters."""

import re
import unicodedata

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
    rf"(?<!\w-)\b(?:{_BELOW_1000} thousand(?:,?(?: and)? {_BELOW_1000})?|{_BELOW_1000}|zero)\b(?!-)", re.IGNORECASE
)
# Matches names of fractions: "half", "thirds", "hundredths".
PART = re.compile(
    r"\b(?:half|halves|third|quarter|(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|\w*teen|\w+tie|hundred|thousand"
    r"|million|billion)th)s?\b",
    re.IGNORECASE,
)
# Matches a word that is a number, or multiplies one; an ordered pair counts as one thing.
NUMBER_WORD = re.compile(
    rf"\b(?:zero|(?:{'|'.join(_ONES + _TEENS + _TENS)})(?:e?s)?|(?:{'|'.join(word[:-1] for word in _TENS)})ies"
    r"|gross|brace|(?:ten|hundred|thousand|million|billion|trillion|dozen|(?<!ordered )pair|couple|score|trio|duo"
    r"|quartet|quintet)s?)\b",
    re.IGNORECASE,
)
_PARTS = {"half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7}
_PARTS |= {"eighth": 8, "ninth": 9, "tenth": 10, "twelfth": 12, "hundredth": 100, "thousandth": 1000}


_HALF = re.compile(rf"(?<![\d.,/])(?:(\d+)|{_WHOLE.pattern}) and (?:a|one) half\b", re.IGNORECASE)
CHINESE = re.compile(
    "[\u96f6\u3007\u4e00\u4e8c\u4e24\u4e09\u56db\u4e94\u516d\u4e03\u516b\u4e5d\u5341\u767e\u5343\u4e07\u4ebf]+"
)


def fraction_in_digits(text: str) -> str:
    """Rewrite a text that is a fraction in words, such as "three quarters", as 3/4; any other stays, also "third"."""
    *first, part = re.split(r"[ -]", text.strip().lower())
    top = " ".join(first)
    single = top in ("a", "an", "one") or part == text.strip().lower() == "half"
    number = "1" if single else in_digits(top) if part.endswith("s") else ""
    bottom = _PARTS.get(part if single else part.removesuffix("s"))
    return f"{number}/{bottom}" if bottom and number.isdigit() else text


def in_digits(text: str) -> str:
    """Replace whole numbers written in English words by digits, and "2 and a half" by 2.5. A text that has other
    digits, or fractions in words, is returned as it is."""
    text = _HALF.sub(lambda match: f"{match[1] or _value(match[0].lower().rpartition(' and ')[0])}.5", text)
    if re.search(r"\d", text) or PART.search(text):
        return text
    return _WHOLE.sub(lambda match: str(_value(match.group().lower())), text)


def chinese_number(characters: re.Match[str]) -> str:
    """Write a number in Chinese characters in digits."""
    total = below_10000 = digit = 0
    for character in characters[0]:
        size = 2 if character == "\u4e24" else int(unicodedata.numeric(character))
        if size < 10:
            digit = size
        elif size < 10_000:
            below_10000, digit = below_10000 + (digit or 1) * size, 0
        else:
            total, below_10000, digit = (total + (below_10000 + digit or 1)) * size, 0, 0
    return str(total + below_10000 + digit)


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
