"""Draw batches of word problems with worked solutions; batch i depends only on the seed and i."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import Qwen2Tokenizer

from qerl_pl.common.seeding import derive_seed
from qerl_pl.pretraining.policy import END
from qerl_pl.tasks.word_problems import MAX_OPERATIONS, WordProblem, draw_problem


@dataclass(frozen=True)
class Rows:
    """Prompts with their solutions: a part of a batch."""

    tokens: Tensor
    """[B, S] int32, right-padded tokens of B rows; int32, because workers send batches through shared memory, of which
    containers have little."""
    mask: Tensor
    """[B, S] bool, True on the solution's tokens, end token included."""


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
        micro_batch_tokens: most tokens of a micro-batch (``Rows``), padding included.
    """

    tokenizer: Qwen2Tokenizer = field(kw_only=False)
    seed: int
    num_steps: int
    batch_size: int
    operations: tuple[int, int]
    rare: float
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
        return rows_of(self.tokenizer, problems, micro_batch_tokens=self.micro_batch_tokens)

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
    texts = [str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)) for chat in chats]
    return tokenizer(texts, add_special_tokens=False).input_ids


def rows_of(tokenizer: Qwen2Tokenizer, problems: Sequence[WordProblem], *, micro_batch_tokens: int) -> list[Rows]:
    """Tokenise prompts with solutions and split them into micro-batches of problems of similar length, which need
    little padding."""
    heads = prompts_of(tokenizer, problems)
    tails = tokenizer([problem.solution + END for problem in problems], add_special_tokens=False).input_ids
    pairs = sorted(zip(heads, tails, strict=True), key=lambda pair: len(pair[0]) + len(pair[1]), reverse=True)
    found: list[Rows] = []
    while pairs:
        width = len(pairs[0][0]) + len(pairs[0][1])
        some = pairs[: max(1, micro_batch_tokens // width)]
        pairs = pairs[len(some) :]
        tokens = torch.full((len(some), width), pad_token(tokenizer), dtype=torch.int32)
        mask = torch.zeros(tokens.shape, dtype=torch.bool)
        for row, (head, tail) in enumerate(some):
            tokens[row, : len(head) + len(tail)] = torch.tensor(head + tail, dtype=torch.int32)
            mask[row, len(head) : len(head) + len(tail)] = True
        found.append(Rows(tokens, mask))
    return found
