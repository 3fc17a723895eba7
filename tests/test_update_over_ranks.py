"""If two ranks share a batch, losses, metrics and the update equal those of one rank with the whole batch."""

from functools import cache, partial
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from qerl_pl.common import ranks
from qerl_pl.common.metrics import Stopwatch
from qerl_pl.common.types import Experience
from qerl_pl.objective import Objective
from qerl_pl.objective.advantages import batch_std, group_advantages
from qerl_pl.objective.correction import Rejection
from qerl_pl.objective.losses import Aggregation, clipped_policy_loss, count_divisor, row_weights
from qerl_pl.objective.teacher import TeacherTerm
from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.policy import load_policy
from qerl_pl.policy.teacher import Teacher
from qerl_pl.tools.tiny import make_tiny
from qerl_pl.training.passes import UpdateSettings
from qerl_pl.update import improve
from tests.two_ranks import on_two_ranks
from tests.updates import rows_of

loaded = cache(load_policy)  # each update begins with other parameters
loaded_teacher = cache(Teacher)
GROUP, PROMPT, LONGEST = 2, 3, 9
OBJECTIVES = {
    "dapo": Objective(),
    "grpo with KL and entropy": Objective(aggregation="sequence", kl_coefficient=0.1, entropy_coefficient=0.01),
    "top entropy, corrected": Objective(top_entropy_share=0.6, correction="truncate", aggregation="constant"),
    "masked, out of the divisor": Objective(
        correction="mask", correction_low=0.5, correction_divisor="kept", rejection=Rejection("sequence", 0.001, 1000.0)
    ),
    "sampled from a teacher": Objective(teacher=TeacherTerm()),
    "divergence from a teacher": Objective(
        aggregation="sequence", teacher=TeacherTerm(coefficient=0.5, divergence="jensen_shannon")
    ),
}
# Batches, as the advantages of each of four groups. A group whose advantages are 0 gives no gradient: in the second
# batch this holds for all groups of the second rank, in the third batch for all groups.
ADVANTAGES = {
    "mixed": [[1.0, -1.0], [0.5, -0.5], [0.0, 0.0], [-1.0, 1.0]],
    "one silent rank": [[1.0, -1.0], [0.0, 0.0], [0.5, -0.5], [0.0, 0.0]],
    "silence": [[0.0, 0.0]] * 4,
}


def batch_of(advantages: list[list[float]]) -> Experience:
    """Make a batch of rows of different lengths with the given advantages of each group. One row is left out of the
    loss."""
    num_rows = GROUP * len(advantages)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(PROMPT + 1, LONGEST + 1, (num_rows,), generator=generator)
    position = torch.arange(LONGEST)
    sampled = (position >= PROMPT) & (position < lengths.unsqueeze(1))
    mask = sampled.clone()
    mask[1] = False
    return Experience(
        tokens=torch.randint(0, 250, (num_rows, LONGEST), generator=generator),
        lengths=lengths,
        sampled=sampled,
        mask=mask,
        sampler_logprobs=torch.where(sampled, -5.5 + torch.randn(num_rows, LONGEST, generator=generator), 0.0),
        scored=torch.ones(num_rows, dtype=torch.bool),
        advantages=torch.tensor(advantages).flatten(),
    )


def share_of(batch: Experience, rank: int, num_ranks: int) -> Experience:
    """Return the rows of the groups rank, rank + num_ranks, ..."""
    rows = torch.arange(len(batch.tokens)).view(-1, GROUP)[rank::num_ranks].flatten()
    return rows_of(batch, rows)


def two_updates(base: str, objective: Objective, experience: Experience, mini_batches: int) -> dict[str, Tensor]:
    """Update a policy twice with a batch, in ``mini_batches`` optimizer steps each and with gradient clipping. Returns
    the trained parameters and the metrics, by name."""
    policy = loaded(base, dtype=torch.float32, lora=LoraSettings(rank=2, alpha=4), seed=0)
    generator = torch.Generator().manual_seed(1)
    trained = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
    for parameter in trained.values():
        parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    optimizer = torch.optim.SGD(trained.values(), lr=0.5)

    def step() -> Tensor:
        ranks.average_gradients(list(trained.values()))
        gradients = [parameter for parameter in trained.values() if parameter.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(gradients, 0.3) if gradients else torch.zeros(())
        optimizer.step()
        optimizer.zero_grad()
        return norm

    report = improve(
        policy,
        experience,
        objective.resolve(),
        UpdateSettings(
            group_size=GROUP,
            temperature=1.0,
            max_tokens=LONGEST - PROMPT,
            num_updates=2,
            num_mini_batches=mini_batches,
            micro_batch_tokens=2 * LONGEST,
        ),
        step=step,
        watch=Stopwatch(),
        teacher=loaded_teacher(base, dtype=torch.float32, device="cpu") if objective.teacher else None,
    )
    return {name: parameter.detach().clone() for name, parameter in trained.items()} | report.metrics


def every_advantage(rank: int, num_ranks: int) -> Tensor:
    """Compute the advantages of this rank's groups for the baseline "batch_normalized", which divides by the standard
    deviation of the rewards of all ranks. The ranks have different numbers of groups."""
    rewards = torch.tensor([[0.0, 1.0, 0.5], [1.0, 1.0, 0.9], [0.0, 0.2, 0.0]])
    scored = torch.tensor([[True, True, True], [True, False, True], [True, True, True]])
    mine = slice(rank, None, num_ranks)
    std = batch_std(ranks.gather(rewards[mine][scored[mine]]))
    return group_advantages(rewards[mine], scored[mine], "batch_normalized", std_of_batch=std)


def on_rank(rank: int, base: str) -> dict[str, Any]:
    return {"updates": every_update(rank, base, num_ranks=2), "advantages": every_advantage(rank, num_ranks=2)}


def every_update(rank: int, base: str, num_ranks: int) -> dict[str, dict[str, Tensor]]:
    return {
        f"{name}, {case}, {num}": two_updates(base, objective, share_of(batch_of(advantages), rank, num_ranks), num)
        for name, objective in OBJECTIVES.items()
        for case, advantages in ADVANTAGES.items()
        for num in ((1, 2) if case == "mixed" else (1,))
    }


@pytest.mark.slow
def test_two_ranks_take_the_step_of_one_and_report_the_same(tmp_path):
    base = tmp_path / "tiny"
    make_tiny(base, seed=0, sft_steps=0)
    both = on_two_ranks(partial(on_rank, base=str(base)), tmp_path)
    first, second = (result["updates"] for result in both)
    whole = every_advantage(0, num_ranks=1)
    torch.testing.assert_close(both[0]["advantages"], whole[0::2])
    torch.testing.assert_close(both[1]["advantages"], whole[1::2])
    whole = every_update(0, base=str(base), num_ranks=1)
    for case, expected in whole.items():
        for name, value in expected.items():
            assert torch.equal(first[case][name], second[case][name]), f"{case}: {name} differs between the ranks"
            torch.testing.assert_close(first[case][name], value, rtol=1e-5, atol=1e-6, msg=f"{case}: {name}")
    moved = {case: result["train/grad_norm"].item() for case, result in whole.items()}
    # While the policy has not changed, the gradient of a KL penalty is zero up to rounding.
    assert [case for case, norm in moved.items() if norm < 1e-6] == [
        "dapo, silence, 1",
        "top entropy, corrected, silence, 1",
        "masked, out of the divisor, silence, 1",
    ]


AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
MOST_TOKENS = 11


def gradient(rows: list[Tensor], weights: Tensor) -> Tensor:
    """Compute the gradient of the clipped loss with respect to the log-probabilities, [B, S]. ``rows`` has four
    tensors: log-probabilities, old log-probabilities, advantages and the mask."""
    logprobs = rows[0].detach().requires_grad_()
    clipped_policy_loss(logprobs, rows[1], rows[2], rows[3], weights).loss.backward()
    assert logprobs.grad is not None
    return logprobs.grad


def gradients_of(rank: int, batch: list[Tensor]) -> dict[str, list[Tensor]]:
    """Compute gradients; every second row is this rank's."""
    mine, gradients = [field[rank::2] for field in batch], {}
    for aggregation in AGGREGATIONS:
        divisor = count_divisor(mine[3], aggregation, max_tokens=MOST_TOKENS)
        dist.all_reduce(divisor)
        summed = gradient(mine, row_weights(mine[3], aggregation, divisor))
        averaged = gradient(mine, row_weights(mine[3], aggregation, divisor / 2)) / 2  # as DDP does
        gradients[aggregation] = [summed, averaged]
    return gradients


@pytest.mark.slow
def test_two_ranks_give_the_gradient_of_one(tmp_path):
    generator = torch.Generator().manual_seed(1)
    logprobs = -torch.rand(5, 6, generator=generator, dtype=torch.float64)
    old = logprobs + 0.4 * torch.randn(5, 6, generator=generator, dtype=torch.float64)
    advantages = torch.randn(5, generator=generator, dtype=torch.float64)
    mask = torch.rand(5, 6, generator=generator) < torch.tensor([1.0, 0.2, 0.9, 0.0, 0.5]).unsqueeze(1)
    batch = [logprobs, old, advantages, mask]
    of_ranks = on_two_ranks(partial(gradients_of, batch=batch), tmp_path)
    for aggregation in AGGREGATIONS:
        weights = row_weights(mask, aggregation, count_divisor(mask, aggregation, max_tokens=MOST_TOKENS))
        for rank, gradients in enumerate(of_ranks):
            summed, averaged = gradients[aggregation]
            whole = gradient(batch, weights)[rank::2]
            assert torch.equal(summed, whole)
            torch.testing.assert_close(averaged, whole, rtol=1e-15, atol=0)
