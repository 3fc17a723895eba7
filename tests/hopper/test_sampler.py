"""On a GPU, this project's kernels compute the log-probabilities of sampled tokens in vLLM's sampler. Their results are
right, and requests that they do not support are left to vLLM's own code."""

from __future__ import annotations

import inspect
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from qerl_pl.hopper import patches
from tests.interpreter import interpreted
from tests.reference.token_scores import token_scores_reference

pytestmark = pytest.mark.vllm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(rows: int = 3, vocabulary: int = 300) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    logits = 5 * torch.randn(rows, vocabulary, generator=generator)
    return logits.to(DEVICE), torch.randint(vocabulary, (rows,), generator=generator).to(DEVICE)


@pytest.fixture
def sampler() -> ModuleType:
    """Import qerl_pl/hopper's module for vLLM's sampler."""
    with interpreted():
        return import_module("qerl_pl.hopper.sampler")


def test_a_sampled_token_has_its_log_probability(sampler):
    logits, tokens = draw()
    found = sampler.sampled_scores(logits, 0, tokens, [0, 1, 2, 3], expanded_idx_mapping=None)
    logprobs, ranks = token_scores_reference(logits, tokens)
    torch.testing.assert_close(found.logprobs[:, 0], logprobs.float())
    assert found.logprob_token_ids[:, 0].equal(tokens)
    assert found.selected_token_ranks.equal(ranks)
    assert found.cu_num_generated_tokens == [0, 1, 2, 3]


@pytest.mark.parametrize("more", [(2, 0, False), (0, 1, False), (0, 0, True)], ids=str)
def test_what_else_a_request_may_want_is_left_to_vllm(sampler, monkeypatch, more):
    theirs = inspect.signature(sampler.compute_topk_scores)
    monkeypatch.setattr(sampler, "compute_topk_scores", lambda *args, **given: theirs.bind(*args, **given))
    num_logprobs, named, logits_mode = more
    logits, tokens = draw()
    others = {"logprob_token_ids_state": "state", "expanded_idx_mapping": "mapping"}
    passed: Any = sampler.sampled_scores(
        logits, num_logprobs, tokens, None, max_per_req_token_ids=named, logits_mode=logits_mode, **others
    )
    given = (logits, num_logprobs, tokens, None, "state", "mapping", named, logits_mode)
    assert passed.arguments == theirs.bind(*given).arguments


def test_it_is_where_vllms_sampler_looks(sampler, monkeypatch):
    vllms: Any = import_module("vllm.v1.worker.gpu.sample.sampler")
    monkeypatch.setattr(vllms, "compute_topk_scores", sampler.compute_topk_scores)
    patches.parallel_token_scores()
    patches.parallel_token_scores()
    assert "compute_topk_scores" in vllms.Sampler.__call__.__code__.co_names
    assert vllms.compute_topk_scores is sampler.sampled_scores


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("rows", [1, 8, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_equals_vllms_own(sampler, rows, dtype):
    logits, tokens = draw(rows, 152064)
    logits = logits.to(dtype)
    ours, theirs = (each(logits, 0, tokens) for each in (sampler.sampled_scores, sampler.compute_topk_scores))
    torch.testing.assert_close(ours.logprobs, theirs.logprobs, rtol=1e-6, atol=1e-5)
    assert torch.equal(ours.selected_token_ranks, theirs.selected_token_ranks)
    assert torch.equal(ours.logprob_token_ids, theirs.logprob_token_ids)
