"""Tell which words next to a number do not change its value, and convert units.

Words behind a number are accepted only if they are a unit or a plural noun, perhaps with words that refer to it ("miles
per hour", "eggs in total"), because others may change the number in any way ("plus one", "is wrong").
"""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction
from typing import NamedTuple

from qerl_pl.rewards.number_words import NUMBER_WORD, PART


class Unit(NamedTuple):
    """A unit of measurement: its size as a multiple of the base units of its dimension."""

    size: Fraction
    dimension: tuple[tuple[str, int], ...]  # base units and exponents; empty for a share such as permille
    radians: int  # exponent of the radian in the unit; ``size`` lacks a factor 1 / pi for each radian

    def per(self, other: Unit) -> tuple[Fraction, int] | None:
        """Return how many of the unit ``other`` this unit contains, as (factor, exponent) of factor * pi^exponent; None
        if the units measure different things."""
        if self.dimension != other.dimension:
            return None
        return self.size / other.size, other.radians - self.radians


# Each entry has the names of a unit, its size, and the unit in which the size is given. The entry of a base unit ends
# with the name of its dimension instead. Names with a star may have a prefix such as k or kilo.
_UNITS = """
m* meter* metre* 1 length; in inch inches 0.0254 m; ft foot feet 12 in; yd yard 3 ft; mi mile 5280 ft
g* gram* gramme* 1 mass; t tonne 1000 kg; lb pound 0.45359237 kg; oz ounce 1/16 lb; ton 2000 lb
s* second* 1 time; sec 1 s; min minute 60 s; h hr hour 60 min; d day 24 h; wk week 7 d
mo month 1 months; yr year 12 mo; decade 10 yr; century centuries 100 yr
N* newton* 1 kg m/s^2; J* joule* 1 N m; W* watt* 1 J/s; Wh* 3600 J; Hz* hertz* 1 /s; Pa* pascal* 1 N/m^2
A* amp* ampere* 1 current; V* volt* 1 W/A; ohm* 1 V/A; mol* mole* 1 substance; eV* 1 electronvolts; cal* calorie* 1 heat
L* l* liter* litre* 0.001 m^3; cc 1 cm^3; gal gallon 231 in^3; qt quart 1/4 gal; pt pint 1/8 gal; cup 1/16 gal
ha hectare 10000 m^2; acre 4840 yd^2; mph 1 mi/h; kph kmh kmph 1 km/h; fps 1 ft/s; rpm 1 rotations/min
deg degree 1 angle; rad* radian* 180 angle; C celsius 1 celsius; F fahrenheit 1 fahrenheit; K kelvin 1 kelvin
bit* 1 information; B* byte* 8 bit; bps* 1 bit/s; atm 101325 Pa; bar 100000 Pa; psi 1 psi; dB 1 decibel
cent penny pennies 1 money; dime 10 cent; nickel 5 cent; dollar USD 100 cent
pence 1 sterling; GBP 100 pence; euro EUR 1 euros; yen JPY 1 yen
yuan CNY RMB 1 yuan; won KRW 1 won; rupee INR Rs 1 rupees; franc CHF 1 francs; peso MXN 1 pesos; CAD 1 cad; AUD 1 aud
permille 0.001; bp 0.0001
"""
_PREFIXES = dict(zip("kMGTcdmunp", (3, 6, 9, 12, -2, -1, -3, -6, -9, -12), strict=True))
_PREFIX_NAMES = {
    "kilo": 3,
    "mega": 6,
    "giga": 9,
    "hecto": 2,
    "centi": -2,
    "deci": -1,
    "milli": -3,
    "micro": -6,
    "nano": -9,
}
# Symbols, currencies and abbreviations that are not in the table, and names of counted things that do not end in "s".
_SYMBOL = re.compile(r"[KMGT]i?B|[ap]\.?m\.?|[AP]\.?M\.?|AD|CE|o'clock|pts|ppm|px")
_NAME = re.compile(
    r"unit|point|piece|way|solution|root|time|person|people|children|men|women|teeth|mice|sheep|fish"
    r"|deer|geese",
    re.IGNORECASE,
)
_PLURAL = re.compile(r"(?!.*(?:ss|us|is)$)[a-z]{2,}s", re.IGNORECASE)
_POWER = re.compile(r"square|cubic|sq\.?|cu\.?", re.IGNORECASE)
_LINK = re.compile(r"per|an?|each|every|of|in|for")  # "per day", "a basket", "in total"
_AFTER_NAME = re.compile(
    rf"{_LINK.pattern}|at|on|from|to|with|over|old|long|wide|tall|high|deep|thick|away|apart|ago|left|remaining|total"
    r"|altogether|more|day|week|month|year|hour"
)
_ALONE = re.compile(r"in|exactly|each|apiece|total|altogether|left|more|remaining")
# Match words that deny or change a number next to them (_DENIES), prepositions that make the number behind them a bound
# (_BOUNDS), and verbs and pronouns of a further clause (_VERBS).
_DENIES = re.compile(
    r"not?|never|none|neither|nor|cannot|\w+n't|without|except|excluding|besides|but|unless|or|either|maybe|perhaps"
    r"|almost|nearly|than|least|most|wrong|incorrect|false|invalid|error|mistake|impossible|rather|instead|half|twice"
    r"|thrice|double|triple|plus|minus|divided|multiplied|squared|cubed|factorial|root|sqrt|log|ln|sin|cos|tan"
)
_BOUNDS = re.compile(
    r"times|over|under|above|below|beyond|between|exceed(?:s|ing)|within|before|after|unlike|like|despite|versus|vs|near"
    r"|towards?|past|since|until|till|off|against|short|far|from|around|opposite|upto|lacks|misses"
    r"|close|quarter"
)
_VERBS = re.compile(
    r"is|are|was|were|be|been|am|ha[sd]|have|does|did?|do|will|would|can|could|should|may|might|must|equals?|fails"
    r"|misses|exceeds|th(?:is|at|ese|ose)|hi[st]|hers|its|theirs|as|if|and|so"
)


def names_unit(words: str) -> bool:
    """Tell whether the words directly behind a number only name its unit or the things that are counted, as "km/h",
    "years old", "apples a day" and "in total" do; True if there are no words."""
    words = re.sub(r"(?<=[A-Za-z])\s*\^\s*\{?\s*-?\d\s*\}?|(?<=[A-Za-z])[23]\b", "", words)
    words = re.sub(r"\b(?:is|are|were) (?=left\b|remaining\b|in total\b)", "", words)
    words = words.replace("/", " per ").strip(" .,;:*\"'-")
    tokens = re.findall(r"[^\s-]+", words)
    lower = [token.lower().rstrip(".,!") for token in tokens]
    if not tokens:
        return True
    if not all(re.fullmatch(r"[A-Za-z\u03bc\\][A-Za-z\u03bc.']*[,!]?", token) for token in tokens):
        return False
    if _any(_DENIES, lower) or _any(_VERBS, lower) or NUMBER_WORD.search(words) or PART.search(words):
        return False
    if lower[0] in ("more", "remaining"):
        return names_unit(" ".join(tokens[1:]))
    if _LINK.fullmatch(lower[0]) or _ALONE.fullmatch(lower[0]):
        return len(tokens) > 1 or _ALONE.fullmatch(lower[0]) is not None
    head = next((place for place, token in enumerate(tokens[:3]) if _is_name(token.rstrip(",!"))), None)
    if head is None or _any(_AFTER_NAME, lower[:head]):
        return False
    while head + 1 < len(tokens) and _is_name(tokens[head + 1]) and not _LINK.fullmatch(tokens[head + 1]):
        head += 1  # "tennis balls", "N m"
    return head + 1 == len(tokens) or _AFTER_NAME.fullmatch(lower[head + 1]) is not None


def leads_to_number(words: str) -> bool:
    """Tell whether a text before a number, such as "She makes", leaves its value as it is; "at least" does not."""
    clause = re.split(r"[.,;:!?]\s", words.lower().strip() + " ")
    last = next((part for part in reversed(clause) if part.strip()), "")
    tokens = re.findall(r"[a-z']+", last)
    if re.fullmatch(r"[A-Za-z\s'\",.:;*!?#]*", words) is None:
        return False
    return not (_any(_DENIES, tokens) or _any(_BOUNDS, tokens[-2:]) or tokens == ["up", "to"])


def denies(words: str) -> bool:
    """Tell whether one of the words, such as "not", "half" or "plus", denies or changes a number next to it."""
    return _any(_DENIES, re.findall(r"[a-z']+", words.lower()))


def _any(pattern: re.Pattern[str], words: list[str]) -> bool:
    return any(map(pattern.fullmatch, words))


def _is_name(token: str) -> bool:
    """Tell whether a word is a unit, a word for its power ("square"), or a plural."""
    known = any(pattern.fullmatch(token) for pattern in (_SYMBOL, _NAME, _PLURAL, _POWER))
    return known or _known_unit(token) is not None or _NAME.fullmatch(token.removesuffix("s")) is not None


def unit_of(words: str) -> Unit | None:
    """Return the unit with which the words directly behind a number begin, as in "square feet of carpet"; None if the
    unit is not in the table, or if the words could change the number (see ``names_unit``)."""
    return _product(words) if names_unit(words) else None


def _product(words: str) -> Unit | None:
    size, powers, radians, has_unit = Fraction(1), Counter[str](), 0, False
    sign = power = 1
    tokens = re.findall(r"/|[A-Za-z]+(?:\.(?=[\s/]|$))?(?:\s*\^\s*\{?\s*-?\d|[23]\b)?", words)
    for place, token in enumerate(tokens):
        name, exponent = re.fullmatch(r"(/|[A-Za-z]+)\.?\W*?(-?\d)?", token).groups()  # pyright: ignore
        if name in ("/", "per") and powers != {"money": 1}:
            sign = -1
        elif _POWER.fullmatch(name):
            power = 3 if name.lower().startswith("cu") else 2
        else:
            unit = None if name == "in" and tokens[place + 1 : place + 2] not in ([], ["/"]) else _known_unit(name)
            if unit is None:
                break
            power *= sign * int(exponent or 1)
            size *= unit.size**power
            radians += unit.radians * power
            powers.update({base: exponent * power for base, exponent in unit.dimension})
            sign, power, has_unit = 1, 1, True
    dimension = tuple(sorted((base, exponent) for base, exponent in powers.items() if exponent))
    return Unit(size, dimension, radians) if has_unit and sign == power == 1 else None


def _known_unit(token: str) -> Unit | None:
    token = token.replace("\u03bc", "u").replace("\\mu", "u").rstrip(".")
    for name in (token, token.lower() if len(token) > 3 else token):
        unit = TABLE.get(name) or (TABLE.get(name.removesuffix("s")) if len(name) > 2 else None)
        if unit:
            return unit
    return None


TABLE: dict[str, Unit] = {}
for _line in re.split(r"[;\n]\s*", _UNITS.strip()):
    *_names, _size, _of = re.fullmatch(r"(.*?) ([\d./]+)(.*)", _line).groups()  # pyright: ignore
    _base = _product(_of) or Unit(Fraction(1), ((_of.strip(), 1),) if _of else (), 0)
    _unit = _base._replace(size=_base.size * Fraction(_size), radians=int(_line.startswith("rad")))
    for _name in _names[0].split():
        TABLE[_name.rstrip("*")] = _unit
        if _name.endswith("*"):
            for _prefix, _power in (_PREFIX_NAMES if len(_name) > 4 and _name[0].islower() else _PREFIXES).items():
                TABLE[_prefix + _name.rstrip("*")] = _unit._replace(size=_unit.size * Fraction(10) ** _power)
