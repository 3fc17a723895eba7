"""Decode completions to the text that rewards and logs see, and check that they end as the engine reports."""

from collections.abc import Collection, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from qerl_pl.common.checks import CheckFailed
from qerl_pl.common.types import Completion, Prompt
from qerl_pl.model.stop import StopStrings
from qerl_pl.rollout.base import Sampling


def completion_texts(
    tokenizer: PreTrainedTokenizerBase, completions: Sequence[Completion], *, stop: Sequence[str] = ()
) -> list[str]:
    """Decode completions to text for rewards, with special tokens, since these may mark thoughts (``[THINK]``) or
    answers. Only end and padding tokens of the tokenizer, and a special token that ended the completion and completes
    no stop string, are left out."""
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
    """Return the ids of all tokens with a role, such as end or padding, and of added tokens marked as special."""
    added = tokenizer.added_tokens_decoder.items()
    return {*tokenizer.all_special_ids, *(token for token, text in added if text.special)}


def as_sampled(tokenizer: PreTrainedTokenizerBase, text: str, *, stop: Sequence[str] = ()) -> str:
    """Return the text that rewards would get if the policy had sampled ``text``: the text up to and including the first
    stop string, tokenised and decoded."""
    ends = [text.index(string) + len(string) for string in stop if string in text]
    tokens = tokenizer(text[: min(ends, default=len(text))], add_special_tokens=False).input_ids
    return completion_texts(tokenizer, [Completion(tuple(tokens), (), bool(ends))], stop=stop)[0]


def check_ends(
    groups: Sequence[Sequence[Completion]],
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    end_tokens: Collection[int],
    tokenizer: PreTrainedTokenizerBase,
    engine: str,
) -> None:
    """Raise CheckFailed if ``Completion.finished`` contradicts the completion's tokens. A finished completion ends with
    an end token or with the token that completes a stop string, and contains neither before this token. An unfinished
    completion contains neither, and has ``max_tokens`` tokens."""
    ends = frozenset(end_tokens)
    for index, (prompt, group) in enumerate(zip(prompts, groups, strict=True)):
        stops = _stop_lengths(prompt, group, sampling.stop, tokenizer)
        for number, (completion, stopped_at) in enumerate(zip(group, stops, strict=True)):
            tokens, where = completion.tokens, f"completion {number} of prompt {index}"
            count = len(tokens)
            returned = (
                f"{engine} returned {where} with {count} tokens as {'' if completion.finished else 'not '}finished"
            )
            places = [place + 1 for place, token in enumerate(tokens) if token in ends]
            places_of_ends: list[int] = [*places, *([] if stopped_at is None else [stopped_at])]
            end = min(places_of_ends) if places_of_ends else None
            if end is not None and end < count:
                what = f"the end token {tokens[end - 1]}" if end in places else "a stop string"
                raise CheckFailed(f"{returned}; it goes on after {what} in place {end}, and nothing may follow")
            if completion.finished and end is None:
                raise CheckFailed(
                    f"{returned}; its last token {tokens[-1]} is no end token ({_listed(ends)}) and completes no stop "
                    "string: look for another limit of tokens, or other end tokens, in the engine"
                )
            if not completion.finished and end is not None:
                raise CheckFailed(f"{returned}; but it ends with an end token or a stop string, so it is finished")
            if not completion.finished and count != sampling.max_tokens:
                raise CheckFailed(
                    f"{returned}; expected {sampling.max_tokens} tokens (max_tokens) of a completion that was cut: "
                    "look for another limit in the engine"
                )


def _stop_lengths(
    prompt: Prompt, group: Sequence[Completion], stop: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> list[int | None]:
    """Return, for each completion, the number of its tokens up to the end of the first stop string, or None if it
    contains no stop string."""
    if not stop:
        return [None] * len(group)
    longest = max(len(completion.tokens) for completion in group)
    search = StopStrings(stop, tokenizer, [prompt.tokens] * len(group))
    lengths: list[int | None] = [None] * len(group)
    rows = torch.tensor([[*row.tokens, *[0] * (longest - len(row.tokens))] for row in group])
    for place in range(longest):
        search(rows[:, : place + 1], None)
    for row, completion in enumerate(group):
        length = search.lengths[row]
        lengths[row] = length if length is not None and length <= len(completion.tokens) else None
    return lengths


def _listed(ends: frozenset[int]) -> str:
    return f"one of {', '.join(map(str, sorted(ends)))}" if ends else "there is none"
