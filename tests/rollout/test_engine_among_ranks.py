"""vLLM on several ranks: each rank starts its own engine, in a process with the trainer's process group, and closing
the engine leaves this group as it is."""

import os
from functools import partial

import pytest
import torch
import torch.distributed as dist

from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.policy import load_policy
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.vllm import VLLMEngine
from tests.two_ranks import on_two_ranks

PROMPTS = [[1, 2, 3], [4, 5], [1, 2, 3, 4], [5, 4]]
SAMPLING = Sampling(num_completions=2, max_tokens=6)


def sampled(base: str, prompts: list[list[int]], num_calls: int = 1) -> list[list[list[int]]]:
    """Sample ``num_calls`` times; returns the tokens [prompts][completions] of the last call."""
    lora, device = LoraSettings(rank=4, alpha=8), torch.device("cpu")
    policy = load_policy(base, dtype=torch.float32, lora=lora, seed=1, device=device)
    engine, groups = VLLMEngine(max_num_seqs=8), []
    engine.start(policy, max_model_len=32)
    for _ in range(num_calls):
        groups = engine.generate(prompts, SAMPLING, seed=3)
    engine.close()
    return [[list(completion.tokens) for completion in group] for group in groups]


def on_rank(rank: int, base: str) -> dict[str, object]:
    """Sample this rank's share of the prompts, and report whether the process group and the environment variables are
    as before. One rank makes more calls than the other, so a rank's engine must not wait for the other's."""
    groups = sampled(base, PROMPTS[rank::2], num_calls=1 + rank)
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)  # the group is still there
    return {
        "groups": groups,
        "total": total.item(),
        "variables": [os.environ.get("RANK"), os.environ.get("LOCAL_RANK")],
    }


@pytest.mark.long
@pytest.mark.vllm
def test_a_batch_is_sampled_the_same_however_many_ranks_share_it(checkpoints, tmp_path):
    shares = on_two_ranks(partial(on_rank, base=checkpoints["nvfp4"]), tmp_path)
    group = dist.is_initialized()
    whole = sampled(checkpoints["nvfp4"], PROMPTS)
    assert [shares[row % 2]["groups"][row // 2] for row in range(4)] == whole
    assert [share["total"] for share in shares] == [3, 3]
    assert [share["variables"] for share in shares] == [[None, None], [None, None]]
    assert dist.is_initialized() == group, "a group that vLLM made for itself goes with it"
