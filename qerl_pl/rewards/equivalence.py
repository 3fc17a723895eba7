"""Decide whether a completion's answer equals the known answer of the data set ("gold"): by exact rules first, then by
algebra. Only the worker processes of ``verifier.py`` may import this module, because algebra can hang or use unbounded
memory. An answer may have sides (of an equation), a name (x in ``x = 5``), or items (of a list, set, point or
interval)."""

import re
from itertools import pairwise
from typing import NamedTuple

from qerl_pl.rewards.algebra import (
    RELATION,
    Unreadable,
    equal_equations,
    equal_expressions,
    equal_relations,
    is_readable,
    is_rounded,
)
from qerl_pl.rewards.latex import SEPARATOR, join_thousands, letters, nesting, normalize, split_top, without_choice
from qerl_pl.rewards.numbers import Number, exact_number
from qerl_pl.rewards.quantities import in_one_unit, quantity
from qerl_pl.rewards.units import TABLE
from qerl_pl.rewards.verdict import Verdict

MAX_NESTING = 60  # largest depth of brackets and braces in an answer
# limit on the items of an unordered list that the two answers write differently, because n such items need up to n^2
# comparisons by algebra
MAX_ITEMS = 12
_SYMBOL = r"\\?[A-Za-z]+(?:\{[A-Za-z]+\})?(?:_(?:\{[\w+-]+\}|\w+))?(?:\^\{?-1\}?)?'*"
_NAME = rf"{_SYMBOL}(?:\s*\([A-Za-z, ]+\))?|\(\s*{_SYMBOL}(?:,\s*{_SYMBOL})+\s*\)"
_ASSIGNMENT = re.compile(rf"^(?P<name>{_NAME})\s*(?:=|\\in(?![A-Za-z]))\s*(?P<value>.+)$", re.S)
_HAS_VALUE = re.compile(r"\d|\\pi(?![A-Za-z])")
_LETTER, _COMMAND = re.compile("[A-Za-z]"), re.compile(r"\\[A-Za-z]+")
_IN_BASE = re.compile(r"^[0-9A-F]+_\{?\d+\}?$")
_BUILDER = re.compile(r"^\\\{\s*(?P<name>[a-z])\s*(?:\\in\s*\\mathbb\{R\}\s*)?[|:]\s*(?P<condition>.+?)\\\}$", re.S)
_FAMILY = re.compile(r"^\\\{(?P<member>[^|{}]+)\|\s*(?P<index>[a-z]\s*\\in\s*\\mathbb\{[ZN]\})\s*\\\}$")
_WORDS = re.compile(r"^[A-Za-z][A-Za-z' .-]*$")
_CHOICE = re.compile(r"^\(?([A-K])\)?$")
_CHOICES = re.compile(r"\(?[A-K]\)?(?:\s*(?:,|\band\b)\s*\(?[A-K]\)?)+")
_PICKED = re.compile(r"^(?:\((?P<inner>[A-Ka-k])\)|(?P<bare>[A-Ka-k])(?=[.):]|$))")
_OTHER_CHOICE = re.compile(r"(?:\b(?:or|and)\b|[,;/&])\s*\(?[A-Ka-k]\)?(?![A-Za-z])|(?<![A-Za-z])\([A-K]\)")
_YES_NO = re.compile(r"^(yes|no|true|false)(?=[,.;:!]|$)", re.IGNORECASE)
_POINT = re.compile(r"^(?:point )?(?:[A-Z]\s*)?(?=\()")
_NAMED_INTERVAL = re.compile(r"^[a-z]\s*(?=\[[^\[\]()]*,[^\[\]()]*[)\]]$|\([^\[\]()]*,[^\[\]()]*\]$)")  # t(0,4]
_CHAIN = re.compile(r"^(?P<names>(?:[a-z]\s*=\s*){2,})(?P<value>[^=]+)$")
_MODULUS = re.compile(r"\s*(?:\\[bp]?mod(?![A-Za-z])|\(\s*\\?mod\b)\s*\{?(?P<size>[^,;{})]*)[^,;]*$")
_CONDITION = re.compile(  # what makes an assertion one about other cases than those of the question
    r"\b(?:if|unless|except(?:ion)?|only|when(?:ever)?|while|provided|providing|assuming|suppos(?:e|ing)|given|but|though|although"
    r"|however|otherwise|sometimes|maybe|perhaps|or|for|as long as|in case|until)\b",
    re.IGNORECASE,
)
# Matches the start of a clause that can be the reason of an assertion: its subject.
_REASON = re.compile(
    r"\(?(?:it|its|they|the|this|these|that|those|there|he|she|we|you|all|both|every|each|an?|as|due|[A-Za-z])\b",
    re.IGNORECASE,
)
_OF_NUMBER = re.compile(r"\d\s*('+)(?!\w)")
_SIGNS = {"'": (TABLE["foot"], TABLE["minute"]), "''": (TABLE["inch"], TABLE["second"])}
_TIME = re.compile(r"\d [ap]m$", re.IGNORECASE)


class _Group(NamedTuple):
    brackets: str  # the enclosing pair, e.g. "[)"; empty for a bare list
    items: list[str]


def judge(gold: str, answer: str) -> Verdict:
    """Compare the marked answer of a completion with the known answer. The score is 1 if they are equal, 0 if not, and
    None if the known answer is empty or cannot be read."""
    known, given = normalize(gold, answer), normalize(answer, gold)
    if not known:
        return Verdict(None, f"the known answer {gold!r} is empty", "known_answer")
    values = in_one_unit(gold, answer)
    if values is None:
        return Verdict(0.0, f"{answer!r} measures something else than {gold!r}")
    if values != (gold, answer):
        known, given = normalize(*values), normalize(*values[::-1])
    if _marks(known) != _marks(given) and _ASSIGNMENT.match(given):
        return Verdict(0.0, f"{given!r} and {known!r} have other primes")
    if (signs := _OF_NUMBER.findall(given)) != _OF_NUMBER.findall(known):
        measured = quantity(gold)
        if measured is None or any(measured.unit not in _SIGNS.get(sign, ()) for sign in signs):
            return Verdict(0.0, f"{given!r} and {known!r} have other signs of minutes or feet")
    given = _case_as(known, given)
    if "\\ln" in known and "\\log" not in known:
        given = re.sub(r"\\log(?![A-Za-z]|\s*_)", r"\\ln", given)
    if nesting(known) > MAX_NESTING:
        return Verdict(None, f"the known answer nests more than {MAX_NESTING} brackets", "known_answer")
    if nesting(given) > MAX_NESTING:
        return Verdict(0.0, f"the answer nests more than {MAX_NESTING} brackets")
    try:
        right = bool(given) and any(_same_answer(known, reading) for reading in _readings(known, given))
    except Unreadable as error:
        return Verdict(None, str(error), "known_answer")
    return Verdict(float(right), f"{given!r} {'equals' if right else 'is not'} {known!r}")


def _readings(gold: str, answer: str) -> list[str]:
    """List the texts as which an answer may be read: ``3,5`` may also be 3.5 if the known answer is a single value."""
    if len(_group(gold).items) != 1:
        return [answer]
    grouped = re.fullmatch(r"-?(?:\d{1,2}(?:,\d\d)+,\d{3}|\d{1,3}(?:\.\d{3}){2,})", answer)  # 12,34,567 and 1.234.567
    if grouped:
        return [answer, re.sub("[,.]", "", answer)]
    decimal = re.fullmatch(r"(-?\d+),(\d{1,2}|\d{4,})", answer)
    mixed = re.fullmatch(r"(\d+)\s+and\s+((\d+)/(\d+)|\\frac\{(\d+)\}\{(\d+)\})", answer)
    if mixed and int(mixed[3] or mixed[5]) < int(mixed[4] or mixed[6]):
        return [answer, f"{mixed[1]}+{mixed[2]}"]
    return [answer, f"{decimal[1]}.{decimal[2]}"] if decimal else [answer]


def _case_as(gold: str, answer: str) -> str:
    """Give the letters in an answer's names (words of up to three letters) the case that they have in ``gold``, the
    known answer. A letter that either text has in both cases is left as it is, because x and X may then be different
    variables."""
    known, given = (
        {letter for run in re.findall(r"(?<![A-Za-z\\])[A-Za-z]{1,3}(?![A-Za-z])", side) for letter in run}
        for side in (gold, answer)
    )
    swapped = {letter for letter in given - known if letter.swapcase() in known and letter.swapcase() not in given}
    if not swapped or _CHOICE.match(gold):
        return answer
    table = str.maketrans({letter: letter.swapcase() for letter in swapped})
    return re.sub(
        r"\\[A-Za-z]+|[A-Za-z]+",
        lambda word: word[0] if len(word[0]) > 3 or word[0][0] == "\\" else word[0].translate(table),
        answer,
    )


def _marks(text: str) -> list[str]:
    """List the runs of primes on the left side of an equation, e.g. ``''`` of ``f''(x) = 2``, which algebra ignores."""
    return re.findall("'+", text.partition("=")[0]) if "=" in text else []


def judge_known(gold: str) -> Verdict:
    """Score a completion whose comparison with the known answer crashed or took too long: 0 if the known answer alone
    can be read, so that the completion's answer must be the cause, else None."""
    items = [item for item in _group(_bare_solutions(normalize(gold))).items if item]
    values = [_value_of(item.split("\\approx")[-1]) for item in items]
    if items and all(exact_number(value) or _is_text(value) or is_readable(value) for value in values):
        return Verdict(0.0, "the known answer can be read")
    return Verdict(None, f"the known answer {gold!r} cannot be read", "known_answer")


def _same_answer(gold: str, answer: str) -> bool:
    if letters(gold) == letters(answer):
        return True
    if not (_MODULUS.search(gold) and _MODULUS.search(answer)):  # the question may give the modulus
        gold, answer = (_without_modulus(side).replace("\\equiv", "=") for side in (gold, answer))
    if _CHOICES.fullmatch(gold) and re.search(r"\bor\b", answer):
        return False
    choice, picked = _CHOICE.match(gold), _PICKED.match(answer)
    if choice:
        return bool(
            picked
            and not _OTHER_CHOICE.search(answer, picked.end())
            and (picked["inner"] or picked["bare"]).upper() == choice[1]
        )
    if asserted := _YES_NO.match(gold):
        return _same_assertion(asserted, _YES_NO.match(answer))
    if _TIME.search(gold):
        return False
    answer = re.sub(r"(:\d\d) [ap]m$", r"\1", answer, flags=re.IGNORECASE)  # the known answer has no AM or PM
    gold, answer = _bare_solutions(gold), _bare_solutions(without_choice(answer))
    if gold.startswith("("):
        answer = _POINT.sub("", answer)
    if RELATION.search(gold + answer) and not (_is_text(gold) or _is_text(answer)):
        return equal_relations(gold, answer)
    # "48,384" may be two values, although its comma can be read as a thousands separator
    return _same_groups(_group(gold), _group(answer)) or (gold != answer and join_thousands(letters(gold)) == answer)


def _without_modulus(text: str) -> str:
    """Remove the modulus from ``3 \\pmod{5}``, but not from ``10 \\pmod{3}``, where 10 is no residue."""
    modulus = _MODULUS.search(text)
    value = exact_number(_MODULUS.sub("", text).split("\\equiv")[-1]) if modulus else None
    size = exact_number(modulus["size"]) if modulus else None
    return text if value and size and abs(value.value) >= size.value else _MODULUS.sub("", text)


def _same_assertion(known: re.Match[str], given: re.Match[str] | None) -> bool:
    """Return whether both answers begin with the same yes, no, true or false. In the completion's, a reason may follow,
    but neither another of these words, nor a number or formula other than the known answer's."""
    if given is None or known[1].lower() != given[1].lower():
        return False
    gold, answer = (match.string[match.end() :].strip(" ,.;:!") for match in (known, given))
    if re.search(r"\b(?:yes|no|true|false)\b", answer, re.IGNORECASE) or (_CONDITION.search(answer) and not gold):
        return False
    if not gold:
        return not answer or _REASON.match(answer) is not None
    return not re.search(r"\d|\\", gold) or (bool(answer) and _same_answer(gold, answer))


def _bare_solutions(text: str) -> str:
    """Reduce an answer to its values: drop set builder notation, names of points, ``k \\in \\mathbb{Z}`` and such."""
    text = _NAMED_INTERVAL.sub("", text)
    builder, family = _BUILDER.match(text), _FAMILY.match(text)
    text = builder["condition"] if builder else family["member"] if family else text
    text = re.sub(r"^[^:]*(?:<|>|\\leq|\\geq)[^:]*:\s*(?=[(\[])", "", text)  # an inequality and its interval
    text = re.sub(r"[,;]?\s*\(?\s*[a-z]\s*\\in\s*\\mathbb\{[ZN]\}(?:\^\+)?\s*\)?$", "", text).strip()
    point, chain = _ASSIGNMENT.match(text), _CHAIN.match(text)
    if point and point["name"].startswith("("):
        text = point["value"]
    elif chain:  # x = y = 1 becomes x = 1, y = 1
        text = ", ".join(f"{name} = {chain['value']}" for name in re.findall("[a-z]", chain["names"]))
    return "(-\\infty,\\infty)" if text in ("\\mathbb{R}", "all real numbers") else text


def _group(text: str) -> _Group:
    """Split ``(1,2)``, ``\\{1,2\\}``, a column vector or ``1, 2`` into its brackets, perhaps empty, and its items."""
    vector = re.match(r"^\\begin\{pmatrix\}([^&]*)\\end\{pmatrix\}$", text, re.S)
    if vector and "\\\\" in vector[1]:
        return _Group("()", [item.strip() for item in re.split(r"\\\\", vector[1].strip().removesuffix("\\\\"))])
    in_braces = text.startswith("\\{") and text.endswith("\\}") and "\\emptyset" not in text
    if in_braces and len(split_top(text, SEPARATOR)) == 1:
        return _Group("{}", list(dict.fromkeys(_values(text[2:-2]))))
    if text[:1] in "([" and text[-1:] in ")]" and len(text) > 2:
        items = split_top(text[1:-1], ",|;")
        if len(items) > 1 and _balanced(text[1:-1]):
            return _Group(text[0] + text[-1], items)
    ratio = split_top(text, ":") if len(split_top(text, "=")) == 1 else []
    return _Group("::", ratio) if len(ratio) > 2 else _Group("", _values(text))


def _values(text: str) -> list[str]:
    """Split an answer that is a list without brackets into its values; ``1 \\pm 2`` counts as two values."""
    values = []
    for item in filter(None, split_top(text, SEPARATOR)):
        if "\\pm" in item:
            values += [item.replace("\\pm", upper).replace("\\mp", lower).strip(" +") for upper, lower in ("+-", "-+")]
        else:
            values.append(item)
    return values


def _balanced(text: str) -> bool:
    depth = 0
    for char in re.findall(r"[()\[\]]", text):
        depth += 1 if char in "([" else -1
        if depth < 0:
            return False
    return depth == 0


def _same_groups(gold: _Group, answer: _Group) -> bool:
    if len(gold.items) != len(answer.items):
        if len(gold.items) == 1 and not gold.brackets + answer.brackets:  # "3/2 or 1.5" gives one value in two forms
            return bool(answer.items) and all(_same_value(gold.items[0], item) for item in answer.items)
        known, given = (_ASSIGNMENT.match(side.items[0]) if len(side.items) == 1 else None for side in (gold, answer))
        return bool(known or given) and _same_groups(
            _group(known["value"]) if known else gold, _group(given["value"]) if given else answer
        )
    if not gold.items:
        return False
    if len(gold.items) == 1 and gold.brackets == answer.brackets == "":
        return _same_value(gold.items[0], answer.items[0])
    ordered = gold.brackets not in ("", "{}") and len(gold.items) > 1
    if gold.brackets == "()" and not answer.brackets:
        answer = _by_name(answer)
    elif answer.brackets == "()" and not gold.brackets and all(map(_ASSIGNMENT.match, gold.items)):
        gold, ordered = _by_name(gold), True
    elif len(gold.items) > 1 and not _compatible(gold, answer):
        return False
    names = {match["name"] for match in map(_ASSIGNMENT.match, gold.items) if match}
    if len(names) > 1 and not any(map(_ASSIGNMENT.match, answer.items)):
        ordered = True  # "a = 1, b = 2" is not "2, 1"
    if gold.brackets == answer.brackets == "::":
        known, given = ([f"{item}/({group.items[0]})" for item in group.items] for group in (gold, answer))
        return all(map(_same_value, known, given))
    if all(_same_groups(_group(known), _group(given)) for known, given in zip(gold.items, answer.items, strict=True)):
        return True
    return not ordered and len(gold.items) > 1 and _same_unordered(gold.items, answer.items)


def _compatible(gold: _Group, answer: _Group) -> bool:
    if gold.brackets == answer.brackets or {gold.brackets, answer.brackets} == {"", "{}"}:
        return True
    # (1,2,3), <1,2,3> and [1,2,3] are the same vector; with two entries they may be different intervals
    return len(gold.items) > 2 and {gold.brackets, answer.brackets} == {"()", "[]"}


def _by_name(group: _Group) -> _Group:
    """Turn assignments such as ``y=2, x=1`` into values in the order of names, as in (x, y); any other list stays."""
    named = [match for match in map(_ASSIGNMENT.match, group.items) if match]
    if len(named) < len(group.items):
        return group
    return _Group("", [value for _, value in sorted((match["name"], match["value"]) for match in named)])


def _same_unordered(gold: list[str], answer: list[str]) -> bool:
    left, unlike = list(answer), []
    for known in gold:
        match = next((given for given in left if letters(given) == letters(known)), None)
        if match is None:
            unlike.append(known)
        else:
            left.remove(match)
    if len(unlike) > MAX_ITEMS:
        return False
    for known in unlike:
        match = next((given for given in left if _same_groups(_group(known), _group(given))), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _same_value(gold: str, answer: str) -> bool:
    """Tell whether two values are equal: numbers exactly, words as text, other values by algebra."""
    if letters(gold) == letters(answer):
        return True
    if "\\approx" in gold + answer:
        return _same_approximation(gold, answer)
    gold, answer = _sides(gold, answer)
    if re.search(r"\d_", answer) and not re.search(r"\d_", gold):
        return False  # digits in another base
    known, given = exact_number(gold), exact_number(answer)
    if isinstance(known, Number) and isinstance(given, Number):
        return known.equals(given, sign_may_miss=known.percent)
    if letters(gold) == letters(answer):
        return True
    if _IN_BASE.match(gold) and _IN_BASE.match(answer):
        return False  # math-verify ignores the base
    if _is_text(gold) or _is_text(answer):
        return _words(gold) == _words(answer) or _same_factors(gold, answer)
    if _other_names(gold, answer):
        return False
    known_sides, given_sides = split_top(gold, "="), split_top(answer, "=")
    if len(known_sides) > 1 and len(given_sides) > 1:
        value = _value_of(gold)
        if value != gold and not _ASSIGNMENT.match(gold):
            same_name = letters(known_sides[0]) == letters(given_sides[0])
            return same_name and _same_value(value, _last_side(given_sides[1:]))
        return equal_equations(known_sides, given_sides)
    return equal_expressions(gold, answer)


def _sides(gold: str, answer: str) -> tuple[str, str]:
    """Remove the names from two answers such as ``x = 5`` if only one of the two has a name, or both name the same
    quantity."""
    known, given = _ASSIGNMENT.match(gold), _ASSIGNMENT.match(answer)
    if known and given:
        names = [letters(match["name"]).lower() for match in (known, given)]
        if names[0] == names[1] or _renamed(names, given):
            return split_top(known["value"], "=")[-1], _last_side(split_top(given["value"], "="))
        return gold, answer
    sides = split_top(answer, "=")
    if len(sides) == 1:
        return _value_of(gold), answer
    if len(split_top(gold, "=")) == 1:
        *first, last = sides
        reversed_assignment = re.fullmatch(r"\s*[A-Za-z]\s*", last) and not re.fullmatch(r"[A-Za-z]", gold)
        return gold, ("=".join(first).strip() if reversed_assignment else _last_side(sides))
    return gold, answer


def _value_of(gold: str) -> str:
    """Return the value in a known answer with a name or derivation, such as ``|AB| = 5`` or ``i^6 = ... = -1``."""
    sides = split_top(gold, "=")
    name = re.sub(r"\([^()]*\)|\[[^\[\]]*\]|\{[^{}]*\}", "", sides[0])
    named = re.match(r"[^\d+*/^-]*[A-Za-z][^+*/^-]*$", name) or not _LETTER.search(_COMMAND.sub("", sides[0]))
    return sides[-1] if len(sides) > 2 or (len(sides) == 2 and named) else gold


def _renamed(names: list[str], given: re.Match[str]) -> bool:
    """Tell whether the left sides of two answers, ``names``, may denote the same quantity: y may stand for f(x), but c
    may not stand for ``\\sin(x)``, because a LaTeX command already has a meaning. Returns False if ``given``, the
    completion's answer, only says that a name equals itself, as in ``y = y``."""
    functions = [name for name in names if "(" in name]
    says_nothing = letters(given["value"]).lower() == names[1]
    return len(functions) == 1 and not functions[0].startswith("\\") and not says_nothing


def _same_approximation(gold: str, answer: str) -> bool:
    """Compare two answers of which at least one is an approximation such as ``1/3 \\approx 0.333``. False if the sides
    of the completion's answer do not agree up to rounding, because it then states two different answers. Otherwise,
    tell whether one of its sides equals a side of the known answer. A first side of the known answer that has decimals
    does not count, because it is the term that the problem asks to compute, as in ``\\sqrt{0.5} \\approx 0.71``."""
    known, given = ([split_top(part, "=")[-1] for part in side.split("\\approx")] for side in (gold, answer))
    known, given = (
        parts[1:] if len(parts) > 1 and not _HAS_VALUE.search(parts[0]) else parts for parts in (known, given)
    )
    if not all(is_rounded(left, right) for left, right in pairwise(given)):
        return False
    accepted = known[1:] if len(known) > 1 and "." in known[0] else known
    return any(_same_value(value, other) for value in accepted for other in given)


def _last_side(sides: list[str]) -> str:
    """Return the last of an answer's sides, as 42 in ``6*7=42``, which is the value that it states. If another side is
    a different number, the equation is false and the empty string is returned."""
    *others, last = sides
    numbers = [side for side in others if _HAS_VALUE.search(side) and not _LETTER.search(_COMMAND.sub("", side))]
    if _LETTER.search(_COMMAND.sub("", last)):
        return last
    return last if all(_same_value(side, last) for side in numbers) else ""


def _other_names(gold: str, answer: str) -> bool:
    """Tell whether two answers have different names that math-verify takes for equal: ``AB`` and ``BA``, or ``A1`` and
    ``1A``, as products, and ``A``, ``A'`` and ``A^T``, of which it drops the prime and the T."""
    plain = [re.sub(r"(?<=[A-Z])\s*(?:\\cdot|\*)?\s*(?=[A-Z])", "", _COMMAND.sub(" ", side)) for side in (gold, answer)]
    names = [set(re.findall(r"[A-Z][A-Z\d]+|\d[A-Z]", side)) for side in plain]
    if any(sorted(one) == sorted(other) for one in names[0] - names[1] for other in names[1] - names[0]):
        return True
    if "=" not in gold + answer and len({tuple(sorted(re.findall("[A-Za-z]'+", side))) for side in plain}) == 2:
        return True  # A'B and AB are different, but math-verify ignores primes
    return len({tuple(sorted(re.findall(r"[A-Z](?=\^\{?T(?![A-Za-z]))", side))) for side in plain}) == 2


def _same_factors(gold: str, answer: str) -> bool:
    """Tell whether an answer such as ``m g h`` is the product of the letters of the known answer ``mgh``."""
    product = re.fullmatch(r"[A-Za-z](?:(?:\s|\\cdot|\*)+[A-Za-z])+", answer)
    factors = re.findall("[A-Za-z]", _COMMAND.sub("", answer))
    return product is not None and sorted(factors) == sorted(gold) and not _other_names(gold, answer)


def _is_text(text: str) -> bool:
    """Tell whether a text has a word, and not only products of one-letter variables: four letters in a row count as a
    word and, in a text without digits and symbols, three. Returns True for "cat", False for "ab" and "2ab"."""
    least = 3 if _WORDS.match(text) else 4
    return re.search(rf"(?<![\\A-Za-z{{])[A-Za-z]{{{least},}}", text) is not None


def _words(text: str) -> list[str]:
    """Split a text into words, without articles and plural endings."""
    words = re.findall(r"\w+|[^\w\s.,;:'-]", text.lower())
    return [word.rstrip("s") or word for word in words if word not in ("a", "an", "the")]
