"""Measure a pretrained policy: pass@k by number of operations, the problems to train on with RL, and those out of its
reach."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from qerl_pl.common.files import write_whole
from qerl_pl.common.phases import phase
from qerl_pl.common.seeding import derive_seed
from qerl_pl.evaluation.pass_at_k import pass_at_k
from qerl_pl.pretraining.batches import pad_token, prompts_of
from qerl_pl.pretraining.fit import Stopped
from qerl_pl.rewards.math import NumericAnswer
from qerl_pl.tasks.word_problems import MAX_OPERATIONS, MIN_OPERATIONS, WordProblem, draw_problems

PASS_AT_1 = (0.05, 0.20)
MIN_PASS_AT_N = 0.5


class Measured(NamedTuple):
    """Pass rates on problems with one number of operations."""

    num_operations: int
    pass_at_1: float
    pass_at_n: float


class Range(NamedTuple):
    """Mean pass rates on problems with different numbers of operations, equally many problems of each."""

    operations: tuple[int, int]
    pass_at_1: float
    pass_at_n: float

    @property
    def has_room(self) -> bool:
        """True if some samples are right, so that RL has rewards to learn from, but not many, so that it can improve
        much."""
        return PASS_AT_1[0] <= self.pass_at_1 <= PASS_AT_1[1] and self.pass_at_n > MIN_PASS_AT_N


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings with which completions are sampled.

    Attributes:
        seed: seed of problems and samples.
        num_samples: completions per problem.
        batch_rows: completions sampled at once, a batch.
        kept: folder in which the verdicts of each finished batch are kept, so that an interrupted measurement
            continues; None: they are not kept.
        stop: called after each batch; if it returns True, the measurement stops.
    """

    seed: int
    num_samples: int
    batch_rows: int
    kept: Path | None = None
    stop: Callable[[], bool] = lambda: False


@torch.no_grad()
def count_right(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    problems: Sequence[WordProblem],
    sampling: Sampling,
    *,
    description: str,
) -> Tensor:
    """Sample completions of P problems at temperature 1 and count the right answers of each: [P] int64.

    Args:
        model: model, on the device and in the dtype for sampling.
        tokenizer: tokenizer of the model.
        problems: P problems.
        sampling: how to sample; equal arguments give equal counts on a CPU, whether or not the sampling is interrupted.
        description: label of the progress bar.

    Raises:
        Stopped: ``sampling.stop`` returned True before the last batch.
    """
    rows = sorted(
        (place for place in range(len(problems)) for _ in range(sampling.num_samples)),
        key=lambda place: problems[place].num_operations,
    )
    right = torch.zeros(len(problems), dtype=torch.int64)
    with phase(description, total=len(rows), unit="samples") as progress:
        for start in range(0, len(rows), sampling.batch_rows):
            batch = rows[start : start + sampling.batch_rows]
            some, seed = [problems[place] for place in batch], derive_seed(sampling.seed, "pretrain/samples", start)
            file = None if sampling.kept is None else sampling.kept / f"{_digest(some, seed)}.json"
            if file is not None and file.exists():
                verdicts = json.loads(file.read_text(encoding="utf-8"))
            else:
                verdicts = _judge(model, tokenizer, some, seed)
                if file is not None:
                    write_whole(file, json.dumps(verdicts))
                if sampling.stop() and start + len(batch) < len(rows):
                    raise Stopped(f"stopped after {start + len(batch)} of {len(rows)} samples ({description})")
            right.index_add_(0, torch.tensor(batch), torch.tensor(verdicts, dtype=torch.int64))
            progress.update(len(batch))
    return right


def _digest(problems: Sequence[WordProblem], seed: int) -> str:
    """Hash what, besides the policy, determines the samples of a batch."""
    text = " ".join([str(seed), *(problem.identity for problem in problems)])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _judge(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, problems: Sequence[WordProblem], seed: int
) -> list[bool]:
    """Sample one completion of each problem and judge its answer."""
    longest = max(problem.num_operations for problem in problems)
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        texts = _sample(model, tokenizer, prompts_of(tokenizer, problems), completion_limit(longest))
    verdicts = NumericAnswer().judge(texts, [str(problem.answer) for problem in problems])
    return [verdict.score == 1 for verdict in verdicts]


def _sample(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[str]:
    width = max(map(len, prompts))
    tokens = torch.full((len(prompts), width), pad_token(tokenizer))
    real = torch.zeros(tokens.shape, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = torch.tensor(prompt)
        real[row, width - len(prompt) :] = 1
    # the declared type of ``self`` in transformers' generate has attributes that no model class declares
    generator: Any = model
    written = generator.generate(
        tokens.to(model.device),
        attention_mask=real.to(model.device),
        max_new_tokens=max_tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
    )
    return tokenizer.batch_decode(written[:, width:], skip_special_tokens=True)


def measure(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    sampling: Sampling,
    *,
    num_problems: int,
    operations: Sequence[int] = range(MIN_OPERATIONS, MAX_OPERATIONS + 1),
) -> list[Measured]:
    """Measure pass@1 and pass@n by number of operations, on problems with structures outside of the training data.

    Args:
        model, tokenizer: the policy.
        sampling: how to sample n completions of each problem.
        num_problems: problems per number of operations.
        operations: the numbers of operations.
    """
    drawn = [
        draw_problems(num_problems, seed=seed, split="validation", operations=(num, num))
        for num, seed in ((num, derive_seed(sampling.seed, "pretrain/measured", num)) for num in operations)
    ]
    right = count_right(
        model,
        tokenizer,
        [problem for problems in drawn for problem in problems],
        sampling,
        description="sampling",
    ).split(num_problems)
    return [
        Measured(
            num,
            *(pass_at_k(counts, sampling.num_samples, k).mean().item() for k in (1, sampling.num_samples)),
        )
        for num, counts in zip(operations, right, strict=True)
    ]


def completion_limit(num_operations: int) -> int:
    """Return the most tokens of a completion of a problem with so many operations.

    Worked solutions have at most 18 tokens per operation, and a few in addition.
    """
    return 20 * num_operations + 16


def over(measured: Sequence[Measured], operations: tuple[int, int]) -> Range:
    """Average the pass rates over problems with ``first`` to ``last`` operations, both included."""
    inside = [each for each in measured if operations[0] <= each.num_operations <= operations[1]]
    return Range(
        operations,
        sum(each.pass_at_1 for each in inside) / len(inside),
        sum(each.pass_at_n for each in inside) / len(inside),
    )


def with_room(measured: Sequence[Measured], *, most: int = 4) -> Range | None:
    """Choose a range of numbers of operations whose problems RL can improve on (``has_room``); None if there is none.

    Of several such ranges, the widest is chosen; of equally wide ones, the one whose pass@1 is nearest to
    the middle of ``PASS_AT_1``.

    Args:
        measured: pass rates for each number of operations, in ascending order.
        most: largest length of the range.
    """
    numbers = [each.num_operations for each in measured]
    ranges = [over(measured, (low, high)) for low in numbers for high in range(low, min(low + most, numbers[-1] + 1))]
    fitting = [each for each in ranges if each.has_room]
    middle = sum(PASS_AT_1) / 2
    return min(
        fitting,
        key=lambda each: (each.operations[0] - each.operations[1], abs(each.pass_at_1 - middle)),
        default=None,
    )


def out_of_reach(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    sampling: Sampling,
    *,
    operations: tuple[int, int],
    num_problems: int,
) -> list[WordProblem]:
    """Draw ``num_problems`` problems with structures of the reach set; returns those that none of the policy's samples
    solves."""
    problems = draw_problems(
        num_problems, seed=derive_seed(sampling.seed, "pretrain/reach"), split="reach", operations=operations
    )
    right = count_right(
        model,
        tokenizer,
        problems,
        replace(sampling, seed=derive_seed(sampling.seed, "pretrain/reach samples")),
        description="reach set",
    )
    return [problem for problem, count in zip(problems, right.tolist(), strict=True) if count == 0]
