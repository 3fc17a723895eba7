"""Find the marked answer in a completion's text, e.g. between ``<answer>`` tags or in ``\\boxed{}``, in linear time."""

import re
from collections.abc import Sequence
from typing import Literal

from qerl_pl.rewards.context import in_context, is_denied, is_withdrawn, stated_anew
from qerl_pl.rewards.number_words import NUMBER_WORD
from qerl_pl.rewards.numbers import MAX_ANSWER, parse_number

Marker = Literal["answer", "boxed", "hash", "line", "any"]

_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_HASH = re.compile(r"(?<!#)####(?!#)[ \t]*(?=\S)")
# "####" before a word with a capital letter, or before the number of a list item ("#### Step 2", "#### 3. Total"), is a
# Markdown heading, unless it is followed by an answer: one letter from A to K (multiple choice), an amount with its
# currency, or "the answer is".
_NO_HEADING = re.compile(
    r"\(?[A-K]\)?[ \t.*_]*(?:\n|\Z)|(?:USD?|EUR|GBP|INR|CHF|JPY|CNY|Rs)\b\.?[ $]*\d"
    r"|(?i:(?:the )?(?:final )?answer\b[^\n]{0,40}?\bis\b)"
)
_HEADING = re.compile(r"[A-Z]|\d+[.):][ \t]")
_LINE = re.compile(r"answer\s*\**\s*:[\s*]*([^\n]+)", re.IGNORECASE)
_LINE_WINDOW = 300  # characters at the end of a completion
_BARE_BOX = re.compile(r"\\boxed\s+([^\s$\\{}]+)")
# Matches the text between two ``\boxed`` that together are one answer with several values: "$ and $", " or $x = ".
_BLANK = r"(?:[\s$()\[\]]|\\(?:q?quad(?![A-Za-z])|[,;: ()\[\]]))*"
_WORD = r"(?:and|or)\b|\\(?:text|mbox|mathrm)\s*\{\s*(?:and|or)\s*\}"
_CONNECTOR = re.compile(rf"{_BLANK}(?:,|;|{_WORD}){_BLANK}(?:{_WORD})?{_BLANK}(?:[a-z]\s*=\s*)?")
_MAX_CONNECTOR = 50  # characters
# Matches text such as "or maybe", or no text, between two boxes; the completion then has not chosen one of them.
_BETWEEN_BOXES = re.compile(
    rf"{_CONNECTOR.pattern}|[^.\n]*\b(?:or|if|when|maybe|perhaps|to)\b[^.\n]*|[\s.;$]*Case \w+\b[^.\n]*|[ \t$]*",
    re.IGNORECASE,
)
# Matches text that a reader of the rendered answer does not see (comments, \phantom) or sees crossed out.
_HIDDEN = (
    r"\\(?:[hv]?phantom|[bx]?cancel|sout|st|xout|hide|comment"
    r"|colorbox\s*\{\s*black\s*\}\s*|scalebox\s*\{\s*0[.0]*\s*\}|resizebox\s*\{\s*0[^{}]*\}\s*\{[^{}]*\}"
    r"|texttransparent\s*\{\s*0[.0]*\s*\}|textcolor\s*(?:\{\s*white|\[rgb\]\s*\{\s*1\s*,\s*1\s*,\s*1)\s*\})\s*\{"
)
_REMOVED = (
    r"~~[^~\n]*~~|<!--(?:(?!<!--)(?s:.))*?-->|<(?P<tag>s|del|strike)>[^<]*</(?P=tag)>"
    r"|\\begin\{comment\}(?:(?!\\begin\{comment)(?s:.))*?\\end\{comment\}|\\iffalse\b(?:(?!\\iffalse)(?s:.))*?\\fi\b"
    r"|<(?P<element>\w+)[^<>]{0,200}?(?:\bhidden\b|display\s*:\s*none)[^<>]{0,200}>[^<]*</(?P=element)>"
    r"|\\(?:color\s*\{\s*white|fontsize\s*\{\s*0[^{}]*\}\s*\{[^{}]*|transparent\s*\{\s*0[.0]*)\s*\}[^{}]*(?:\{[^{}]*\})?"
)
_COMMENT = r"(?m:^)[ \t]*%[^\n]*|(?<![\\\d}$])(?<![\d}$] )%(?=[^\n]{0,40}\\boxed)[^\n]*"
# Every alternative of the first pattern begins with a plain character, by which Python finds matches ten times as fast.
_HAS_UNSEEN = re.compile(rf"{_HIDDEN}|{_REMOVED}"), re.compile(_COMMENT)
_UNSEEN = re.compile(rf"(?P<open>{_HIDDEN})|(?P<gone>{_REMOVED}|{_COMMENT})|(?P<brace>\\.|[{{}}])")
_BRACE = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{|\\.|[{}]", re.DOTALL)


def marked_answer(text: str, marker: Marker) -> str | None:
    """Return the last marked answer in ``text``; None if there is none.

    The marker ``answer`` means ``<answer>...</answer>``, ``boxed`` means ``\\boxed{...}``, ``hash`` the rest of the
    line after ``####``, and ``line`` the rest of the line after ``Answer:`` near the end. ``any`` takes the text in
    ``<answer>`` tags if there is one, so that a box elsewhere does not override it; else the last box; else the rest of
    the line after the last ``####``. A tag or box that is not closed does not count, because the completion was cut off
    there; earlier ones count.
    """
    if marker == "any":
        tagged, boxed = last_tagged(text), last_boxed(text)
        hashed = last_hash(text)
        return tagged if tagged is not None else boxed or (boxed if hashed is None else hashed)
    return {"answer": last_tagged, "boxed": last_boxed, "hash": last_hash, "line": last_line}[marker](text)


def last_tagged(text: str) -> str | None:
    """Return the text between the last ``</answer>`` and the nearest ``<answer>`` before it; None if there is none."""
    start, answer = None, None
    for tag in _TAG.finditer(text):
        if not tag.group(1):
            start = tag.end()
        elif start is not None:
            start, answer = None, text[start : tag.start()].strip()
    return answer


def last_boxed(text: str) -> str | None:
    """Return the content of the last closed ``\\boxed{...}``, of nested boxes the outermost; None if there is none. If
    the last boxes are separated only by ``,``, ``and`` or ``or``, they are returned as one answer with several values.

    A box does not count if the text around it denies it ("The answer is not ...") or makes it a bound or a part of a
    calculation; if no box counts, the result is the empty string. A box in a formula of another value, such as
    ``-\\boxed{5}``, is returned with the formula, and one before a unit with the unit (see ``context.py``).
    """
    opened: list[tuple[int, int] | None] = []  # start of a ``\boxed`` and of its content; None for an ordinary brace
    boxes: list[tuple[int, int, str]] = []  # start, end, content
    for token in _BRACE.finditer(text) if "box" in text and re.search(r"\\(?:f|frame)?box", text) else ():
        if token.group().endswith("{") and len(token.group()) > 2:
            opened.append((token.start(), token.end()))
        elif token.group() == "{":
            opened.append(None)
        elif token.group() == "}" and opened:
            box = opened.pop()
            if box is not None:
                boxes = [inner for inner in boxes[-8:] if inner[0] < box[0]]
                boxes.append((box[0], token.end(), text[box[1] : token.start()].strip()))
    if boxes and (number := stated_anew(text, *boxes[-1][1:])):
        return number
    asserted = [(*box[:2], in_context(text, *box)) for box in boxes if not is_denied(text, *box)]
    if boxes:
        return joined(text, asserted, _BETWEEN_BOXES) if asserted else ""
    bare = _BARE_BOX.findall(text)
    return bare[-1] if bare else None


def seen(text: str) -> str:
    """Remove from a text what a reader does not see when it is rendered, such as comments and ``\\phantom{5}``, or sees
    crossed out, such as ``\\cancel{5}`` and ``~~5~~``."""
    by_character, comment = _HAS_UNSEEN
    if not by_character.search(text) and not ("%" in text and comment.search(text)):
        return text
    kept, opened, start, hidden = [], [], 0, 0
    for token in _UNSEEN.finditer(text):
        if token["open"] or token["brace"] == "{":
            opened.append(token["open"] is not None)
            if token["open"]:
                if not hidden:
                    kept.append(text[start : token.start()])
                hidden += 1
        elif token["brace"] == "}" and opened:
            if opened.pop():
                hidden -= 1
                start = token.end()
        elif token["gone"] and not hidden:
            kept.append(text[start : token.start()])
            start = token.end()
    return "".join([*kept, "" if hidden else text[start:]])


def joined(text: str, spans: Sequence[tuple[int, int, str]], connector: re.Pattern[str] = _CONNECTOR) -> str:
    """Join by commas, without repetitions, the contents of the last of ``spans`` (start, end, content) and of those
    before it, as long as only a ``connector`` stands between neighbours."""
    values = [spans[-1][2]]
    for before, after in zip(reversed(spans[:-1]), reversed(spans), strict=False):
        between = text[before[1] : after[0]]
        if len(between) > _MAX_CONNECTOR or not connector.fullmatch(between):
            break
        values.insert(0, before[2])
    return ", ".join(dict.fromkeys(values))


def last_hash(text: str) -> str | None:
    """Return the rest of the line after the last ``####`` that does not start a Markdown heading, or None."""
    answer, end = None, 0
    for mark in _HASH.finditer(text):
        start = mark.end()
        if start >= end and not _is_heading(text[start : start + MAX_ANSWER].partition("\n")[0]):
            end = text.find("\n", start)
            end = len(text) if end < 0 else end
            answer = text[start:end].strip()
    if answer and (number := stated_anew(text, end, answer)):
        return number
    return "" if answer and is_withdrawn("", text[end:], answer) else answer


def _is_heading(line: str) -> bool:
    words = line.lstrip("*_")
    if NUMBER_WORD.match(words) and not re.search(r"\d", words):  # "Ten apples" is an answer, "One more step" is none
        return parse_number(words) is None
    return _HEADING.match(words) is not None and not _NO_HEADING.match(words)


def last_line(text: str) -> str | None:
    """Return the rest of the line after the last ``Answer:`` in the last 300 characters of a text; None if there is
    none. This is the rule of DAPO's release (arXiv 2503.14476; ``math_dapo`` in verl)."""
    answers = _LINE.findall(text[-_LINE_WINDOW:])
    return answers[-1].strip() if answers else None
