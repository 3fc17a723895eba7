"""Decode completions to the text that rewards and logs see."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from qerl_pl.common.types import Completion


def completion_texts(
    tokenizer: PreTrainedTokenizerBase, completions: Sequence[Completion], *, stop: Sequence[str] = ()
) -> list[str]:
    """Decode completions with special tokens, since these may mark thoughts (``[THINK]``) or answers.

    Only the tokenizer's end and padding tokens, and a special token that ended the completion, are left out; strings of
    ``stop`` stay in the text, also where they are special tokens.
    """
    special = special_tokens(tokenizer)
    silent = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    rows = [[token for token in row.tokens if token not in silent] for row in completions]
    texts = tokenizer.batch_decode(rows, skip_special_tokens=False)
    for index, (row, tokens) in enumerate(zip(completions, rows, strict=True)):
        ended = row.finished and tokens and tokens[-1] == row.tokens[-1] and tokens[-1] in special
        if ended and not any(text in texts[index] for text in stop):
            texts[index] = str(tokenizer.decode(tokens[:-1], skip_special_tokens=False))
    return texts


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids of a tokenizer's special tokens, also of those that have no role such as end or padding."""
    added = tokenizer.added_tokens_decoder.items()
    return {*tokenizer.all_special_ids, *(token for token, text in added if text.special)}


def as_sampled(tokenizer: PreTrainedTokenizerBase, text: str, *, stop: Sequence[str] = ()) -> str:
    """Return what rewards see if the policy writes a text: up to the first stop string, tokenised and decoded."""
    ends = [text.index(string) + len(string) for string in stop if string in text]
    tokens = tokenizer(text[: min(ends, default=len(text))], add_special_tokens=False).input_ids
    return completion_texts(tokenizer, [Completion(tuple(tokens), (), bool(ends))], stop=stop)[0]
