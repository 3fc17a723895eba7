"""Log-probabilities that the scheduler collects are those of the sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from qerl_pl.rollout.vllm import VLLMEngine
from tests.rollout.conftest import BLOCK_SIZE, MAX_MODEL_LEN, make_policy

pytestmark = pytest.mark.vllm

BLOCK, MAX_LENGTH = 4, 60  # of the KV cache, in tokens; of a request


def make_request(name: str, prompt: list[int]) -> Any:
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    params = SamplingParams(max_tokens=MAX_LENGTH)
    return Request(name, list(prompt), params, None, block_hasher=get_request_block_hasher(BLOCK, sha256))


@pytest.fixture(scope="module")
def core(checkpoints):
    """What vLLM makes a scheduler from."""
    engine = VLLMEngine(block_size=BLOCK_SIZE, max_num_seqs=8, kv_cache_bytes=2**20)
    engine.start(make_policy(checkpoints["dense"]), max_model_len=MAX_MODEL_LEN)
    yield engine._core().engine_core
    engine.close()


@pytest.fixture
def scheduler(core):
    """One of its own, with requests a and b that want two tokens each."""
    scheduler = type(core.scheduler)(
        vllm_config=core.vllm_config,
        kv_cache_config=core.scheduler.kv_cache_config,
        structured_output_manager=core.structured_output_manager,
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
    )
    for name in ("a", "b"):
        request = make_request(f"{name}-{'0' * 8}", [3, 4, 5])
        request.max_tokens, request.sampling_params.logprobs = 2, 0
        scheduler.add_request(request)
    return scheduler


def answer(sampled: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]) -> Any:
    """What a model says of a step: a row for each request, with a token or, in the middle of a prompt, with none."""
    import numpy as np
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

    values = np.array(logprobs, dtype=np.float32)
    names = [f"{name}-{'0' * 8}" for name in ("a", "b")]
    return ModelRunnerOutput(
        names,
        {name: row for row, name in enumerate(names)},
        [list(tokens) for tokens in sampled],
        LogprobsLists(np.zeros_like(values, dtype=np.int64), values, np.ones(len(values), dtype=np.int64)),
    )


def test_log_probabilities_go_with_their_tokens_though_steps_are_scheduled_ahead(scheduler):
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first.total_num_scheduled_tokens == 6
    assert second.total_num_scheduled_tokens == 2, "before the first has an answer"
    found = scheduler.update_from_output(first, answer([[7], [8]], [[-1.5], [-2.5]]))
    assert all(output.new_logprobs is None for output in found[0].outputs)
    scheduler.update_from_output(second, answer([[9], [9]], [[-0.5], [-0.25]]))
    assert scheduler.take_logprobs() == {"a": [-1.5, -0.5], "b": [-2.5, -0.25]}
    assert scheduler.take_logprobs() == {}
    assert not scheduler.has_unfinished_requests()


def test_a_row_without_a_token_has_no_log_probability(scheduler):
    step = scheduler.schedule()
    scheduler.update_from_output(step, answer([[7], []], [[-1.5], [-2.5]]))
    assert scheduler.take_logprobs() == {"a": [-1.5]}


def test_rows_of_several_tokens_go_vllms_way(scheduler):
    step = scheduler.schedule()
    found = scheduler.update_from_output(step, answer([[7], [8]], [[-1.5, -3.0], [-2.5, -4.0]]))
    assert [output.new_logprobs.logprobs.tolist() for output in found[0].outputs] == [[[-1.5, -3.0]], [[-2.5, -4.0]]]
    assert scheduler.take_logprobs() == {}
