"""On a GPU, speculation does not change the tokens of a policy in fp32, and equal calls give equal bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from qerl_pl.common.types import Completion
from qerl_pl.hopper import draft_guard, driver
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.vllm import VLLMEngine
from tests.rollout.conftest import MAX_MODEL_LEN, make_policy, random_adapter, some_prompts

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.gpu,
    pytest.mark.skipif(not driver.is_available(torch.device("cuda", 0)), reason="needs Hopper"),
]
PROMPTS = some_prompts(1, 20, 40, 70)
WAYS = [
    Sampling(2, 64),
    Sampling(8, 64),
    Sampling(1, 64, temperature=0),
    Sampling(8, 64, temperature=0.4),
    Sampling(4, 48, top_k=9, top_p=0.8),
    Sampling(8, 64, stop=("w11 w", "w23")),
    Sampling(8, MAX_MODEL_LEN - 70),
]


def start(base: str, dtype: torch.dtype, *, speculation: bool, cache: int = 2**24) -> VLLMEngine:
    policy = make_policy(base, dtype=dtype).cuda()
    policy.load_adapter_state(random_adapter(policy, seed=1))
    engine = VLLMEngine(kv_cache_bytes=cache, max_num_seqs=40, speculation="on" if speculation else "off")
    engine.start(policy, max_model_len=MAX_MODEL_LEN)
    return engine


def flat(groups: list[list[Completion]]) -> list[Completion]:
    return [each for group in groups for each in group]


def test_no_token_of_100_000_is_another_in_fp32(checkpoints):
    """At most 1 completion in 1000 may differ, because the sums of logit and noise of two tokens can be equal up to
    rounding. The log-probabilities of such a completion are compared up to the first token that differs."""
    found: dict[bool, list[Completion]] = {}
    for speculation in (False, True):
        engine = start(checkpoints["dense"], torch.float32, speculation=speculation, cache=3 * 2**20)
        calls = [engine.generate(PROMPTS, way, seed) for way in WAYS for seed in range(60)]
        calls += [engine.generate(some_prompts(*range(1, 33)), Sampling(1, 64), seed) for seed in range(60)]
        found[speculation] = [each for call in calls for each in flat(call)]
        engine.close()
        assert (engine.draft_counts.emitted.total() > engine.draft_counts.verified.total()) == speculation
    others = 0
    for mine, due in zip(found[True], found[False], strict=True):
        same = next((i for i, pair in enumerate(zip(mine.tokens, due.tokens, strict=False)) if len({*pair}) > 1), None)
        others += mine.tokens != due.tokens
        assert mine.logprobs[:same] == pytest.approx(due.logprobs[:same], abs=1e-4)
    compared = sum(len(each.tokens) for each in found[False])
    print(f"{compared} tokens of {len(found[False])} completions compared, {others} completions differ")
    assert compared >= 100_000
    assert others <= len(found[False]) / 1000


@pytest.fixture(scope="module")
def engine(unpadded) -> Iterator[VLLMEngine]:
    engine = start(str(unpadded), torch.bfloat16, speculation=True)
    yield engine
    engine.close()


def test_equal_calls_give_equal_bits_whatever_was_sampled_before(engine):
    found = [engine.generate(PROMPTS, way, 3) for way in WAYS]
    engine.generate(some_prompts(*range(1, 50)), Sampling(3, 40), 4)
    engine.score([[*prompt, 9, 10] for prompt in PROMPTS])
    assert [engine.generate(PROMPTS, way, 3) for way in reversed(WAYS)][::-1] == found


def test_scores_are_those_without_speculation_also_of_a_cached_prompt(engine, unpadded):
    texts = [[*prompt, 9, 10, 11] for prompt in PROMPTS] + [[*PROMPTS[3], 9, 10, 11]] * 3
    scores = engine.score(texts)
    for row, tokens in zip(scores, texts, strict=True):
        assert len(row) == len(tokens) - 1
    assert scores[-1] == scores[3]
    sampled = flat(engine.generate(PROMPTS, Sampling(4, 32), 5))
    scored = engine.score([[*PROMPTS[place // 4], *each.tokens] for place, each in enumerate(sampled)])
    for each, row in zip(sampled, scored, strict=True):
        assert row[-len(each.tokens) :] == pytest.approx(each.logprobs, abs=0.1)


def test_most_of_a_text_that_repeats_itself_is_drafted(engine):
    """Greedy completions of a small random model soon repeat the same tokens."""
    engine.draft_counts.clear()
    engine.generate(PROMPTS, Sampling(1, 80, temperature=0), 0)
    verified, emitted = engine.draft_counts.verified.total(), engine.draft_counts.emitted.total()
    print(f"{emitted} tokens in {verified} verifications")
    assert emitted > 1.2 * verified


def test_nothing_is_drafted_where_it_did_not_pay(engine):
    engine.draft_counts.clear()
    engine.draft_history = [[7000, 1000, 1000]] * len(draft_guard.CLASSES)
    try:
        engine.generate(PROMPTS, Sampling(8, 40), 0)
    finally:
        engine.draft_history = []
    assert not engine.draft_counts.verified
