"""Measure what the canary compares, in healthy and in broken engines: python -m tests.bench.bench_canary

The canary is the callback that stops a run whose engine does not compute with the current policy: it compares the
engine's log-probabilities with the trainer's. Here engines have a random base and, in turn, several adapters as strong
as trained ones. One JSON line for each state of the engine (healthy, or with one fault) has the smallest, the median
and the largest mean difference over the adapters, in nats. The checksums of weights, which detect most of these faults
too, are not compared here. The limits of ``qerl_pl.rollout.comparison`` have to lie between the values of healthy and
of broken engines.
"""

import statistics
from collections import defaultdict
from typing import Any

import torch

from qerl_pl.noise.norm_noise import NormNoise
from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.policy import Policy, load_policy
from qerl_pl.rollout.comparison import PROBE, score_gaps, trainers_engine
from qerl_pl.rollout.loop import RolloutLoop
from qerl_pl.rollout.probe import find_strength, probe_adapter
from qerl_pl.rollout.vllm import VLLMEngine
from qerl_pl.tools.tiny import make_tokenizer
from tests.bench.harness import DEVICE, FORMATS, RANK, emit, parser_with
from tests.callbacks.faults import FAULTS, Instead
from tests.random_checkpoints import write_random_checkpoint
from tests.random_models import fixed_tokens

TRAINED = 1e-3 * 32**0.5  # strength of rank 32 and B of std 1e-3, as after some hundred AdamW steps at 1e-5
NUM_TOKENS = 160  # the canary's
BROKEN = ("old_adapter", "no_adapter", "swapped_matrix", "unused_adapter", "stale_prefixes")


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    parser = parser_with(__doc__, "--size", "--folder", adapters=5)
    parser.add_argument("--layers", type=int, help="number of blocks, instead of the size's")
    parser.add_argument("--format", choices=FORMATS, default="nvfp4")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    base = write_random_checkpoint(args.folder, args.size, args.format, num_layers=args.layers)
    lora = LoraSettings(rank=RANK, alpha=RANK)
    policy = load_policy(str(base), dtype=getattr(torch, args.dtype), lora=lora, seed=0, device=DEVICE)
    engine = VLLMEngine(kv_cache_bytes=2**28)
    engine.start(policy, max_model_len=2 * NUM_TOKENS)
    samples: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for seed in range(args.adapters):
        for state, gaps in states(engine, policy, seed=seed).items():
            for comparison, gap in gaps.items():
                samples[state][comparison].append(gap)
    engine.close()
    shape = {"size": args.size, "layers": policy.num_layers, "tokens": NUM_TOKENS, "adapters": args.adapters}
    for state, comparisons in samples.items():
        nats = {name: [min(gaps), statistics.median(gaps), max(gaps)] for name, gaps in comparisons.items()}
        emit(f"canary/{state}", shape, args.dtype, format=args.format, nats=nats)


def states(engine: VLLMEngine, policy: Policy, *, seed: int) -> dict[str, dict[str, float]]:
    """Return, for one random adapter, the mean difference in nats between the engine's and the trainer's
    log-probabilities in the comparisons that the canary makes (the check that the engine has the trainer's weights): by
    state of the engine, healthy or with one fault, and by comparison, with and without the adapter."""
    adapter = probe_adapter(policy, strength=TRAINED, seed=seed)
    policy.load_adapter_state(adapter)
    old = {name: 0.9 * tensor if ".lora_B" in name else tensor for name, tensor in adapter.items()}

    def measure(faulty: Any, noise: NormNoise) -> dict[str, float]:
        loop = RolloutLoop(faulty, (), make_tokenizer())
        loop.sync(adapter, noise)
        probe: dict[str, Any] = {"tokens": fixed_tokens(policy.config.vocab_size, NUM_TOKENS), "seed": 1000 + seed}
        with trainers_engine(policy, noise, max_model_len=2 * NUM_TOKENS) as oracle:
            strength = find_strength(oracle, policy, dtype=policy.dtype, **probe)
            gaps = score_gaps(loop, oracle, policy, policy.dtype, **probe, strength=strength, scores=True)
        nats = {what: gap.nats for what, gap in gaps.items()}
        return nats | ({"what that adapter changes": gaps[PROBE].change} if PROBE in gaps else {})

    gaps = {"healthy": measure(engine, NormNoise()), "healthy, with noise": measure(engine, NormNoise(1e-2, seed))}
    for fault in BROKEN:
        gaps[fault] = measure(FAULTS[fault](engine, old), NormNoise())
    assert isinstance(engine._llm, Instead)
    engine._llm = engine._llm._real  # the last fault is in the engine itself
    return gaps


if __name__ == "__main__":
    main()
