"""Draw batches of word problems with worked solutions; batch i depends only on the seed and i."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np
from torch.utils.data import Dataset
from transformers import Qwen2Tokenizer

from qerl_pl.common.seeding import derive_seed
from qerl_pl.pretraining.policy import END
from qerl_pl.tasks.word_problems import MAX_OPERATIONS, WordProblem, draw_problem, leave_out_lines


class Rows(NamedTuple):
    """B prompts with their solutions, packed without padding: T tokens to process, and N tokens to predict.

    These are arrays and not tensors, because a process that draws problems sends them to the training process. PyTorch
    sends each tensor's memory by a handshake, for which the sender's Python code has to be interrupted; this takes
    several milliseconds per tensor.
    """

    tokens: np.ndarray
    """[T] int32, tokens of all rows, one row after another, each without its last token, which need not be
    processed."""
    positions: np.ndarray
    """[T] int32, position of each token in its row."""
    starts: np.ndarray
    """[B + 1] int32, index of each row's first token, followed by T."""
    before: np.ndarray
    """[N] int32, index of the token before each token of a solution."""
    wanted: np.ndarray
    """[N] int32, the tokens of the solutions, end tokens included."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Batches(Dataset[list[Rows]]):
    """A data set of batches of newly drawn problems, whose structures occur in neither the validation set nor the reach
    set.

    Attributes:
        tokenizer: tokenizer of the policy.
        seed: seed of the problems.
        num_steps: number of batches.
        batch_size: problems per batch.
        operations: fewest and most operations of most problems; each number is equally likely.
        rare: probability that a problem has more operations than ``operations`` allows; each larger number is equally
            likely.
        left_out: probability that a line of a worked solution is left out, see ``leave_out_lines``.
        micro_batch_tokens: most tokens of a micro-batch (``Rows``).
    """

    tokenizer: Qwen2Tokenizer = field(kw_only=False)
    seed: int
    num_steps: int
    batch_size: int
    operations: tuple[int, int]
    rare: float
    left_out: float
    micro_batch_tokens: int

    def __len__(self) -> int:
        return self.num_steps

    def __getitem__(self, index: int) -> list[Rows]:
        if not 0 <= index < self.num_steps:
            raise IndexError(index)
        rng = random.Random(derive_seed(self.seed, "pretrain/batch", index))
        problems = [
            draw_problem(rng, num_operations=self._num_operations(rng), split="train") for _ in range(self.batch_size)
        ]
        shortened = [leave_out_lines(rng, problem, self.left_out) for problem in problems]
        return rows_of(self.tokenizer, shortened, micro_batch_tokens=self.micro_batch_tokens)

    def _num_operations(self, rng: random.Random) -> int:
        fewest, most = self.operations
        if most < MAX_OPERATIONS and rng.random() < self.rare:
            return rng.randint(most + 1, MAX_OPERATIONS)
        return rng.randint(fewest, most)


def pad_token(tokenizer: Qwen2Tokenizer) -> int:
    """Return the number of the padding token."""
    token = tokenizer.pad_token_id
    assert isinstance(token, int)
    return token


def prompts_of(tokenizer: Qwen2Tokenizer, problems: Sequence[WordProblem]) -> list[list[int]]:
    """Tokenise the questions as chat prompts, generation header included."""
    chats = [[{"role": "user", "content": problem.question}] for problem in problems]
    return encode(
        tokenizer,
        [str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)) for chat in chats],
    )


def encode(tokenizer: Qwen2Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Tokenise texts without runs of spaces, each different word once; the tokens are those of whole texts.

    A token of these tokenizers has a space at most at its beginning, so a text may be split before its spaces.
    """
    words = [text.replace(" ", "\0 ").split("\0") for text in texts]
    different = list(dict.fromkeys(chain.from_iterable(words)))
    tokens = dict(zip(different, tokenizer(different, add_special_tokens=False).input_ids, strict=True))
    return [list(chain.from_iterable(tokens[word] for word in text)) for text in words]


def rows_of(tokenizer: Qwen2Tokenizer, problems: Sequence[WordProblem], *, micro_batch_tokens: int) -> list[Rows]:
    """Tokenise prompts with solutions and pack them into micro-batches, the longest first."""
    heads = prompts_of(tokenizer, problems)
    tails = encode(tokenizer, [problem.solution + END for problem in problems])
    pairs = sorted(zip(heads, tails, strict=True), key=lambda pair: len(pair[0]) + len(pair[1]), reverse=True)
    found: list[list[tuple[list[int], list[int]]]] = []
    left = 0  # tokens for which the newest micro-batch has space
    for head, tail in pairs:
        num_tokens = len(head) + len(tail) - 1
        if not found or num_tokens > left:
            found.append([])
            left = micro_batch_tokens
        found[-1].append((head, tail))
        left -= num_tokens
    return [_packed(some) for some in found]


def _packed(pairs: Sequence[tuple[list[int], list[int]]]) -> Rows:
    heads, tails = (np.array([len(pair[part]) for pair in pairs]) for part in (0, 1))
    lengths = heads + tails - 1
    starts = np.concatenate([[0], lengths.cumsum()])
    num_wanted = tails.cumsum()
    rows = (
        np.fromiter(chain.from_iterable([*head, *tail[:-1]] for head, tail in pairs), np.int32, count=starts[-1]),
        np.arange(starts[-1]) - starts[:-1].repeat(lengths),
        starts,
        np.arange(num_wanted[-1]) + (starts[:-1] + heads - 1 - (num_wanted - tails)).repeat(tails),
        np.fromiter(chain.from_iterable(tail for _, tail in pairs), np.int32, count=num_wanted[-1]),
    )
    return Rows(*(part.astype(np.int32) for part in rows))
