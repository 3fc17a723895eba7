"""What the scheduler skips changes nothing: a manager that is spared calls ends up like another."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from qerl_pl.rollout.vllm import VLLMEngine
from tests.rollout.conftest import BLOCK_SIZE, MAX_MODEL_LEN, make_policy

pytestmark = pytest.mark.vllm

BLOCK, MAX_LENGTH = 4, 60


def make_manager(num_blocks: int, *, caching: bool, spared: bool) -> Any:
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from qerl_pl.rollout.vllm.scheduler import skip_unchanged

    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    manager = KVCacheManager(config, MAX_LENGTH, BLOCK, BLOCK, enable_caching=caching)
    if spared:
        skip_unchanged(manager, MAX_LENGTH)
    return manager


def make_request(name: str, prompt: list[int]) -> Any:
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    params = SamplingParams(max_tokens=MAX_LENGTH)
    return Request(name, list(prompt), params, None, block_hasher=get_request_block_hasher(BLOCK, sha256))


def admit(manager: Any, request: Any) -> bool:
    """The way of a request that waits: what is cached is shared, the rest gets blocks."""
    blocks, cached = manager.get_computed_blocks(request)[:2]
    new = manager.allocate_slots(
        request, request.num_tokens - cached, num_new_computed_tokens=cached, new_computed_blocks=blocks
    )
    if new is not None:
        request.num_computed_tokens = request.num_tokens
    return new is not None


def decode(manager: Any, request: Any, token: int) -> bool:
    """The way of a request that runs."""
    request.append_output_token_ids(token)
    new = manager.allocate_slots(request, 1, num_lookahead_tokens=0)
    if new is not None:
        request.num_computed_tokens += 1
        manager.cache_blocks(request, request.num_computed_tokens)
    return new is not None


def state(manager: Any, requests: dict[str, Any]) -> tuple[Any, ...]:
    held = {name: manager.get_block_ids(name) for name in requests}
    return held, manager.block_pool.get_num_free_blocks(), len(manager.block_pool.cached_block_hash_to_block)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_a_spared_manager_holds_the_same_blocks_at_every_step(seed, caching):
    draw = random.Random(seed)
    managers = [make_manager(24, caching=caching, spared=spared) for spared in (False, True)]
    running: list[dict[str, Any]] = [{}, {}]
    prompts = [[draw.randrange(3) for _ in range(draw.randrange(1, 14))] for _ in range(4)]
    refused = 0
    for step in range(150):
        before = len(running[0])
        if before < 6 and draw.random() < 0.3:
            name, prompt = f"{step}", draw.choice(prompts)
            done = []
            for manager, requests in zip(managers, running, strict=True):
                request = make_request(name, prompt)
                done.append(admit(manager, request))
                if done[-1]:
                    requests[name] = request
            assert done[0] == done[1]
        for name in list(running[0]):
            token, ends = draw.randrange(3), draw.random() < 0.05
            for manager, requests in zip(managers, running, strict=True):
                request = requests[name]
                if ends or request.num_tokens + 1 >= MAX_LENGTH or not decode(manager, request, token):
                    refused += not ends
                    manager.free(requests.pop(name))
        assert state(managers[0], running[0]) == state(managers[1], running[1])
    assert refused, "a full cache belongs to what is tested"


def test_most_calls_of_a_request_that_runs_are_spared():
    manager = make_manager(24, caching=True, spared=False)
    from qerl_pl.rollout.vllm.scheduler import skip_unchanged

    calls = []
    allocate = manager.allocate_slots
    manager.allocate_slots = functools.wraps(allocate)(
        lambda *args, **more: calls.append(args) or allocate(*args, **more)
    )
    skip_unchanged(manager, MAX_LENGTH)
    request = make_request("a", [1, 2, 3])
    assert admit(manager, request)
    calls.clear()
    assert all(decode(manager, request, 0) for _ in range(8 * BLOCK))
    assert len(calls) == 2 * 8, "one call for a token that needs a block, one for a token that fills it"


def test_layers_with_a_window_are_left_to_vllm():
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    from qerl_pl.rollout.vllm.scheduler import skip_unchanged

    spec = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=8)
    config = KVCacheConfig(24, [], [KVCacheGroupSpec(["layer"], spec)])
    manager = KVCacheManager(config, MAX_LENGTH, BLOCK, BLOCK)
    skip_unchanged(manager, MAX_LENGTH)
    assert "allocate_slots" not in vars(manager)


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
