"""On a GPU, speculation does not change the tokens of a policy in fp32, and equal calls give equal bits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from statistics import mean

import pytest
import torch

from qerl_pl.hopper import draft_guard, driver
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.vllm import VLLMEngine
from tests.bench.harness import child_environment
from tests.hopper.drafts_in_fp32 import ENVIRONMENT, PROMPTS, WAYS, flat, start
from tests.rollout.conftest import some_prompts

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.gpu,
    pytest.mark.skipif(not driver.is_available(torch.device("cuda", 0)), reason="needs Hopper"),
]


def test_no_token_of_100_000_is_another_in_fp32(checkpoints, tmp_path):
    """With speculation, at most 1 completion in 1000 may differ, because the sums of logit and noise of two tokens can
    be equal up to rounding. Log-probabilities are compared up to the first token that differs. If completions of one
    prompt are nearly equal, the drafts that are found in earlier ones have to be accepted."""
    command = [sys.executable, "-m", "tests.hopper.drafts_in_fp32", checkpoints["dense"]]
    environment = child_environment() | ENVIRONMENT | {"TRITON_CACHE_DIR": str(tmp_path)}
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    print(ended.stdout)
    line = json.loads(ended.stdout.splitlines()[-1])
    assert line["tokens"] >= 100_000
    assert line["other_completions"] <= line["completions"] / 1000
    assert line["largest_difference"] < 1e-4
    without, accepted = line["accepted"]
    assert without == 0 < accepted
    verified, tokens = line["late"]
    assert tokens > 1.5 * verified > 0


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


def test_scores_are_the_log_probabilities_of_samples_also_of_a_cached_prompt(engine):
    texts = [[*prompt, 9, 10, 11] for prompt in PROMPTS] + [[*PROMPTS[3], 9, 10, 11]] * 3
    scores = engine.score(texts)
    for row, tokens in zip(scores, texts, strict=True):
        assert len(row) == len(tokens) - 1
    assert scores[-1] == scores[3]
    sampled = flat(engine.generate(PROMPTS, Sampling(4, 32), 5))
    scored = engine.score([[*PROMPTS[place // 4], *each.tokens] for place, each in enumerate(sampled)])
    differences = [
        abs(score - logprob)
        for each, row in zip(sampled, scored, strict=True)
        for score, logprob in zip(row[-len(each.tokens) :], each.logprobs, strict=True)
    ]
    assert mean(differences) < 0.03  # bf16; a wrong row or position would change log-probabilities by about 1
    assert max(differences) < 0.3


def test_nothing_is_drafted_where_it_did_not_pay(engine):
    engine.draft_counts.clear()
    engine.draft_history = [[7000, 1000, 1000]] * len(draft_guard.CLASSES)
    try:
        engine.generate(PROMPTS, Sampling(8, 40), 0)
    finally:
        engine.draft_history = []
    assert not engine.draft_counts.verified
