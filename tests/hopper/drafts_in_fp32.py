"""Compare what a GPU engine samples in fp32 with speculation and without: python -m tests.hopper.drafts_in_fp32
CHECKPOINT

The test that uses this module runs it in a process of its own. The variables in ``ENVIRONMENT`` keep attention from
multiplying in TF32, but Triton reads them only when it compiles a kernel, and in a shared process another test may have
compiled the kernel before.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

import torch

from qerl_pl.common.types import Completion
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.vllm import VLLMEngine
from tests.rollout.conftest import MAX_MODEL_LEN, make_policy, random_adapter, some_prompts

ENVIRONMENT = {"TRITON_F32_DEFAULT": "ieee"}
MAX_NUM_SEQS = 40
SEEDS = 25  # 4700 completions; the test requires 100,000 tokens of them
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


def start(
    base: str, dtype: torch.dtype, *, speculation: bool, cache: int = 2**24, places: int = MAX_NUM_SEQS
) -> VLLMEngine:
    """Start an engine with a random policy and adapter."""
    policy = make_policy(base, dtype=dtype).cuda()
    policy.load_adapter_state(random_adapter(policy, seed=1))
    speculates = "on" if speculation else "off"
    engine = VLLMEngine(kv_cache_bytes=cache, max_num_seqs=places, speculation=speculates)
    engine.start(policy, max_model_len=MAX_MODEL_LEN)
    return engine


def flat(groups: Iterable[list[Completion]]) -> list[Completion]:
    """Join groups of completions."""
    return [each for group in groups for each in group]


def late_siblings(base: str) -> tuple[int, int]:
    """Complete a prompt 40 times, four at a time, at so low a temperature that many completions repeat most of an
    earlier one. Returns how often drafts were verified, and how many tokens these verifications gave: about two per
    verification if drafts are found in the earlier completions, hardly more than one if they are found only in the text
    of the completion itself."""
    engine = start(base, torch.float32, speculation=True, places=4)
    engine.generate(PROMPTS[3:], Sampling(40, 64, temperature=0.01), 0)
    counts = engine.draft_counts
    engine.close()
    return counts.verified.total(), counts.emitted.total()


def main() -> None:
    """Print one JSON line."""
    found: dict[bool, list[Completion]] = {}
    drafted: dict[bool, int] = {}
    for speculation in (False, True):
        engine = start(sys.argv[1], torch.float32, speculation=speculation, cache=3 * 2**20)
        calls = [engine.generate(PROMPTS, way, seed) for way in WAYS for seed in range(SEEDS)]
        calls += [engine.generate(some_prompts(*range(1, 33)), Sampling(1, 64), seed) for seed in range(SEEDS)]
        found[speculation] = [each for call in calls for each in flat(call)]
        drafted[speculation] = engine.draft_counts.emitted.total() - engine.draft_counts.verified.total()
        engine.close()
    others, largest = 0, 0.0
    for mine, due in zip(found[True], found[False], strict=True):
        same = next((i for i, pair in enumerate(zip(mine.tokens, due.tokens, strict=False)) if len({*pair}) > 1), None)
        others += mine.tokens != due.tokens
        pairs = zip(mine.logprobs[:same], due.logprobs[:same], strict=True)
        largest = max([largest, *(abs(a - b) for a, b in pairs)])
    line = {
        "tokens": sum(len(each.tokens) for each in found[False]),
        "completions": len(found[False]),
        "other_completions": others,
        "largest_difference": largest,
        "accepted": [drafted[False], drafted[True]],
        "late": late_siblings(sys.argv[1]),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
