"""Find the tags that models write around their thoughts (the reasoning before the answer), here called marks, in time
linear in the length of the text.

Model families use different tags: ``<think>`` (DeepSeek-R1, Qwen3, Olmo 3), ``[THINK]`` (Ministral 3, Magistral),
``<|channel>thought`` and ``<channel|>`` (Gemma 4), ``<unused94>thought`` (MedGemma), ``<|channel|>analysis<|message|>``
(Harmony), ``<seed:think>``, ``<|START_THINKING|>``, ``<|begin_of_thought|>``, or a separate turn, as
``<|start_of_role|>thinking<|end_of_role|>``. What these have in common is a word for thinking in brackets or as a role,
and in the closing tag a slash or a word for the end. Letters may be upper or lower case, and blanks may be inside the
brackets.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from qerl_pl.common.types import Completion, Prompt

OPEN, CLOSE = "<think>", "</think>"  # ``in_one_form`` translates all marks to these two
_THINKING = r"(?:think(?:ing)?|thoughts?|reason(?:ing)?)"
_TAGS = r"(?:working_out|scratch_?pad|reflection|analysis|(?:inner_)?monologue)"
_BEGIN, _END = r"(?:begin|start)", r"(?:end|stop)"
_OF = r"[_\u2581](?:of[_\u2581])?"
_BAR = r"[|\uff5c]"


def _inside(kind: str, word: str) -> str:
    """Return a regex for the text between the brackets of a mark. ``kind`` names the kind of brackets, and ``word`` is
    a regex for the word for thinking, which the group KIND matches. The groups KIND_end and KIND_end_after match only
    in closing tags."""
    return (
        rf"\s{{0,8}}(?:(?P<{kind}_end>/|{_END}{_OF})|{_BEGIN}{_OF})?\s{{0,8}}(?!no_)(?P<{kind}>{word})"
        rf"(?:(?P<{kind}_end_after>[_\u2581]{_END})|[_\u2581]{_BEGIN})?\s{{0,8}}"
    )


_NAMED = rf"(?:(?:\w{{1,20}}[:_])?{_THINKING}(?:_(?:process|content|trace))?)"
_SPELT = rf"<{_inside('spelt', f'{_NAMED}|{_TAGS}')}(?:(?<=\s)\w{{1,20}}\s*=[^<>]{{0,80}})?>"
_HEADER = r"(?:<\|im_start\|>|<\|start_header_id\|>|<\|start_of_role\|>|<start_of_turn>|<\|turn>)[ \t]*"
_HEADER_END = r"[ \t]*(?:(?:<\|end_header_id\|>|<\|end_of_role\|>)\n{0,2}|\n)"
_TOKENS = (
    rf"\[{_inside('square', 'think(?:ing)?')}\]",
    rf"\u25c1{_inside('triangle', _NAMED)}\u25b7",
    rf"<{_BAR}{_inside('bar', _NAMED)}{_BAR}>|<(?P<slash_end>/){_BAR}(?P<slash>{_NAMED}){_BAR}>",
    r"<\|channel>[ \t]*(?P<channel>thoughts?|thinking|analysis)\b\n?|(?P<channel_end><channel\|>)",
    r"<unused\d{1,4}>[ \t]*(?P<unused>thoughts?|thinking)\b\n?|(?P<unused_end><unused\d{1,4}>)",
    rf"{_HEADER}(?:\w{{1,20}}/)?(?P<role>{_THINKING}){_HEADER_END}"
    rf"|(?P<role_end>{_HEADER}(?:assistant|model|answer|final|response){_HEADER_END})",
    r"<\|channel\|>(?P<harmony>analysis|commentary)[^<>]{0,80}<\|message\|>"
    r"|(?P<harmony_end>(?:<\|end\|>\s{0,4})?(?:<\|start\|>assistant)?<\|channel\|>final[^<>]{0,80}<\|message\|>)",
)
_MARK = re.compile("|".join((_SPELT, *_TOKENS)), re.IGNORECASE)
_THINK = r"(?-i:<(?P<spelt_end>/?)(?:seed:)?(?P<spelt>think)>)"
_THINK_OR_TOKEN = re.compile("|".join((_THINK, *_TOKENS)), re.IGNORECASE)
_BRACKET = re.compile(r"[<\[\u25c1](?=[\s/\w|\uff5c])")  # the first character of a tag, which can be searched for fast
_NUM_KEPT = 1024  # number of texts whose results are cached, because every reward asks for them
_LONGEST = 200  # limit on the characters of a tag together with the white space after it


class Thoughts(NamedTuple):
    """Position at which the thoughts of a completion end, and whether the text ends within thoughts."""

    end: int
    """Position after the last mark that closes thoughts; 0 if there is none."""
    are_open: bool
    """Whether the text ends within thoughts."""


@lru_cache(_NUM_KEPT)
def thoughts_of(text: str) -> Thoughts:
    """Find the end of a text's thoughts. While thoughts are open, only a tag of the family that opened them counts."""
    end, are_open = 0, False
    for mark, meaning in _marks(text, _MARK):
        are_open = meaning == OPEN or (are_open and meaning != CLOSE)
        end = mark.end() if meaning == CLOSE else end
    return Thoughts(end, are_open)


def is_mark(text: str) -> bool:
    """Return whether a text is exactly one tag that opens or closes thoughts."""
    return _MARK.fullmatch(text) is not None


@lru_cache(_NUM_KEPT)
def in_one_form(text: str) -> str:
    """Replace tags around thoughts that are tokens of some model family, such as ``[THINK]``, by ``<think>`` and
    ``</think>``. Within open thoughts, tags of other families are removed. Tags that models write as ordinary text,
    such as ``<reasoning>``, stay as they are, because a reward may ask for them."""
    pieces, last = [], 0
    for mark, meaning in _marks(text, _THINK_OR_TOKEN):
        pieces += [text[last : mark.start()], meaning]
        last = mark.end()
    return "".join([*pieces, text[last:]])


def opening_at_the_end(text: str) -> str:
    """Return the tag that opens thoughts, with the white space after it, if a text ends with one; else the empty
    string."""
    tail = text[-_LONGEST:]
    marks = [mark for mark, meaning in _marks(tail, _MARK) if meaning == OPEN]
    return tail[marks[-1].start() :] if marks and not tail[marks[-1].end() :].strip() else ""


def _marks(text: str, pattern: re.Pattern[str]) -> Iterator[tuple[re.Match[str], str]]:
    """Yield each mark with its effect: ``OPEN`` or ``CLOSE``, or the empty string if it has none, because it is within
    thoughts that a mark of another kind (brackets and word) opened."""
    opened, end = None, 0
    for bracket in _BRACKET.finditer(text):
        mark = pattern.match(text, bracket.start()) if bracket.start() >= end else None
        if mark is None:
            continue
        end = mark.end()
        groups = {name for name, text in mark.groupdict().items() if text}
        closes = any("_end" in name for name in groups)
        words = (f"{_BRACKETS.get(group, group)} {mark[group].lower()}" for group in _WORDS if group in groups)
        kind = next(words, str(mark.lastgroup).removesuffix("_end"))
        if closes and opened is None and kind in _OTHERWISE:
            continue
        if opened not in (None, kind):
            yield mark, ""
        else:
            opened = None if closes else kind
            yield mark, CLOSE if closes else OPEN


_NO_WORDS = ("channel", "unused", "role", "harmony")
_WORDS = tuple(name for name in _MARK.groupindex if "_end" not in name and name not in _NO_WORDS)
_BRACKETS = {"slash": "bar"}
_OTHERWISE = ("unused", "role")  # kinds of tags whose closing tag has another meaning if no thoughts are open


def assistant_turn(prompt: Prompt, completion: Completion) -> str:
    """Return a completion's text with its thoughts between ``<think>`` and ``</think>``, which replace the tokens that
    the model's family has for this. If the chat template wrote the opening tag at the end of the prompt, as those of
    DeepSeek-R1, QwQ and Qwen3.5 do, the text begins with it."""
    return in_one_form(opening_at_the_end(prompt.text) + completion.text)
