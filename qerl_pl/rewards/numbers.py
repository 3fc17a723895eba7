"""Read one number from an answer as an exact fraction, without floats, and without evaluating the model's text."""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from qerl_pl.rewards.number_words import CHINESE, chinese_number, fraction_in_digits, in_digits
from qerl_pl.rewards.units import denies, leads_to_number, names_unit

MAX_ANSWER = 1000  # characters; a longer answer is not read as a number, which bounds the time of the regexes below
SIGNIFICANT = 6  # a decimal with fewer significant digits does not stand for a value such as 1/3
MAX_EXPONENT = 300  # bounds the memory of numbers such as 1e999999999
_NUM_KEPT = 4096  # number of answers whose numbers are cached, because groups and rewards ask for the same ones

# Matches a decimal number. The first two alternatives match numbers such as 12,34,567 and 1.234.567, and the last but
# one a number with a decimal comma, such as 3,5.
_DECIMAL = (
    r"\d{1,2}(?:,\d\d)+,\d{3}(?![\d,])|\d{1,3}(?:\.\d{3}){2,}(?!\d|\.\d)|"
    r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?\.\d+|\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?: \d{3})+(?!\d)"
    r"|\d+,\d{1,2}(?![\d,.])|\d+"
)
_NUMBER = re.compile(
    rf"(?P<sign>(?<![\w)+-])[-+])?"
    rf"(?:(?P<whole>\d+)\s+(?:and\s+)?(?=\d+\s*/))?"
    rf"(?P<top>{_DECIMAL})"
    rf"(?:\s*/\s*(?P<bottom>{_DECIMAL}))?"
    rf"(?:\s*(?:x|\*)\s*10\s*\^\s*\{{?(?P<exponent>[-+]?\d+)\}}?)?"
    rf"(?:\s*(?P<scale>dozen|hundred|thousand|million|billion|trillion)\b)?"
    rf"(?P<percent>\s*(?:%|per\s?cent\b))?",
    re.IGNORECASE,
)
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_THOUSAND = re.compile(r"(?<=\d)[kK]\b")
_MINUS = re.compile(r"\b(?:minus|negative)\s+(?=[\d.])", re.IGNORECASE)
_ONE = re.compile(r"\ba (?=(?:dozen|hundred|thousand|million|billion|trillion)\b)", re.IGNORECASE)
_SUPERSCRIPT = re.compile("[\u207b\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")

# Matches what stands in a formula but is no part of it: the mark of the end of a proof, and the number of an equation.
DECORATION = re.compile(r"\\(?:blacksquare|square|Box|qed(?:here|symbol)?|checkmark)(?![A-Za-z])|\\tag\*?\s*\{[^{}]*\}")
NOTES = re.compile(r"<<[^<>]*>>")  # matches calculator notes in solutions of GSM8K, such as <<6*3=18>>
# Rewritings to plain text, applied in this order.
_REWRITES = [
    (NOTES, ""),
    (re.compile(r"[\u2212\u2013\u2012\ufe63\uff0d]"), "-"),  # dashes used as a minus
    (re.compile(r"[\u00d7\u22c5\u00b7]"), "*"),
    (re.compile("[\u2018\u2019\u201c\u201d]|</?(?:b|i|u|em|strong)>"), " "),  # quotes and HTML
    (re.compile(r"\\not\s*=|\\neq?(?![A-Za-z])|\u2260|!="), " not "),
    (re.compile(r"[\u2248\u2245]|\\(?:approx|simeq|cong)(?![A-Za-z])"), "="),
    (re.compile(r"\\(?:times|cdot)(?![A-Za-z])"), "*"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\(?:boxed|fbox)\s*\{(?=[^{}]*\Z)"), " "),  # cut off
    (re.compile(r"(?<=[\w)])\*\*(?=-?\d)"), "^"),  # a power in Python
    (DECORATION, ""),
    (re.compile(r"\\!|\\left(?![A-Za-z])|\\right(?![A-Za-z])|\*\*|__|`"), ""),
    (re.compile(r"\\[,;: ()\[\]]|\\q?quad(?![A-Za-z])|~"), " "),
    (re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\u00b0|\\degree(?![A-Za-z])"), " degrees "),
    (re.compile(r"\\Omega(?![A-Za-z])|\u03a9"), " ohms"),
    (re.compile(r"\\(?:[cdts]|nice)frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"(?<=\d)\s*(?=\\frac)"), " "),
    (re.compile(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}"), r"\1/\2 "),
    (re.compile(r"\\frac\s*(\d)\s*(?:\{(\d+)\}|(\d)(?!\d))"), r"\1/\2\3"),
    (re.compile(r"\\([%$#&])"), r"\1"),
    (re.compile(r"(?<=\d):00\b"), ""),
    (re.compile(r"([-+])\s*[$\u00a3-\u00a5\u20a0-\u20c0]\s*"), r"\1"),
    (re.compile(r"(?:\bUS)?[$\u00a3-\u00a5\u20a0-\u20c0]|(?<=\d)\s*[\u5143\u5186]"), " "),
    (re.compile(r"(?<=\d)[eE]([-+]?\d+)(?![\w.])"), r"*10^\1"),
    (re.compile(r"\b(?:USD|EUR|GBP|INR|CHF|JPY|CNY|Rs)\.?\s*(?=\d)"), " "),
    # removes digits that belong to a unit or a name, as in "m2", "cm^{2}" and "CO_2"
    (re.compile(r"(?<=[A-Za-z])(?:\s*[\^_]\s*\{?-?\d+\}?|\d+)"), ""),
    (re.compile(r"^\s*([-+])\s+(?=[\d.])"), r"\1"),
]
_BOLD = re.compile(r"\*\*([^*]+)\*\*")
_ASIDE = re.compile(r"(?<=\s)\([^()]*\)")
_ASIDE_AT_END = re.compile(r"\s*\(([^()]*)\)[\s.]*$")
_BOUND = re.compile(
    r"(?:\b(?:except|not|than|least|most|all but|under|over|below|above)|n't)\s+\W*$"
    r"|(?:(?<![<\w])\w+|[^\s\w=<>-])\s*(?:[<>!]=|[<>\u2264\u2265\u2260]|\\(?:[lg]eq?|[lg]eqslant|[lg]t|neq?))\s*$",
    re.IGNORECASE,
)  # "at least 42", "x > 42"
_TAG = re.compile(r"<[/|]?[A-Za-z][^<>\s]*>")  # "</p>", "<br/>", "<|assistant|>": not the sign >
_REMARK = re.compile(r"\W*(?:note|check|hint|remember)\b", re.IGNORECASE)
_WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|mbox|boxed|fbox|underline|operatorname)\s*\{([^{}]*)\}"
)


class Number(NamedTuple):
    """A number, and whether it was written as a percentage; the value of ``50%`` is 50."""

    value: Fraction
    percent: bool

    def equals(self, other: Number, *, sign_may_miss: bool = False) -> bool:
        """Tell whether two numbers are equal, or whether one is the other rounded or truncated (see ``is_decimal_of``).
        A percentage such as ``50%`` equals 0.5; it equals the plain number 50 only if ``sign_may_miss`` is True."""
        if self.percent != other.percent:
            return self._share() == other._share() or (sign_may_miss and self.value == other.value)
        return (
            self.value == other.value
            or is_decimal_of(self.value, other.value)
            or is_decimal_of(other.value, self.value)
        )

    def __str__(self) -> str:
        return f"{self.value}{'%' if self.percent else ''}"

    def _share(self) -> Fraction:
        return self.value / 100 if self.percent else self.value


def is_decimal_of(decimal: Fraction, value: Fraction) -> bool:
    """Tell whether ``decimal`` is ``value`` rounded or truncated at the decimal's last digit. Returns False if
    ``value`` has finitely many decimals, because an answer must then give them all, or if ``decimal`` has fewer than
    ``SIGNIFICANT`` significant digits: 0.333333 stands for 1/3, but 0.33 does not."""
    places = decimal_places(decimal)
    if not places or decimal_places(value) is not None:
        return False
    digits, exact = abs(decimal) * 10**places, abs(value) * 10**places
    same_sign = (decimal < 0) == (value < 0)
    return same_sign and digits >= 10 ** (SIGNIFICANT - 1) and digits in (int(exact), int(exact + Fraction(1, 2)))


def decimal_places(value: Fraction) -> int | None:
    """Count the digits after the decimal point of a fraction; None if its decimal form is not finite."""
    rest, places = value.denominator, 0
    for prime in (2, 5):
        power = 0
        while rest % prime == 0:
            rest, power = rest // prime, power + 1
        places = max(places, power)
    return places if rest == 1 else None


def parse_number(text: str) -> Number | None:
    """Read ``text`` as one number; None if words around it could change its value. A number may have thousands
    separators, decimals, fractions, powers of ten, percent and currency signs, in plain text, LaTeX, digits of any
    script or English words. It may follow words that introduce it ("the total is"), and its unit may follow it (module
    ``units``). In an equation such as ``6 * 3 = 18``, the last side is read."""
    return None if len(text) > MAX_ANSWER else _parsed(text)


@lru_cache(_NUM_KEPT)
def _parsed(text: str) -> Number | None:
    *sides, plain = re.split("=", plain_text(text))
    plain = _unbracketed(_THOUSAND.sub(" thousand", _signed(plain)))
    match = next(_NUMBER.finditer(plain), None)
    number = _value(match) if match else None
    if match is None or number is None or not leads_to_number(plain[: match.start()]):
        return None
    if any((other := exact_number(side)) is not None and other.value != number.value for side in sides):
        return None  # 4 = 5
    return number if _adds_nothing(plain[match.end() :], number) else None


def exact_number(text: str) -> Number | None:
    """Parse ``text`` as a number with optional white space around it; None if the text contains anything else."""
    if len(text) > MAX_ANSWER:
        return None
    match = _NUMBER.fullmatch(_signed(plain_text(text).strip()))
    return _value(match) if match else None


def leading_number(text: str) -> Number | None:
    """Read the number at the start of ``text`` if nothing follows but its unit or a remark in brackets, as in "18 (9
    eggs at $2 each)"; else None."""
    plain = _signed(plain_text(text[:MAX_ANSWER])).lstrip()
    match = _NUMBER.match(plain)
    number = _value(match) if match else None
    if match is None or number is None:
        return None
    rest = plain[match.end() :]
    named = None if number.percent else re.match(r"\s+[A-Za-z][^\d(]*", rest)
    return number if _adds_nothing(rest, number) or (named and names_unit(f"{named.group()} others")) else None


def last_number(text: str) -> Number | None:
    """Read the last number of a text, from the last line that has a number and is no remark ("Check: ..."). Returns
    None if there is no number, or if words such as "at least" or a sign such as "<" make the number a bound. Numbers in
    parentheses count only if the line has no others, and a number in bold is preferred to others of its line."""
    lines = text.splitlines()
    for line in reversed([line for line in lines if not _REMARK.match(line)] or lines):
        line = line[-MAX_ANSWER:]
        if "**" not in line and not any(map(str.isnumeric, line)):
            continue
        outside = _ASIDE.sub(" ", line)
        line = outside if re.search(r"\d", outside) else line
        bold = [number for span in _BOLD.findall(line) if (number := parse_number(span)) is not None]
        plain = _THOUSAND.sub(" thousand", plain_text(line))
        matches = [(match, number) for match in _NUMBER.finditer(plain) if (number := _value(match))]
        if bold:
            return bold[-1]
        if matches:
            match, number = matches[-1]
            return None if _BOUND.search(_TAG.sub("", plain[: match.start()])) else number
    return None


def plain_text(text: str) -> str:
    """Rewrite LaTeX, Markdown, currency signs and digits of other scripts in a text as ASCII numbers and words."""
    if not text.isascii():
        text = ascii_digits(text)
    for _ in range(4):  # wrappers may be nested, as in \boxed{\text{18}}
        text = _WRAPPER.sub(r" \1 ", text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text


def ascii_digits(text: str) -> str:
    """Rewrite digits, superscripts and fraction characters of any script in ASCII."""
    text = _SUPERSCRIPT.sub(lambda power: f"^{{{unicodedata.normalize('NFKC', power.group())}}}", text)
    text = re.sub(r"(?<=\d)(?=[\u00bc-\u00be\u2150-\u215e])", " ", text)  # "1" and a one-character "1/2" is 1 + 1/2
    text = unicodedata.normalize("NFKC", text).replace("\u2044", "/")
    return CHINESE.sub(chinese_number, "".join(str(unicodedata.decimal(char, char)) for char in text))


def _signed(plain: str) -> str:
    """Rewrite English number words as digits, and the words ``minus`` and ``negative`` as a minus sign."""
    return _MINUS.sub("-", in_digits(fraction_in_digits(_ONE.sub("1 ", plain))))


def _unbracketed(plain: str) -> str:
    """Remove brackets around the whole answer, but not around ``(1,234)``, which may be a pair."""
    inner = re.fullmatch(r"\s*\(([^(),]*)\)\s*", plain)
    return inner[1] if inner else plain


def _adds_nothing(rest: str, number: Number) -> bool:
    """Tell whether the text behind a number is empty or its unit, perhaps with a remark that gives no other value."""
    aside = _ASIDE_AT_END.search(rest)
    if aside:
        again = parse_number(re.sub(r"^\s*or\s", "", aside[1]))
        if again is None and (
            denies(re.sub(r"^not (?:counting|including) ", "", aside[1])) or not aside[0][0].isspace()
        ):
            return False
        if again is not None and not again.equals(number, sign_may_miss=True):
            return False
        rest = rest[: aside.start()]
    return names_unit(rest)


def _value(match: re.Match[str]) -> Number | None:
    top, bottom = _decimal(match["top"]), _decimal(match["bottom"] or "1")
    exponent = int(match["exponent"] or "0") if len(match["exponent"] or "") < 6 else MAX_EXPONENT + 1
    if bottom == 0 or abs(exponent) > MAX_EXPONENT:
        return None
    value = int(match["whole"] or "0") + top / bottom
    value *= Fraction(10) ** exponent * _SCALES.get((match["scale"] or "").lower(), 1)
    return Number(-value if match["sign"] == "-" else value, percent=match["percent"] is not None)


def _decimal(digits: str) -> Fraction:
    if re.fullmatch(r"\d+,\d{1,2}", digits):
        return Fraction(digits.replace(",", "."))
    return Fraction(re.sub(r"[,. ]" if digits.count(".") > 1 else r"[, ]", "", digits))
