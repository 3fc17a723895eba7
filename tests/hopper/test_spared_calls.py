"""To save time of the host, this project skips calls in vLLM's scheduler and KV-cache manager. Steps, cache blocks and
tokens are the same as with these calls."""

from __future__ import annotations

import functools
import random
from types import SimpleNamespace
from typing import Any

import pytest

from qerl_pl.hopper import engine
from tests.rollout.test_vllm_scheduler import Played, core, make_request, make_scheduler  # noqa: F401

pytestmark = pytest.mark.vllm

BLOCK, MAX_LENGTH = 4, 60


def spare(manager: Any) -> None:
    engine.spare(SimpleNamespace(kv_cache_manager=manager, max_model_len=MAX_LENGTH, defer_block_free=False))


def make_manager(num_blocks: int, *, caching: bool, spared: bool) -> Any:
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    manager = KVCacheManager(config, MAX_LENGTH, BLOCK, BLOCK, enable_caching=caching)
    if spared:
        spare(manager)
    return manager


def admit(manager: Any, request: Any) -> bool:
    """Admit a waiting request: it shares the KV-cache blocks of its prompt that are cached, and gets new blocks for the
    rest. Returns False, and admits nothing, if there are too few blocks."""
    blocks, cached = manager.get_computed_blocks(request)[:2]
    new = manager.allocate_slots(
        request, request.num_tokens - cached, num_new_computed_tokens=cached, new_computed_blocks=blocks
    )
    if new is not None:
        request.num_computed_tokens = request.num_tokens
    return new is not None


def decode(manager: Any, request: Any, token: int) -> bool:
    """Add a token to a running request; returns False if the token needs a new block and there is none."""
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


@pytest.mark.parametrize("most_drafts", [0, pytest.param(1, marks=pytest.mark.long), 7])
@pytest.mark.parametrize("seed", range(4))
def test_a_spared_scheduler_schedules_the_same_steps(core, most_drafts, seed):  # noqa: F811
    """vLLM's scheduler, and the same scheduler in which this project skips calls, get the same requests and have to
    schedule the same steps. Steps are scheduled ahead, as if all drafts of earlier steps were accepted, so a request's
    number of computed tokens can also decrease. Requests also end by a token, are preempted, and wait for a place."""
    both = [Played(make_scheduler(core, num_blocks=[16, 64][seed % 2]), most_drafts, seed) for _ in range(2)]
    engine.spare(both[1].scheduler)
    scheduler, lean = both[1].scheduler, []
    decoding_step = scheduler._decoding_step
    scheduler._decoding_step = lambda: (step := decoding_step(), step and lean.append(len(scheduler.waiting)))[0]
    while both[0].requests < 60 or both[0].scheduler.has_unfinished_requests():
        for played in both:
            if played.requests < 60 and len(played.scheduler.requests) < [8, 10][seed // 2]:
                played.add()
            played.step()
        assert both[0].described == both[1].described
        assert both[0].blocks() == both[1].blocks()
        pools = [played.scheduler.kv_cache_manager.block_pool for played in both]
        assert pools[0].get_num_free_blocks() == pools[1].get_num_free_blocks()
        assert pools[0].cached_block_hash_to_block._cache.keys() == pools[1].cached_block_hash_to_block._cache.keys()
    for played in both:
        while played.ahead:
            played.answer(played.ahead.popleft())
    assert both[0].tokens == both[1].tokens
    assert both[0].scheduler.take_logprobs() == both[1].scheduler.take_logprobs()
    assert len(both[0].tokens) == 60
    assert not most_drafts or both[0].rejected > 30
    assert most_drafts or len(lean) > 30
    assert seed != 1 or lean, "7 or 8 requests have no drafts, and the KV cache has room"
    assert seed != 3 or any(lean), "requests also wait while all places are taken"


def test_most_calls_of_a_request_that_runs_are_spared():
    manager = make_manager(24, caching=True, spared=False)
    calls = []
    allocate = manager.allocate_slots
    manager.allocate_slots = functools.wraps(allocate)(
        lambda *args, **more: calls.append(args) or allocate(*args, **more)
    )
    spare(manager)
    request = make_request("a", [1, 2, 3])
    assert admit(manager, request)
    calls.clear()
    assert all(decode(manager, request, 0) for _ in range(8 * BLOCK))
    assert len(calls) == 2 * 8, "one call for a token that needs a block, one for a token that fills it"


def test_layers_with_a_window_are_left_to_vllm():
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    spec = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=8)
    config = KVCacheConfig(24, [], [KVCacheGroupSpec(["layer"], spec)])
    manager = KVCacheManager(config, MAX_LENGTH, BLOCK, BLOCK)
    spare(manager)
    assert "allocate_slots" not in vars(manager)
