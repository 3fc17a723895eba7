"""Forward and backward passes over micro-batches of one rollout's experience.

Shapes: B rows of the rollout (a prompt and its completion each), S tokens of the longest row, R rows of a micro-batch,
L mixture-of-experts layers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from qerl_pl.common.batching import micro_batches
from qerl_pl.common.types import Experience
from qerl_pl.memory.retry import LESS_TOKENS, MicroBatchBudget
from qerl_pl.policy.packing import first_equal, micro_batches_of_groups
from qerl_pl.policy.policy import Policy, TeacherStates, TokenStats
from qerl_pl.policy.teacher import Teacher
from qerl_pl.quant.experts import UNSEEN

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class UpdateSettings:
    """Settings of the policy updates on one batch."""

    group_size: int
    """Completions per prompt."""
    max_tokens: int
    """Limit on the completion length during sampling."""
    micro_batch_tokens: int
    """Limit on the number of tokens in one forward and backward pass; a row with more tokens has a pass by itself."""
    temperature: float = 1.0
    """Sampling temperature, by which the trainer's logits are divided too."""
    num_updates: int = 1
    """Passes of the update over the whole batch (PPO's epochs)."""
    num_mini_batches: int = 1
    """Optimizer steps in each of these passes, each on a different subset of the prompts, as in PPO."""
    places: Sequence[int] | None = None
    """Index of each group of this rank in the batch of all ranks; None: rank r of W has r, r + W, r + 2W and so on."""


class Part(NamedTuple):
    """One micro-batch: R rows of a batch, cut to the length of the longest of them."""

    rows: Tensor
    """[R] int64, indices of the rows in the batch."""
    width: int
    """Tokens of the longest row."""

    def read(self, whole: Tensor) -> Tensor:
        """Take the rows of this micro-batch from a tensor of the whole batch: [B, S, ...] to [R, width, ...]."""
        return whole[self.rows, : self.width]

    def write(self, whole: Tensor, values: Tensor) -> None:
        """Store values [R, width, ...] of this micro-batch in a tensor [B, S, ...] of the whole batch."""
        whole[self.rows, : self.width] = values


class TeacherScores(NamedTuple):
    """A teacher's log-probabilities and, if needed, hidden states for a batch."""

    logprobs: Tensor
    """[B, S] fp32 nats, 0 for prompts and padding."""
    places: Tensor
    """[B, S] int64, for each sampled token its row in ``states.hidden``."""
    states: TeacherStates | None
    """Hidden states from which the sampled tokens are predicted; None if only log-probabilities are needed."""

    def states_at(self, part: Part, sampled: Tensor) -> TeacherStates | None:
        """Return the teacher's hidden states from which it predicts those tokens of a micro-batch at which ``sampled``
        [R, width] bool is True, that is, the states at the positions before these tokens; None if states were not
        stored."""
        return self.states and self.states._replace(hidden=self.states.hidden[part.read(self.places)[sampled]])


class Batch:
    """Experience of one rollout (its scored completions as tensors) on the policy's device, with what the trainer
    computes for its tokens: log-probabilities and entropies before the first update, and log-probabilities under
    reference and teacher."""

    def __init__(
        self,
        policy: Policy,
        experience: Experience,
        settings: UpdateSettings,
        *,
        free_cache: Callable[[], bool] = lambda: False,
    ) -> None:
        device = next(policy.parameters()).device
        self.policy = policy
        self.experience: Experience = move_data_to_device(experience, device)
        self.settings = settings
        self.budget = MicroBatchBudget(settings.micro_batch_tokens)
        self.free_cache = free_cache
        self.rows = torch.arange(len(experience.lengths), device=device)
        self.old = torch.zeros_like(self.experience.sampler_logprobs)
        """[B, S] fp32 nats, the trainer's log-probabilities before the first update; 0 where none is computed."""
        self.entropy = torch.zeros_like(self.old)
        """[B, S] fp32 nats, the policy's entropies before the first update; 0 where none is computed."""
        routes = self.experience.routes
        self.others = None if routes is None else torch.full_like(routes[..., 0], UNSEEN, dtype=torch.uint8)
        """[B, S, L] uint8: for each token and layer, how many of the experts that the sampler used would not have been
        chosen by the trainer's routers before the first update; ``UNSEEN`` where this is not computed. None if training
        lets the routers choose."""
        self.reference: Tensor | None = None
        """[B, S] fp32 nats, log-probabilities under the reference policy; None if they are not needed."""
        self.teacher: TeacherScores | None = None
        """The teacher's log-probabilities and hidden states; None without a teacher."""

    def run(self, work: Callable[[int], T], *, with_gradient: bool = True, advice: str = LESS_TOKENS) -> T:
        """Call ``work`` with the limit on the tokens of one pass, and return its result. If GPU memory runs out, the
        call is repeated: after the rollout engine has freed its KV cache, if that was still allocated; then with more
        activations recomputed in backward, if ``work`` has a backward pass (``with_gradient``) and not all of them are
        recomputed already; else with half the limit. Raises RuntimeError, whose message ends with ``advice``, if memory
        runs out even with one row (a prompt and its completion) per pass."""
        options: dict[str, Any] = {"advice": advice}
        if with_gradient:
            options["recompute_more"] = self.policy.recompute_more
            options["advice"] = f"set model.gradient_checkpointing to auto or offload, or {advice}"
        longest = int(self.experience.lengths.max())
        return self.budget.run(work, longest=longest, undo=self.policy.zero_grad, free_cache=self.free_cache, **options)

    def parts(self, rows: Tensor, max_tokens: int) -> Iterator[Part]:
        """Yield micro-batches of the rows with the indices ``rows``, of at most ``max_tokens`` tokens each. Equal
        prompts of a micro-batch count once if the policy computes them only once."""
        lengths = self.experience.lengths[rows]
        if self.policy.shares_prompts:
            prompts = self.experience.sampled[rows].int().argmax(dim=1)
            groups = first_equal(self.experience.tokens[rows], prompts)
            chunks = micro_batches_of_groups(lengths, prompts, groups, max_tokens)
        else:
            chunks = micro_batches(lengths, max_tokens)
        for chunk in chunks:
            chosen = rows[chunk.to(rows.device)]
            yield Part(chosen, int(self.experience.lengths[chosen].max()))

    def token_stats(self, part: Part, *, teacher: TeacherStates | None = None) -> TokenStats:
        """Run the policy on a micro-batch. In a mixture-of-experts model, each token is computed by the experts that
        the sampler used for it, if the rollout's data have them (``experience.routes``)."""
        routes = self.experience.routes
        return self.policy.token_stats(
            part.read(self.experience.tokens),
            part.read(self.experience.sampled),
            temperature=self.settings.temperature,
            teacher=teacher,
            routes=None if routes is None else part.read(routes),
        )

    def record(self, part: Part, stats: TokenStats) -> None:
        """Store the results of a micro-batch's forward pass, which must precede the first update."""
        part.write(self.old, stats.logprobs.detach())
        part.write(self.entropy, stats.entropy.detach())
        if self.others is not None and stats.others is not None:
            part.write(self.others, stats.others)

    def score(self, rows: Tensor) -> None:
        """Run the policy without gradient on the rows with the indices ``rows``, and ``record`` the results."""
        self._evaluate(rows, self.record)

    def score_reference(self) -> None:
        """Compute and store the log-probabilities of all rows under the reference, the policy before training."""
        self.reference = reference = torch.zeros_like(self.old)
        with self.policy.as_reference():
            self._evaluate(self.rows, lambda part, stats: part.write(reference, stats.logprobs))

    def score_teacher(self, teacher: Teacher, mixture: float | None) -> None:
        """Run the teacher on all rows, and store its log-probabilities and, if the loss needs a divergence over the
        whole vocabulary (``TeacherTerm.mixture`` is not None), its hidden states."""
        sampled, temperature = self.experience.sampled, self.settings.temperature
        places = (sampled.flatten().cumsum(dim=0) - 1).view_as(sampled)

        def score(max_tokens: int) -> TeacherScores:
            states = None
            if mixture is not None:
                head = teacher.head(temperature)
                states = TeacherStates(head.weight.new_empty(int(sampled.sum()), head.weight.shape[1]), head, mixture)
            scores = TeacherScores(torch.zeros_like(self.old), places, states)
            with teacher.ready():  # here, because the weights may need more memory than the passes
                for part in self.parts(self.rows, max_tokens):
                    mask = part.read(sampled)
                    logprobs, hidden = teacher.score(part.read(self.experience.tokens), mask, temperature=temperature)
                    part.write(scores.logprobs, logprobs)
                    if states is not None:
                        states.hidden[part.read(places)[mask]] = hidden
            return scores

        advice = f"take a smaller teacher, set model.teacher.quantize, or {LESS_TOKENS}"
        self.teacher = self.run(score, with_gradient=False, advice=advice)

    def _evaluate(self, rows: Tensor, record: Callable[[Part, TokenStats], None]) -> None:
        def forward(max_tokens: int) -> None:
            for part in self.parts(rows, max_tokens):
                with torch.no_grad():
                    stats = self.token_stats(part)
                record(part, stats)

        self.run(forward, with_gradient=False)
