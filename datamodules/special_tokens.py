"""Find problems whose own text a tokenizer reads as special tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from qerl_pl.common.types import Problem
from qerl_pl.rewards.thoughts import is_mark

_ANSWER = re.compile("</?answer>")


def find_special_tokens(tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> dict[int, str]:
    """Find the problems whose own text the tokenizer would read as special tokens, such as the end of the user's turn,
    with which a data set could write turns of the assistant or the system.

    Settings such as the question template may have special tokens. Marks of thoughts and of answers write no turns, and
    problems that ask for such a format name them, so they count as ordinary text.

    Args:
        tokenizer: the policy's tokenizer.
        problems: problems with a question or messages.

    Returns:
        The first such token by index in ``problems``.
    """
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= set(tokenizer.all_special_ids)
    special = {index for index in special if not _is_format(str(tokenizer.convert_ids_to_tokens(index)))}
    if tokenizer.unk_token_id not in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id):
        special.discard(tokenizer.unk_token_id)  # stands for a character that the vocabulary lacks
    contents = [[message["content"] for message in problem.messages] or [problem.question] for problem in problems]
    unique = list(dict.fromkeys(content for own in contents for content in own))
    if not unique:
        return {}
    rows = tokenizer(unique, add_special_tokens=False).input_ids
    first = [next((token for token in row if token in special), None) for row in rows]
    marked = {content: token for content, token in zip(unique, first, strict=True) if token is not None}
    firsts = (
        (index, next((marked[each] for each in own if each in marked), None)) for index, own in enumerate(contents)
    )
    return {index: str(tokenizer.convert_ids_to_tokens(mark)) for index, mark in firsts if mark is not None}


def _is_format(token: str) -> bool:
    return is_mark(token) or _ANSWER.fullmatch(token) is not None
