"""Forward and backward passes over micro-batches of one rollout's experience."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from qerl_pl.common.batching import micro_batches, micro_batches_of_groups
from qerl_pl.common.types import Experience
from qerl_pl.memory.retry import MicroBatchBudget
from qerl_pl.policy.policy import Policy, TeacherStates
from qerl_pl.policy.shared_prompts import WORTH, first_equal
from qerl_pl.policy.teacher import Teacher
from qerl_pl.quant.experts import replaying

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class UpdateSettings:
    """Settings of the updates on one batch."""

    group_size: int
    """Completions per prompt."""
    max_tokens: int
    """Limit on the completion length during sampling."""
    micro_batch_tokens: int
    """Most tokens in one forward and backward pass; a longer row is a pass by itself."""
    temperature: float = 1.0
    """Sampling temperature; the trainer's logits are divided by it too."""
    num_updates: int = 1
    """Epochs over the batch."""
    num_mini_batches: int = 1
    """Optimizer steps per epoch, each on a different part of the prompts, as in PPO."""


class Part:
    """One micro-batch: R rows of a batch, cut to the length of the longest of them (``width`` tokens)."""

    def __init__(self, experience: Experience, rows: Tensor) -> None:
        self.rows = rows
        self.width = int(experience.lengths[rows].max())
        self._where = rows, slice(self.width)
        self.tokens = self.read(experience.tokens)
        self.sampled = self.read(experience.sampled)
        self.replay = replaying(experience.routes, self._where)
        """The sampler's experts; None if the routers choose."""

    def read(self, whole: Tensor) -> Tensor:
        """Take the rows of this micro-batch from a tensor of the whole batch: [B, S, ...] to [R, width, ...]."""
        return whole[self._where]

    def write(self, whole: Tensor, values: Tensor) -> None:
        """Store values [R, width, ...] of this micro-batch in a tensor [B, S, ...] of the whole batch."""
        whole[self._where] = values


class TeacherScores(NamedTuple):
    """Results of a teacher for a batch."""

    logprobs: Tensor
    """[B, S] fp32 nats, 0 for prompts and padding."""
    places: Tensor
    """[B, S] int64, row of each sampled token in ``states.hidden``."""
    states: TeacherStates | None
    """Hidden states at all sampled tokens; None if only log-probabilities are needed."""

    def places_in(self, part: Part) -> Tensor:
        """Return the rows in ``states.hidden`` of the N sampled tokens of a micro-batch, [N] int64."""
        return part.read(self.places)[part.sampled]

    def states_of(self, part: Part) -> TeacherStates | None:
        """Return the hidden states at the sampled tokens of a micro-batch; None if they were not kept."""
        return self.states and self.states._replace(hidden=self.states.hidden[self.places_in(part)])


class Batch:
    """Experience on the policy's device, with buffers for the trainer's log-probabilities and entropies."""

    def __init__(self, policy: Policy, experience: Experience, settings: UpdateSettings) -> None:
        device = next(policy.parameters()).device
        self.policy = policy
        self.experience = experience.to(device)
        self.settings = settings
        self.budget = MicroBatchBudget(settings.micro_batch_tokens)
        self.rows = torch.arange(len(experience.lengths), device=device)
        self.old = torch.zeros_like(self.experience.sampler_logprobs)
        """[B, S] fp32 nats, the trainer's log-probabilities before the first update; 0 for prompts and padding, and
        until they are computed."""
        self.entropy = torch.zeros_like(self.old)
        """[B, S] fp32 nats, the policy's entropies before the first update; 0 for prompts and padding, and until they
        are computed."""
        self.replay = replaying(self.experience.routes)
        """The sampler's experts, and how many of them the trainer's routers would not have chosen before the first
        update."""
        self.reference: Tensor | None = None
        """[B, S] fp32 nats, the reference's log-probabilities, or None if they are not needed."""
        self.teacher: TeacherScores | None = None
        """The teacher's results; None without one."""

    def run(self, work: Callable[[int], T], *, with_gradient: bool = True) -> T:
        """Call ``work`` with the limit on the tokens per pass; if GPU memory runs out, call it again with a smaller
        limit or, if it has a backward pass (``with_gradient``), with more activations recomputed."""
        longest = int(self.experience.lengths.max())
        options = {"recompute_more": self.policy.recompute_more} if with_gradient else {}
        return self.budget.run(work, longest=longest, undo=self.policy.zero_grad, **options)

    def parts(self, rows: Tensor, max_tokens: int) -> Iterator[Part]:
        """Split the given rows into micro-batches of at most ``max_tokens`` tokens. If the policy computes a prompt
        that several rows of a micro-batch share only once, its tokens count once."""
        lengths = self.experience.lengths[rows]
        if self.policy.shares_prompts:
            prompts = self.experience.sampled[rows].int().argmax(dim=1)
            groups = first_equal(self.experience.tokens[rows], prompts)
            chunks = micro_batches_of_groups(lengths, prompts, groups, max_tokens, least_saved=WORTH)
        else:
            chunks = micro_batches(lengths, max_tokens)
        for chunk in chunks:
            yield Part(self.experience, rows[chunk.to(rows.device)])

    def score(self, rows: Tensor) -> None:
        """Fill in ``old`` and ``entropy`` of the given rows, without gradient."""
        self._evaluate(rows, self.old, self.entropy)

    def score_reference(self) -> None:
        """Fill in ``reference``: the log-probabilities of all rows under the policy at its start."""
        self.reference = torch.zeros_like(self.old)
        with self.policy.as_reference():
            self._evaluate(self.rows, self.reference)

    def score_teacher(self, teacher: Teacher, mixture: float | None) -> None:
        """Fill in ``teacher``, for all rows; with hidden states if a divergence over the whole vocabulary needs them
        (``mixture`` is not None)."""
        sampled, temperature = self.experience.sampled, self.settings.temperature
        states = None
        if mixture is not None:
            head = teacher.head(temperature)
            states = TeacherStates(head.weight.new_empty(int(sampled.sum()), head.weight.shape[1]), head, mixture)
        places = (sampled.flatten().cumsum(dim=0) - 1).view_as(sampled)
        self.teacher = scores = TeacherScores(torch.zeros_like(self.old), places, states)

        def forward(max_tokens: int) -> None:
            for part in self.parts(self.rows, max_tokens):
                logprobs, hidden = teacher.score(part.tokens, part.sampled, temperature=temperature)
                part.write(scores.logprobs, logprobs)
                if states is not None:
                    states.hidden[scores.places_in(part)] = hidden

        with teacher.ready():
            self.run(forward, with_gradient=False)

    def record_others(self, part: Part) -> None:
        """Store in ``replay`` what a pass over the policy before its first update found."""
        if part.replay is not None and self.replay is not None:
            part.write(self.replay.others, part.replay.others)

    def _evaluate(self, rows: Tensor, logprobs: Tensor, entropies: Tensor | None = None) -> None:
        def forward(max_tokens: int) -> None:
            for part in self.parts(rows, max_tokens):
                with torch.no_grad():
                    stats = self.policy.token_stats(
                        part.tokens, part.sampled, temperature=self.settings.temperature, replay=part.replay
                    )
                part.write(logprobs, stats.logprobs)
                if entropies is not None:
                    part.write(entropies, stats.entropy)
                    self.record_others(part)

        self.run(forward, with_gradient=False)
