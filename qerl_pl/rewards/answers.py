"""Where the answer stands in a completion. Plain text in, plain text out; time linear in the text."""

from __future__ import annotations

import re
from typing import Literal

Marker = Literal["answer", "boxed", "hash", "any"]

_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
# A line of hashes that goes on with a word or an ordinal ("#### Step 2", "#### 3. Total") is a Markdown heading.
_HASH = re.compile(r"(?<!#)####(?!#)[ \t]*(?![*_]*(?:[A-Za-z]|\d+[.):][ \t]))(\S[^\n]*)")
_BRACE = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{|\\.|[{}]", re.DOTALL)


def marked_answer(text: str, marker: Marker) -> str | None:
    """The last answer that is marked in ``text``, or None.

    ``answer`` is ``<answer>...</answer>``, ``boxed`` is ``\\boxed{...}``, ``hash`` is the rest of a line after
    ``####``. ``any`` takes a tagged answer if there is one, so that a box elsewhere does not override it, else the
    last box, else the last hash line. A span that is not closed is not an answer: the completion was cut off.
    """
    if marker == "any":
        found = (marked_answer(text, each) for each in ("answer", "boxed", "hash"))
        return next((answer for answer in found if answer is not None), None)
    return {"answer": last_tagged, "boxed": last_boxed, "hash": last_hash}[marker](text)


def last_tagged(text: str) -> str | None:
    """Between the last ``</answer>`` and the ``<answer>`` nearest before it."""
    start, answer = None, None
    for tag in _TAG.finditer(text):
        if not tag.group(1):
            start = tag.end()
        elif start is not None:
            start, answer = None, text[start : tag.start()].strip()
    return answer


def last_boxed(text: str) -> str | None:
    """Inside the last ``\\boxed{...}`` that is closed; of nested boxes the outermost."""
    opened: list[int | None] = []  # where a box's content starts; None for an ordinary brace
    answer = None
    for token in _BRACE.finditer(text):
        if token.group().endswith("{") and len(token.group()) > 2:
            opened.append(token.end())
        elif token.group() == "{":
            opened.append(None)
        elif token.group() == "}" and opened:
            start = opened.pop()
            if start is not None:
                answer = text[start : token.start()].strip()
    return answer


def last_hash(text: str) -> str | None:
    """The rest of the line after the last ``####`` that is not a heading."""
    found = _HASH.findall(text)
    return found[-1].strip() if found else None
