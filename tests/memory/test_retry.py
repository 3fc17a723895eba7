"""When a training pass runs out of memory, the run goes on with smaller passes or more recomputation, and its updates
stay the same."""

import atexit
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from gc import freeze, unfreeze  # tests.imports, which is imported after this file, replaces them
from typing import Any

import pytest
import torch
from torch import Tensor

from qerl_pl.common.metrics import Stopwatch
from qerl_pl.common.types import Experience
from qerl_pl.memory.retry import MicroBatchBudget
from qerl_pl.objective import Objective
from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.policy import Policy, load_policy
from qerl_pl.policy.recompute import Recompute
from qerl_pl.policy.teacher import Teacher
from qerl_pl.training.passes import Batch, UpdateSettings
from qerl_pl.update import UpdateReport, improve
from tests.memory.conftest import policy_of, small_config

LENGTHS = (40, 31, 24, 24, 20, 12, 9, 8)
PROMPT = 4


def experience() -> Experience:
    """Make eight rows of different lengths in groups of two."""
    generator = torch.Generator().manual_seed(0)
    rows, width = len(LENGTHS), max(LENGTHS)
    column = torch.arange(width)
    sampled = (column >= PROMPT) & (column < torch.tensor(LENGTHS).unsqueeze(1))
    advantages = torch.randn(rows, generator=generator)
    advantages[3] = 0
    return Experience(
        tokens=torch.randint(0, 250, (rows, width), generator=generator),
        lengths=torch.tensor(LENGTHS),
        sampled=sampled,
        mask=sampled,
        sampler_logprobs=torch.where(sampled, -5.5, 0.0),
        scored=torch.ones(rows, dtype=torch.bool),
        advantages=advantages,
    )


@pytest.fixture(autouse=True, scope="module")
def what_other_tests_left() -> None:
    """Exclude the objects of earlier tests from garbage collection until the tests end. ``MicroBatchBudget`` collects
    garbage after each failed pass, which would take seconds with all these objects."""
    gc.collect()
    freeze()
    atexit.register(unfreeze)  # as the interpreter ends, Triton reports what is left of it as leaked


@pytest.fixture
def policy() -> Policy:
    """Make a random policy whose matrices B are not 0, so that the matrices A have a gradient, too."""
    torch.manual_seed(0)
    policy = policy_of(small_config(), torch.float32, gradient_checkpointing=True)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return policy


def run_updates(
    policy: Policy, objective: Objective, tokens: int, free_cache: Callable[[], bool] = lambda: False
) -> tuple[UpdateReport, list[Tensor]]:
    """Do two updates on one batch in passes of at most ``tokens`` tokens, and restore the policy's weights. Returns the
    report of the updates, and the gradient of each update as a vector."""
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=1e-2)
    start = {name: value.clone() for name, value in policy.adapter_state().items()}
    gradients: list[Tensor] = []

    def step() -> Tensor:
        gradient = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
        gradients.append(gradient)
        optimizer.step()
        optimizer.zero_grad()
        return gradient.norm()

    report = improve(
        policy,
        experience(),
        objective.resolve(),
        UpdateSettings(
            group_size=2, temperature=1.0, max_tokens=max(LENGTHS) - PROMPT, num_updates=2, micro_batch_tokens=tokens
        ),
        step=step,
        watch=Stopwatch(),
        free_cache=free_cache,
    )
    policy.load_adapter_state(start)
    return report, gradients


@contextmanager
def memory_for(
    policy: Policy, tokens: int, *, fails: str, unless: Callable[[], bool] = lambda: False
) -> Iterator[list[int]]:
    """Imitate a device that runs out of memory in every pass of more than ``tokens`` tokens. Yields a list to which
    each pass adds its number of tokens.

    Args:
        policy: the policy whose passes are limited.
        tokens: largest number of tokens of a pass that fits.
        fails: whether memory runs out in the "forward" or the "backward" pass.
        unless: returns whether any pass fits.
    """
    model, seen = policy.causal_lm.model, []

    def check(*_: Any) -> None:
        if seen[-1] > tokens and not unless():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.\nMore on other lines.")

    def note(module: Any, args: Any, kwargs: Any) -> None:
        seen.append(kwargs["input_ids"].numel())
        if fails == "forward":
            check()

    handles = [model.register_forward_pre_hook(note, with_kwargs=True)]
    if fails == "backward":  # when the blocks above have their gradients already
        handles.append(model.layers[1].register_full_backward_hook(check))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


OBJECTIVES = {
    "plain": Objective(),
    "first pass": Objective(kl_coefficient=0.1, top_entropy_share=0.5),
    "corrected": Objective(correction="truncate", correction_high=2.0),
}


@pytest.mark.parametrize("fails", ["forward", "backward"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_update_that_ran_out_of_memory_has_the_gradient_of_one_that_did_not(policy, name, fails):
    whole, expected = run_updates(policy, OBJECTIVES[name], tokens=200)
    with memory_for(policy, 60, fails=fails) as seen, pytest.warns(RuntimeWarning, match="out of memory"):
        report, gradients = run_updates(policy, OBJECTIVES[name], tokens=200)
    assert max(seen) > 60 >= seen[-1], "the fault was met, and got out of the way of"
    assert report.micro_batch_tokens == 50
    assert report.metrics["train/micro_batch_tokens"] == 50
    assert len(gradients) == len(expected) == 2
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6 * float(wanted.norm()))
    torch.testing.assert_close(report.old_logprobs, whole.old_logprobs)
    for metric in whole.metrics.keys() - {"train/micro_batch_tokens"}:
        torch.testing.assert_close(report.metrics[metric], whole.metrics[metric], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_what_is_open_is_recomputed_before_passes_get_smaller(policy, fails):
    policy.set_recompute(Recompute())
    policy.recompute_is_open = True
    whole, expected = run_updates(policy, Objective(), tokens=200)

    def recomputes_blocks() -> bool:
        return policy.recompute.setting(policy.num_layers) == "blocks"

    with (
        memory_for(policy, 60, fails=fails, unless=recomputes_blocks),
        pytest.warns(RuntimeWarning, match="going on") as said,
    ):
        report, gradients = run_updates(policy, Objective(), tokens=200)
    settings = [str(warning.message).rpartition(" ")[2] for warning in said]
    assert settings == ["selective", "1", "2", "3", "blocks"]
    assert report.micro_batch_tokens == 200
    assert all(torch.equal(gradient, wanted) for gradient, wanted in zip(gradients, expected, strict=True))
    assert torch.equal(report.old_logprobs, whole.old_logprobs)
    with memory_for(policy, 60, fails=fails), pytest.warns(RuntimeWarning, match="going on") as said:
        report, _ = run_updates(policy, Objective(), tokens=200)
    assert policy.recompute.offload
    assert report.micro_batch_tokens == 50, "when nothing more can be recomputed"


class Cache:
    """KV cache of a rollout engine that the memory plan has let stay allocated."""

    allocated = True

    def free(self) -> bool:
        """Free the cache as ``RolloutEngine.free_cache`` does."""
        allocated, self.allocated = self.allocated, False
        return allocated

    def is_free(self) -> bool:
        return not self.allocated


@pytest.mark.parametrize("fails", ["forward", "backward"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_without_the_engines_cache_passes_stay_as_they_are(policy, name, fails):
    policy.set_recompute(Recompute())
    policy.recompute_is_open = True
    whole, expected = run_updates(policy, OBJECTIVES[name], tokens=200)
    cache = Cache()
    with (
        memory_for(policy, 60, fails=fails, unless=cache.is_free),
        pytest.warns(RuntimeWarning, match="going on with the engine's KV cache freed") as said,
    ):
        report, gradients = run_updates(policy, OBJECTIVES[name], 200, cache.free)
    assert len(said) == 1
    assert policy.recompute == Recompute()
    assert report.micro_batch_tokens == 200
    assert all(torch.equal(gradient, wanted) for gradient, wanted in zip(gradients, expected, strict=True))
    assert torch.equal(report.old_logprobs, whole.old_logprobs)


def test_the_engines_cache_is_freed_once_and_before_anything_else_is_tried(policy):
    policy.recompute_is_open = True
    policy.set_recompute(Recompute())
    with memory_for(policy, 60, fails="forward"), pytest.warns(RuntimeWarning, match="going on") as said:
        report, _ = run_updates(policy, Objective(), 200, Cache().free)
    messages = [str(warning.message).partition("going on with ")[2] for warning in said]
    assert messages[0].startswith("the engine's KV cache")
    assert messages[1] == "gradient_checkpointing selective"
    assert messages[-1] == "50 (micro_batch_tokens)"
    assert sum("cache" in message for message in messages) == 1
    assert report.micro_batch_tokens == 50


@pytest.mark.parametrize("phase", ["score", "reference"])
def test_passes_without_a_gradient_free_the_engines_cache_too(policy, phase):
    settings = UpdateSettings(group_size=2, max_tokens=64, micro_batch_tokens=200)
    cache = Cache()
    batch = Batch(policy, experience(), settings, free_cache=cache.free)
    with memory_for(policy, 60, fails="forward", unless=cache.is_free), pytest.warns(RuntimeWarning, match="KV cache"):
        batch.score_reference() if phase == "reference" else batch.score(batch.rows)
    assert cache.is_free()
    assert batch.budget.tokens == 200


@pytest.mark.parametrize("mixture", [None, 0.5])
def test_a_teacher_in_host_memory_whose_weights_do_not_fit_beside_the_engines_cache_scores_without_it(bases, mixture):
    folder, cache = str(bases["dense"]), Cache()
    policy = load_policy(folder, dtype=torch.float32, lora=LoraSettings(rank=4), seed=0)
    teacher = Teacher(folder, dtype=torch.float32, device="cpu", keep="host")
    move = teacher.model.to

    def to(device: torch.device) -> Any:
        if device is teacher.device and cache.allocated:  # not "==": on a CPU the device is host memory
            raise torch.OutOfMemoryError("no room for the teacher")
        return move(device=device)

    teacher.model.to = to
    settings = UpdateSettings(group_size=2, max_tokens=64, micro_batch_tokens=200)
    batch = Batch(policy, experience(), settings, free_cache=cache.free)
    with pytest.warns(RuntimeWarning, match="KV cache"):
        batch.score_teacher(teacher, mixture)
    assert batch.budget.tokens == 200
    batch.score(batch.rows)
    assert batch.teacher is not None
    torch.testing.assert_close(batch.teacher.logprobs, batch.old, msg="the teacher is the policy's base")
    assert (batch.teacher.states is None) == (mixture is None)


def test_a_repeated_pass_has_the_same_dropout():
    torch.manual_seed(0)
    policy = policy_of(small_config(), torch.float32, {"dropout": 0.5})
    policy.train()

    def seeded(free_cache: Callable[[], bool]) -> list[Tensor]:
        torch.manual_seed(1)
        return run_updates(policy, Objective(), 200, free_cache)[1]

    cache, expected = Cache(), seeded(lambda: False)
    assert not torch.equal(run_updates(policy, Objective(), 200)[1][0], expected[0]), "there is dropout"
    with memory_for(policy, 60, fails="backward", unless=cache.is_free), pytest.warns(RuntimeWarning, match="KV cache"):
        gradients = seeded(cache.free)
    assert all(torch.equal(gradient, wanted) for gradient, wanted in zip(gradients, expected, strict=True))


def test_an_engine_that_draws_random_numbers_when_it_frees_its_cache_does_not_change_a_repeated_pass():
    tried: list[Tensor] = []

    def work(tokens: int) -> Tensor:
        tried.append(torch.rand(3))
        if len(tried) == 1:
            raise torch.OutOfMemoryError("no room")
        return tried[-1]

    def free() -> bool:
        torch.rand(1)
        return True

    with pytest.warns(RuntimeWarning, match="KV cache"):
        assert torch.equal(MicroBatchBudget(8).run(work, longest=1, free_cache=free), tried[0])


def test_passes_without_a_gradient_only_get_smaller(policy):
    policy.set_recompute(Recompute())
    policy.recompute_is_open = True
    batch = Batch(policy, experience(), UpdateSettings(group_size=2, max_tokens=64, micro_batch_tokens=200))
    with memory_for(policy, 60, fails="forward"), pytest.warns(RuntimeWarning, match="micro_batch_tokens"):
        batch.score(batch.rows)
    assert batch.budget.tokens == 50
    assert policy.recompute == Recompute()


def test_a_row_that_fits_by_itself_is_never_given_up(policy):
    with memory_for(policy, max(LENGTHS), fails="forward"), warnings.catch_warnings(record=True):
        report, _ = run_updates(policy, Objective(), tokens=200)
    assert report.micro_batch_tokens == max(LENGTHS)


def test_a_row_that_fits_nowhere_ends_the_run_with_what_to_change(policy):
    with (
        memory_for(policy, max(LENGTHS) - 2, fails="forward"),
        warnings.catch_warnings(record=True),
        pytest.raises(
            RuntimeError, match=r"single row of 40 tokens.*gradient_checkpointing.*Tried to allocate 1.00 GiB"
        ) as error,
    ):
        run_updates(policy, Objective(), tokens=200)
    assert "plan" not in str(error.value), "cli.training.out_of_memory says it for every error of this kind"


def test_what_to_change_fits_the_pass_that_ran_out_of_memory(policy, bases, monkeypatch):
    """Gradient checkpointing saves nothing in passes without a gradient."""
    batch = Batch(policy, experience(), UpdateSettings(group_size=2, max_tokens=64, micro_batch_tokens=40))
    with memory_for(policy, 10, fails="forward"), pytest.raises(RuntimeError, match=r"pass: lower model\.sampling\."):
        batch.score(batch.rows)
    teacher = Teacher(str(bases["dense"]), dtype=torch.float32, device="cpu")

    def fails(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(teacher, "score", fails)
    with pytest.raises(RuntimeError, match=r"pass: take a smaller teacher, .* \(no room\)"):
        batch.score_teacher(teacher, None)


def test_a_budget_below_the_longest_row_gives_it_a_pass_by_itself(policy):
    _, expected = run_updates(policy, Objective(), tokens=200)
    report, gradients = run_updates(policy, Objective(), tokens=5)
    assert report.micro_batch_tokens == 5
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6 * float(wanted.norm()))


def succeeds_below(limit: int, tried: list[int]) -> Callable[[int], str]:
    def work(tokens: int) -> str:
        tried.append(tokens)
        if tokens >= limit:
            raise torch.OutOfMemoryError("no")
        return "done"

    return work


def test_a_budget_halves_and_stays_small():
    budget, tried, undone = MicroBatchBudget(1000), [], []
    with pytest.warns(RuntimeWarning):
        assert budget.run(succeeds_below(300, tried), longest=10, undo=lambda: undone.append(1)) == "done"
    assert tried == [1000, 500, 250]
    assert len(undone) == 2
    assert budget.run(succeeds_below(300, tried), longest=10) == "done"
    assert (tried[-1], budget.tokens) == (250, 250)


def test_other_errors_are_not_ours():
    def work(tokens: int) -> None:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        MicroBatchBudget(8).run(work, longest=1)


def test_what_failed_is_given_back_before_the_next_try():
    alive: list[int] = []

    class Held:
        def __init__(self) -> None:
            alive.append(1)

        def __del__(self) -> None:
            alive.pop()

    def work(tokens: int) -> int:
        assert not alive
        held = Held()
        if tokens > 2:
            raise torch.OutOfMemoryError("no")
        return id(held)

    with pytest.warns(RuntimeWarning):
        MicroBatchBudget(8).run(work, longest=1)
