"""A vLLM engine with speculation samples the same tokens as one without; the drafts go through vLLM's scheduler and KV
cache."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from qerl_pl.common.types import Completion
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.vllm import VLLMEngine
from tests.reference.equal_drafts import accept as accept_by_loops
from tests.rollout.conftest import (
    BLOCK_SIZE,
    END_TOKENS,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    make_policy,
    random_adapter,
    some_prompts,
)
from tests.rollout.keyed_sampling import MOST_DRAFTS, SPECULATION, Drafter, keyed_sampling

pytestmark = pytest.mark.vllm

Groups = list[list[Completion]]


class Case(NamedTuple):
    """Arguments of ``generate``."""

    prompts: list[list[int]]
    sampling: Sampling
    seed: int = 3
    adapter: bool = True


PROMPTS = some_prompts(1, 20, 40, 70)
CASES = {
    "plain": Case(PROMPTS, Sampling(3, 48)),
    "base": Case(PROMPTS, Sampling(2, 48), adapter=False),
    "preempted": Case(some_prompts(20, 30, 33, 64), Sampling(10, 90)),
    "cool": Case(PROMPTS, Sampling(3, 48, temperature=0.4)),
    "greedy": Case(PROMPTS, Sampling(1, 64, temperature=0)),
    "top_k and top_p": Case(PROMPTS, Sampling(2, 48, top_k=9, top_p=0.8)),
    "stop strings": Case(PROMPTS, Sampling(4, 64, stop=("w11 w", "w23"))),
    "longest": Case(some_prompts(MAX_MODEL_LEN - 30), Sampling(16, 30)),
    "one token": Case(PROMPTS, Sampling(3, 1)),
    "two tokens": Case(PROMPTS, Sampling(3, 2)),
}


def make_engine(checkpoints: dict[str, str], **more: Any) -> VLLMEngine:
    policy = make_policy(checkpoints["dense"])
    policy.load_adapter_state(random_adapter(policy, seed=1))
    engine = VLLMEngine(block_size=BLOCK_SIZE, max_num_seqs=32, kv_cache_bytes=2**20)
    engine._arguments.update(more)
    engine.start(policy, max_model_len=MAX_MODEL_LEN)
    return engine


def without_speculation(checkpoints: dict[str, str], cases: dict[str, Case]) -> dict[str, Groups]:
    """Sample every case with an engine without speculation."""
    engine = make_engine(checkpoints)
    with keyed_sampling(engine) as taken:
        found = {name: engine.generate(*case[:3], adapter=case.adapter) for name, case in cases.items()}
        assert not taken
    engine.close()
    return found


@pytest.fixture(scope="module")
def plain(checkpoints) -> dict[str, Groups]:
    return without_speculation(checkpoints, CASES)


@pytest.fixture(scope="module")
def engine(plain, checkpoints) -> Iterator[VLLMEngine]:
    engine = make_engine(checkpoints, speculative_config=SPECULATION)
    yield engine
    engine.close()


def flat(groups: Groups) -> list[Completion]:
    return [each for group in groups for each in group]


Guess = Callable[[list[int]], Sequence[int]]


def recorded(case: Case, groups: Groups) -> Guess:
    """Make a function for ``Drafter.guess`` whose drafts are always right: it continues a sequence as in ``groups``,
    the completions that an engine without speculation sampled."""
    rows = [[*prompt, *each.tokens] for prompt, group in zip(case.prompts, groups, strict=True) for each in group]
    following: dict[int, Sequence[int]] = {}
    for row in rows:
        for end in range(1, len(row)):
            following[hash(tuple(row[:end]))] = row[end : end + MOST_DRAFTS]
    return lambda tokens: following.get(hash(tuple(tokens)), ())


def drafters(case: Case, groups: Groups) -> dict[str, Guess]:
    right, draw = recorded(case, groups), random.Random(0)

    def spoilt(tokens: list[int]) -> Sequence[int]:
        return [token if draw.random() < 0.8 else draw.randrange(VOCAB_SIZE) for token in right(tokens)]

    return {
        "right": right,
        "one in five wrong": spoilt,
        "of any number": lambda tokens: spoilt(tokens)[: draw.randrange(MOST_DRAFTS + 1)],
        "random": lambda tokens: [draw.randrange(VOCAB_SIZE) for _ in range(MOST_DRAFTS)],
        "the last token": lambda tokens: tokens[-1:] * MOST_DRAFTS,
        "one": lambda tokens: spoilt(tokens)[:1],
    }


def compare(engine: VLLMEngine, case: Case, due: Groups, guess: Guess, accept: Any = accept_by_loops) -> list[int]:
    """Sample ``case`` with the drafts that ``guess`` returns, and check that the tokens are those of ``due``,
    completions sampled without drafts, and that log-probabilities differ only by rounding. Returns how many tokens each
    verification of drafts gave."""
    with keyed_sampling(engine, accept) as taken, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drafter, "guess", staticmethod(guess))
        found = engine.generate(*case[:3], adapter=case.adapter)
    for mine, theirs in zip(flat(found), flat(due), strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.finished == theirs.finished
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    return taken


DRAFTERS = ("right", "one in five wrong", "of any number", "random", "the last token", "one")


@pytest.mark.parametrize(
    ("name", "drafter"),
    [
        pytest.param(name, drafter, marks=[] if name == "plain" or drafter == "one in five wrong" else pytest.mark.long)
        for name in CASES
        for drafter in DRAFTERS
    ],
)
def test_tokens_are_those_without_speculation(engine, plain, name, drafter):
    taken = compare(engine, CASES[name], plain[name], drafters(CASES[name], plain[name])[drafter])
    if drafter == "right" and CASES[name].sampling.max_tokens > 2:
        assert sum(taken) > 2 * len(taken), "several tokens are accepted at once"


def test_what_is_compared_has_every_kind_of_end(engine, plain, monkeypatch):
    ends = {each.tokens[-1] in END_TOKENS for name in ("plain", "base", "cool") for each in flat(plain[name])}
    assert ends == {True, False}
    assert any(len(each.tokens) == 30 for each in flat(plain["longest"])), "as long as the model takes"
    assert any(each.finished and each.tokens[-1] not in END_TOKENS for each in flat(plain["stop strings"]))
    scheduler, preempted = engine._scheduler(), []
    preempt = scheduler._preempt_request
    monkeypatch.setattr(scheduler, "_preempt_request", lambda *a, **k: (preempted.append(a), preempt(*a, **k))[1])
    case = CASES["preempted"]
    compare(engine, case, plain["preempted"], drafters(case, plain["preempted"])["one in five wrong"])
    assert len(preempted) > 3


def one_too_many(sampled: Tensor, inputs: Tensor, rows: Tensor, starts: Tensor, most: int) -> tuple[Tensor, Tensor]:
    _, counts = accept_by_loops(sampled, inputs, rows, starts, most)
    places = (starts[:-1, None] + torch.arange(most + 1)).clamp(max=len(sampled) - 1)
    return sampled[places], (counts + 1).minimum(starts.diff())


def drafts_themselves(
    sampled: Tensor, inputs: Tensor, rows: Tensor, starts: Tensor, most: int
) -> tuple[Tensor, Tensor]:
    """Accept all drafts, whatever was sampled, as a faulty verification would."""
    places = (starts[:-1, None] + torch.arange(most + 1)).clamp(max=len(sampled) - 1)
    follow = inputs[rows].roll(-1).to(sampled.dtype)
    follow[starts[1:].long() - 1] = sampled[starts[1:].long() - 1]
    return follow[places], starts.diff()


@pytest.mark.parametrize("accept", [one_too_many, drafts_themselves])
def test_a_wrong_verifier_is_found(engine, plain, accept):
    case = CASES["plain"]
    with pytest.raises(AssertionError):
        compare(engine, case, plain["plain"], drafters(case, plain["plain"])["one in five wrong"], accept)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_no_token_of_100_000_is_another(checkpoints):
    cases = {str(seed): Case(some_prompts(*range(1, 33)), Sampling(40, 96), seed) for seed in range(5)}
    due = without_speculation(checkpoints, cases)
    engine, compared, verified, steps = make_engine(checkpoints, speculative_config=SPECULATION), 0, 0, 0
    for (name, case), drafter in zip(cases.items(), DRAFTERS, strict=False):
        taken = compare(engine, case, due[name], drafters(case, due[name])[drafter])
        compared += sum(len(each.tokens) for each in flat(due[name]))
        verified, steps = verified + sum(taken), steps + len(taken)
    engine.close()
    print(f"{compared} tokens compared, {verified} tokens in {steps} verifications")
    assert compared >= 100_000


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can speculate")
def test_speculation_is_refused_where_it_cannot_be(checkpoints):
    engine = VLLMEngine(speculation="on")
    with pytest.raises(ValueError, match=r"engine\.speculation is on, which needs a CUDA GPU; set it to off"):
        engine.start(make_policy(checkpoints["dense"]), max_model_len=MAX_MODEL_LEN)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can speculate")
def test_an_engine_that_cannot_speculate_decides_against_it_and_says_why(checkpoints, caplog):
    engine = VLLMEngine(speculation="auto", kv_cache_bytes=2**24, max_num_seqs=4)
    assert not engine.speculates
    assert not engine.memory.speculates
    with caplog.at_level("INFO"):
        engine.start(make_policy(checkpoints["dense"]), max_model_len=MAX_MODEL_LEN)
    engine.close()
    assert "engine.speculation is auto: off, because it needs a CUDA GPU" in caplog.text
