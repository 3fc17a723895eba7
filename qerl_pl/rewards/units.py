"""Tell which words next to a number leave its value as it is: units, things that are counted, and sentences around it.

Words behind a number are read only if they are a unit or a plural noun, with what it refers to ("miles per hour", "eggs
in total"). All other words leave the answer unread, because they may change it in any way ("plus one", "is wrong").
"""

from __future__ import annotations

import re

from qerl_pl.rewards.number_words import NUMBER_WORD, PART

# Symbols of the SI with their prefixes, and other symbols, codes of currencies and abbreviations.
_SYMBOL = re.compile(
    r"(?:[kMGTcdmnpu\u03bc]|\\mu ?)?(?:m|g|s|N|J|W|V|A|Hz|Pa|L|l|mol|eV|Wh)|[kMGT]?(?:cal|bps|bit)|[kKMGT]i?B|[KCFhd]"
    r"|in|ft|yd|mi|oz|lbs?|pt|qt|gal|hrs?|mins?|secs?|wks?|mos?|yrs?|mph|kph|kmh?|fps|rpm|rad|deg|ha|cc|psi|atm|bar|dB"
    r"|ppm|px|pts?|[ap]\.?m\.?|[AP]\.?M\.?|o'clock|USD|EUR|GBP|INR|JPY|CNY|RMB|CAD|AUD|CHF|Rs\.?"
)
# Names of units and plurals that do not end in "s"; regular plurals are known by their ending.
_NAME = re.compile(
    r"(?:kilo|centi|milli|deci|micro|nano|mega|giga|hecto)?(?:met(?:er|re)|gram(?:me)?|lit(?:er|re)|second|newton|joule"
    r"|watt|volt|amp(?:ere)?|ohm|pascal|byte|bit|calorie|hertz|mole)|minute|hour|day|week|month|year|decade|century"
    r"|inch|foot|feet|yard|mile|acre|hectare|ounce|pound|ton|tonne|gallon|pint|cup|degree|radian|celsius|fahrenheit"
    r"|kelvin|dollar|cent|euro|yen|yuan|won|rupee|penny|pence|unit|point|piece|way|solution|root|time|person|people"
    r"|children|men|women|teeth|mice|sheep|fish|deer",
    re.IGNORECASE,
)
_PLURAL = re.compile(r"(?!.*(?:ss|us|is)$)[a-z]{2,}s", re.IGNORECASE)
_POWER = re.compile(r"square|cubic|sq\.?|cu\.?", re.IGNORECASE)
_LINK = re.compile(r"per|an?|each|every|of|in|for")  # "per day", "a basket", "in total"
_AFTER_NAME = re.compile(
    rf"{_LINK.pattern}|at|on|from|to|with|over|old|long|wide|tall|high|deep|thick|away|apart|ago|left|remaining|total"
    r"|altogether|more|day|week|month|year|hour"
)
_ALONE = re.compile(r"in|total|altogether|left|more|remaining")
# Words that deny or change a number next to them, those that bound a number behind them, and verbs.
_DENIES = re.compile(
    r"not?|never|none|neither|nor|cannot|\w+n't|without|except|excluding|besides|but|unless|or|either|maybe|perhaps"
    r"|almost|nearly|than|least|most|wrong|incorrect|false|invalid|error|mistake|impossible|rather|instead|half|twice"
    r"|thrice|double|triple|plus|minus|divided|multiplied|squared|cubed|factorial|root|sqrt|log|ln|sin|cos|tan"
)
_BOUNDS = re.compile(r"times|over|under|above|below|beyond|between|exceed(?:s|ing)|within|before|after")
_VERBS = re.compile(
    r"is|are|was|were|be|been|am|ha[sd]|have|does|did?|do|will|would|can|could|should|may|might|must|equals?|fails"
    r"|misses|exceeds|th(?:is|at|ese|ose)|hi[st]|hers|its|theirs|as|if|and|so"
)


def names_unit(words: str) -> bool:
    """Tell whether the words directly behind a number only name its unit or what is counted, as in "km/h", "years old",
    "apples a day" or "in total"; an empty text does."""
    words = (
        re.sub(r"(?<=[A-Za-z])\s*\^\s*\{?\s*-?\d\s*\}?|(?<=[A-Za-z])[23]\b", "", words)
        .replace("/", " per ")
        .strip(" .,;:*\"'-")
    )
    tokens = re.findall(r"[^\s-]+", words)
    lower = [token.lower().rstrip(".,!") for token in tokens]
    if not tokens:
        return True
    if not all(re.fullmatch(r"[A-Za-z\u03bc\\][A-Za-z\u03bc.']*[,!]?", token) for token in tokens):
        return False
    if _any(_DENIES, lower) or _any(_VERBS, lower) or NUMBER_WORD.search(words) or PART.search(words):
        return False
    if _LINK.fullmatch(lower[0]) or _ALONE.fullmatch(lower[0]):
        return len(tokens) > 1 or _ALONE.fullmatch(lower[0]) is not None
    head = next((place for place, token in enumerate(tokens[:3]) if _is_name(token.rstrip(",!"))), None)
    if head is None or _any(_AFTER_NAME, lower[:head]):
        return False
    while head + 1 < len(tokens) and _is_name(tokens[head + 1]):  # "tennis balls", "N m"
        head += 1
    return head + 1 == len(tokens) or _AFTER_NAME.fullmatch(lower[head + 1]) is not None


def leads_to_number(words: str) -> bool:
    """Tell whether a text before a number, such as "The total is" or "She makes", presents the number as it is; "at
    least", "half of" and "anything except" do not."""
    clause = re.split(r"[.,;:!?]\s", words.lower().strip() + " ")
    last = next((part for part in reversed(clause) if part.strip()), "")
    tokens = re.findall(r"[a-z']+", last)
    if re.fullmatch(r"[A-Za-z\s'\",.:;*!?#]*", words) is None:
        return False
    return not (_any(_DENIES, tokens) or _any(_BOUNDS, tokens[-2:]) or tokens == ["up", "to"])


def denies(words: str) -> bool:
    """Tell whether some of the words deny or change a number next to them."""
    return _any(_DENIES, re.findall(r"[a-z']+", words.lower()))


def _any(pattern: re.Pattern[str], words: list[str]) -> bool:
    return any(map(pattern.fullmatch, words))


def _is_name(token: str) -> bool:
    """Tell whether a word is a unit or its power, or a plural."""
    known = any(pattern.fullmatch(token) for pattern in (_SYMBOL, _NAME, _PLURAL, _POWER))
    return known or _NAME.fullmatch(token.removesuffix("s")) is not None
