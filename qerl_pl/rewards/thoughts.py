"""Find the marks that models put around their thoughts, in linear time.

Families mark them differently: ``<think>`` (DeepSeek-R1, Qwen3, Olmo 3), ``[THINK]`` (Ministral 3, Magistral),
``<|channel>thought`` and ``<channel|>`` (Gemma 4), ``<|channel|>analysis<|message|>`` (Harmony), ``<seed:think>``,
``<|START_THINKING|>``, ``<|begin_of_thought|>``. The common principle is a word for thinking in brackets, and a slash,
or a word for the end, in the mark that closes. Letters may be of either case, with blanks inside the brackets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

OPEN, CLOSE = "<think>", "</think>"
"""The form to which ``in_one_form`` translates all marks."""
_WORD = r"(?P<{0}>(?:\w{{1,20}}:)?(?:think(?:ing)?|thoughts?|reason(?:ing)?))"
_BEGIN, _END = r"(?:begin|start)", r"(?:end|stop)"
_OF = r"[_\u2581](?:of[_\u2581])?"
_BAR = r"[|\uff5c]"
_SPELT = rf"<\s*(?P<spelt_end>/?)\s*{_WORD.format('spelt')}\s*>"
_TOKENS = (
    r"\[\s*(?P<square_end>/?)\s*(?P<square>think(?:ing)?)\s*\]",
    rf"\u25c1\s*(?P<triangle_end>/?)\s*{_WORD.format('triangle')}\s*\u25b7",
    rf"<{_BAR}(?:(?P<bar_end>/|{_END}{_OF})|{_BEGIN}{_OF})?{_WORD.format('bar')}"
    rf"(?:(?P<bar_end_after>[_\u2581]{_END})|[_\u2581]{_BEGIN})?{_BAR}>",
    r"<\|channel>[ \t]*(?P<channel>thoughts?|thinking|analysis)\b\n?|(?P<channel_end><channel\|>)",
    r"<\|channel\|>(?P<harmony>analysis|commentary)[^<>]{0,80}<\|message\|>"
    r"|(?P<harmony_end>(?:<\|end\|>)?\s{0,4}(?:<\|start\|>assistant)?<\|channel\|>final[^<>]{0,80}<\|message\|>)",
)
_MARK = re.compile("|".join((_SPELT, *_TOKENS)), re.IGNORECASE)
_THINK = r"(?-i:<(?P<spelt_end>/?)(?:seed:)?(?P<spelt>think)>)"
_THINK_OR_TOKEN = re.compile("|".join((_THINK, *_TOKENS)), re.IGNORECASE)
_LONGEST = 200  # characters of a mark, and of the white space after it


class Thoughts(NamedTuple):
    """Position of the thoughts in a text."""

    end: int
    """Position after the last mark that closes thoughts; 0 if there is none."""
    are_open: bool
    """Whether the text ends within thoughts."""


def thoughts_of(text: str) -> Thoughts:
    """Find the end of a text's thoughts. A mark of another kind within thoughts does not count."""
    end, are_open = 0, False
    for mark, said in _marks(text, _MARK):
        are_open = said == OPEN or (are_open and said != CLOSE)
        end = mark.end() if said == CLOSE else end
    return Thoughts(end, are_open)


def in_one_form(text: str) -> str:
    """Write the marks that are tokens of some family, such as ``[THINK]``, as ``<think>`` and ``</think>``, and leave
    out marks of another kind within thoughts. Tags that models write as ordinary text, such as ``<reasoning>``, stay as
    they are, because a reward may ask for them."""
    pieces, last = [], 0
    for mark, said in _marks(text, _THINK_OR_TOKEN):
        pieces += [text[last : mark.start()], said]
        last = mark.end()
    return "".join([*pieces, text[last:]])


def opening_at_the_end(text: str) -> str:
    """Return the mark at the end of a text, white space after it included, that opens thoughts; empty if the text ends
    otherwise."""
    tail = text[-_LONGEST:]
    marks = [mark for mark, said in _marks(tail, _MARK) if said == OPEN]
    return tail[marks[-1].start() :] if marks and not tail[marks[-1].end() :].strip() else ""


def _marks(text: str, pattern: re.Pattern[str]) -> Iterator[tuple[re.Match[str], str]]:
    """Yield the marks in a text, each with ``OPEN``, ``CLOSE``, or an empty text if it is of another kind than the mark
    that opened the thoughts around it."""
    opened = None
    for mark in pattern.finditer(text):
        closes = any(mark[group] for group in _ENDS)
        words = (f"{group} {mark[group].lower()}" for group in _WORDS if mark[group])
        kind = next(words, str(mark.lastgroup).removesuffix("_end"))
        if opened not in (None, kind):
            yield mark, ""
        else:
            opened = None if closes else kind
            yield mark, CLOSE if closes else OPEN


_ENDS = tuple(name for name in _MARK.groupindex if "_end" in name)
_WORDS = tuple(name for name in _MARK.groupindex if "_end" not in name and name not in ("channel", "harmony"))
