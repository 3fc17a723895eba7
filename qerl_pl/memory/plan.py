"""Predict a run's GPU memory in bytes at each moment at which it may be largest (``MOMENTS``)."""

from collections.abc import Mapping
from dataclasses import dataclass

from qerl_pl.memory import parts
from qerl_pl.memory.settings import EngineMemory, RunMemory
from qerl_pl.memory.shape import ModelShape

MOMENTS = {
    "start": "a fresh run's engine has started",
    "rollout": "the engine samples, or the trainer scores while the engine is awake",
    "teacher": "training: the teacher scores the completions",
    "head": "training: backward through the language-model head",
    "block": "training: backward through the last block",
    "step": "training: the optimizer steps",
}
TRAINING = ("head", "block", "step")
PASSES = (
    "engine's passes",
    "teacher's passes",
    "divergence",
    "block inputs",
    "blocks for backward",
    "backward",
    "optimizer's temporaries",
)
"""Parts of a run's memory that are freed in every pass, and therefore fragment the memory of torch's allocator."""


@dataclass(frozen=True)
class Plan:
    """Predicted bytes of GPU memory that every part of a run takes at each of the moments in ``MOMENTS``."""

    parts: Mapping[str, Mapping[str, int]]
    """Bytes of each part by moment; moments at which the part does not exist are left out."""
    run: RunMemory
    """Settings of the run that was planned; None and "auto" have been replaced by values."""
    shared: int = 0
    """Bytes of the 4-bit base weights that exist once and are used by both trainer and vLLM."""
    why: str = ""
    """Reason for the chosen level of gradient checkpointing, and its cost; empty if the settings gave the level."""

    def total(self, moment: str) -> int:
        """Return the bytes at one of ``MOMENTS``."""
        return sum(part.get(moment, 0) for part in self.parts.values())

    @property
    def moments(self) -> dict[str, str]:
        """Return the names of those of ``MOMENTS`` that occur in the run, with their meanings."""
        return {name: meaning for name, meaning in MOMENTS.items() if name != "teacher" or self.run.teacher}

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of one forward and backward pass."""
        assert self.run.micro_batch_tokens is not None
        return self.run.micro_batch_tokens

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of vLLM's KV cache; 0 without vLLM."""
        return (self.run.engine and self.run.engine.kv_cache_bytes) or 0

    @property
    def keeps_cache(self) -> bool:
        """Whether vLLM's KV cache stays allocated while the trainer works."""
        return self.run.engine is not None and self.run.engine.keeps_cache

    def summary(self) -> str:
        """Describe the plan in one line for the log."""
        cache, rollout, train = (size / 2**30 for size in (self.kv_cache_bytes, self.total("rollout"), self.train))
        return (
            f"memory plan: passes of {self.micro_batch_tokens} tokens, a KV cache of {cache:.1f} GiB"
            + (", which stays allocated" if self.keeps_cache else "")
            + f"; rollouts take {rollout:.1f} GiB, training {train:.1f} GiB"
            + (f", with one copy of {self.shared / 2**30:.1f} GiB of the base" if self.shared else "")
            + (self.why and f"; {self.why}")
        )

    @property
    def train(self) -> int:
        """Peak bytes of training, that is, of all moments except the engine's start and rollouts."""
        return max(self.total(moment) for moment in ("teacher", *TRAINING))

    @property
    def peak(self) -> int:
        """Peak bytes of the run."""
        return max(self.total(moment) for moment in MOMENTS)


def plan(shape: ModelShape, run: RunMemory) -> Plan:
    """Predict the GPU memory of a run whose memory settings all have values; ``fitting.fitted`` chooses those that the
    user has left open."""
    assert run.micro_batch_tokens is not None, "choose micro_batch_tokens first"
    sizes = {"CUDA, libraries": _at(parts.CONTEXT, *MOMENTS), "base": _at(shape.base_bytes, *MOMENTS)}
    sizes |= _adapter(shape, run)
    sizes |= _vllm(shape, run, run.engine) if run.engine else _transformers(shape, run)
    sizes |= _passes(shape, run, run.micro_batch_tokens) | _teacher(run, run.micro_batch_tokens)
    passes = [part for name, part in sizes.items() if name in PASSES]
    slack = {moment: int(parts.FRAGMENTATION * sum(part.get(moment, 0) for part in passes)) for moment in MOMENTS}
    needed = {name: part for name, part in {**sizes, "fragmentation": slack}.items() if any(part.values())}
    return Plan(needed, run, shared_base(shape, run))


def _at(size: int, *moments: str) -> dict[str, int]:
    return dict.fromkeys(moments, size)


def _adapter(shape: ModelShape, run: RunMemory) -> dict[str, dict[str, int]]:
    # The adapter of ``model.lora.start`` is in host memory. It is copied to the GPU only while log-probabilities of the
    # reference are computed. At that time there are no gradients, which are as large as the copy, so the copy adds
    # nothing to the peak.
    values = parts.adapter_values(shape, run)
    return {
        "adapter, fp32": _at(4 * values, *MOMENTS),
        "optimizer state": _at(run.state_bytes * values, "rollout", "teacher", *TRAINING),
        "gradients": _at(4 * values, *TRAINING),
        "optimizer's temporaries": _at(4 * values, "step"),  # root of the second moments of all parameters
    }


def _vllm(shape: ModelShape, run: RunMemory, engine: EngineMemory) -> dict[str, dict[str, int]]:
    assert engine.kv_cache_bytes is not None, "choose kv_cache_bytes first"
    itemsize, largest = engine.itemsize(run.itemsize), parts.engine_pass(shape, run, engine)
    awake = ("start", "rollout")
    weights = awake if engine.sleep_level else tuple(MOMENTS)
    base = parts.engine_base(shape, run, engine) - shared_base(shape, run)
    state = parts.engine_state(shape, engine, length=run.max_model_len)
    workspace = parts.expert_workspace(shape, itemsize, batched_tokens=engine.batched_tokens)
    checked = parts.forward_only(shape, run.checked_tokens, run.itemsize)
    token = parts.kv_token_bytes(shape, itemsize, engine.kv_cache_dtype)
    # if the cache has no size yet, as many tokens as its sequences can have
    cached = engine.kv_cache_bytes // token or engine.max_num_seqs * run.max_model_len
    return {
        "engine's base": _at(base, *weights),
        "engine's adapter": _at(parts.adapter_slots(shape, run, engine), *weights),
        "KV cache": _at(engine.kv_cache_bytes, *(MOMENTS if engine.keeps_cache else awake)),
        "engine's state, CUDA graphs": _at(state, *MOMENTS),
        "engine's routes": _at(run.router_replay * parts.recorded_routes(shape, cached), *MOMENTS),
        "experts' workspace": _at(workspace, *MOMENTS),
        "engine's passes": {"start": largest, "rollout": max(largest, checked)},
    }


def shared_base(shape: ModelShape, run: RunMemory) -> int:
    """Return the bytes of the 4-bit base weights of which trainer and vLLM share one copy, counted in "base"."""
    engine = run.engine  # the kernels that read the trainer's weights multiply by 16-bit activations only
    return shape.fitting_bytes if engine and engine.one_copy and engine.itemsize(run.itemsize) == 2 else 0


def _transformers(shape: ModelShape, run: RunMemory) -> dict[str, dict[str, int]]:
    """Predict the memory of rollouts that transformers samples: a KV cache; a second copy of the cache of one block,
    which transformers makes when it appends a token; and the largest of fp32 logits, the forward pass over the prompts,
    and the trainer's pass that checks log-probabilities of completions."""
    rows = min(run.rows, max(1, run.batch_tokens // run.longest_row))
    # a sequence of more than ``batch_tokens`` tokens gets a batch of its own
    tokens = min(run.rows * run.max_model_len, max(run.batch_tokens, run.max_model_len))
    cache = tokens * parts.kv_token_bytes(shape, run.itemsize)
    cache += rows * shape.recurrent.num_layers * parts.recurrent_state(shape, run.itemsize)
    logits = 3 * 4 * rows * shape.vocabulary
    prompts = parts.forward_only(shape, rows * run.prompt_tokens, run.itemsize)
    checked = parts.forward_only(shape, run.checked_tokens, run.itemsize)
    return {
        "KV cache": _at(cache + cache // shape.num_layers, "rollout"),
        "engine's passes": _at(max(logits, prompts, checked), "rollout"),
    }


def _teacher(run: RunMemory, tokens: int) -> dict[str, dict[str, int]]:
    """Predict the memory of a teacher: its weights, its forward passes and, for a divergence over the whole vocabulary,
    its hidden states and the chunks of logits."""
    if (teacher := run.teacher) is None:
        return {}
    shape, on_gpu = teacher.shape, teacher.keep != "host"
    tokens = min(tokens, run.rows * run.longest_row)
    sizes = {
        "teacher": _at(shape.base_bytes, *(MOMENTS if on_gpu else ("teacher",))),
        "teacher's passes": _at(parts.forward_only(shape, tokens, run.itemsize), "teacher"),
    }
    if teacher.states:
        states = run.rows * run.completion_tokens + (0 if on_gpu else shape.vocabulary)
        chunk = min(parts.CHUNK_BYTES, 4 * tokens * shape.vocabulary)
        sizes["teacher's states"] = _at(run.itemsize * shape.hidden * states, "teacher", *TRAINING)
        sizes["divergence"] = _at(5 * chunk, "head")
    return sizes


def _passes(shape: ModelShape, run: RunMemory, tokens: int) -> dict[str, dict[str, int]]:
    tokens = min(tokens, run.rows * run.longest_row)
    how = run.recompute(shape.num_layers)
    assert how is not None, "choose gradient_checkpointing first"
    head, block = parts.blocks_kept(shape, run, tokens, how=how)
    routes = run.router_replay * parts.routes(shape, run.rows * run.longest_row, tokens)
    return {
        "routes": _at(routes, "teacher", *TRAINING),
        "block inputs": _at(parts.checkpoints(shape, tokens, run.itemsize, how=how), "head", "block"),
        "blocks for backward": {"head": head, "block": block},
        "backward": {
            "head": parts.head_backward(shape, tokens, run.itemsize),
            "block": parts.block_backward(shape, run, tokens),
        },
    }
