"""Fixtures for tests of rollout engines: a small random policy on a dense base, on an NVFP4 base and with trained
norms, and the transformers engine and vLLM for each of them."""

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from qerl_pl.model.files import Checkpoint
from qerl_pl.noise.norm_noise import NormNoise, noisy_norms
from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.policy import Policy, load_policy
from qerl_pl.quant.quantize import quantize_checkpoint
from qerl_pl.rollout.base import RolloutEngine, Sampling, expected_fingerprint
from qerl_pl.rollout.hf import TransformersEngine
from qerl_pl.rollout.vllm import VLLMEngine
from tests.families import tiny_config
from tests.interpreter import interpreted

VOCAB_SIZE = 64  # one that vLLM does not pad, so that embeddings are shared
NUM_LAYERS = 2
MAX_MODEL_LEN = 160
BLOCK_SIZE = 32  # of vLLM's cache; prompts longer than this can meet a stale prefix
END_TOKENS = {5, 6, 7}  # of the config, the generation config and the tokenizer


def small_qwen2(**sizes: Any) -> PretrainedConfig:
    """Make the configuration of a small Qwen2; ``sizes`` replace its values."""
    shape: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "num_key_value_heads": 2}
    shape = {**shape, "initializer_range": 0.15, **sizes}
    return Qwen2Config(
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,  # heads of 32, the smallest that vLLM has on a CPU
        **shape,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=5,
    )


def save_dense(path: Path, config: PretrainedConfig | None = None, **sizes: Any) -> None:
    """Write a random model and a tokenizer. The model's generation config has a temperature, top_k and so on that
    engines have to ignore; if an engine used them, all distributions would be wrong.

    Args:
        path: folder to write to.
        config: configuration of the model; None: ``small_qwen2``.
        sizes: values of ``small_qwen2`` to replace.
    """
    torch.manual_seed(0)
    config = config or small_qwen2(**sizes)
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32)
    for name, weight in chain(model.named_parameters(), model.named_buffers()):
        if name.endswith(("bias", "norm.weight")):  # not their initial zeros and ones
            std = 0.05 if "correction" in name else 0.2  # with a larger one, all tokens would choose the same experts
            torch.nn.init.normal_(weight, mean=weight.mean().item() if "norm" in name else 0.0, std=std)
    model.generation_config = GenerationConfig(
        eos_token_id=[5, 6], do_sample=True, temperature=0.3, top_k=3, top_p=0.5, repetition_penalty=1.7
    )
    model.save_pretrained(path)
    words = {f"w{token}": token for token in range(VOCAB_SIZE - 1)}
    words["<|endoftext|>"] = VOCAB_SIZE - 1  # transformers adds it to every tokenizer of a Qwen2
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), eos_token="w7"
    ).save_pretrained(path)


def save_with_separate_scales(source: Path, target: Path) -> None:
    """Copy an NVFP4 checkpoint, and give each linear layer a different tensor scale. Other quantisers may write such
    checkpoints; this project's gives layers that engines fuse the same scale."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    checkpoint = Checkpoint(source)
    tensors = {name: checkpoint.read(name).clone() for name in checkpoint.names()}
    for index, name in enumerate(name for name in tensors if name.endswith("weight_global_scale")):
        tensors[name] *= 1 + index / 16
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def random_adapter(policy: Policy, seed: int) -> dict[str, Tensor]:
    """Draw an adapter whose LoRA matrices change the policy a lot. Norm weights, if they are trained, stay near their
    old values."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(tensor.shape, generator=generator) * 0.1 + (0.0 if ".lora_" in name else tensor)
        for name, tensor in policy.adapter_state().items()
    }


@dataclass(frozen=True)
class Setup:
    """A started engine and the trainer's policy that it samples from. The policy's forward pass computes the
    log-probabilities that the engine should report."""

    engine: RolloutEngine
    policy: Policy
    adapter: Mapping[str, Tensor]
    other_adapter: Mapping[str, Tensor]
    norms: Mapping[str, Tensor]
    """Norm weights that belong to ``adapter``, without noise."""

    def reset(self) -> None:
        """Load ``adapter`` into trainer and engine, and remove all noise."""
        self.engine.wake()
        self.policy.load_adapter_state(self.adapter)
        self.engine.load_adapter(self.adapter)
        self.engine.set_norm_noise(NormNoise())

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], *, adapter: bool = True) -> Tensor:
        """Compute logits [S, V] in fp32, for a whole sequence at once and without a cache."""
        row = torch.tensor([list(tokens)])
        if adapter:
            return self.policy.model(input_ids=row).logits[0].float()
        with self.policy.model.disable_adapter():
            return self.policy.model(input_ids=row).logits[0].float()

    def logprobs(
        self, prompt: Sequence[int], tokens: Sequence[int], *, temperature: float = 1.0, adapter: bool = True
    ) -> Tensor:
        """Compute log-probabilities, [N] fp32 nats, of the N tokens that follow the prompt."""
        logits = self.logits([*prompt, *tokens], adapter=adapter)[len(prompt) - 1 : -1]
        return (logits / temperature).log_softmax(-1).gather(1, torch.tensor([list(tokens)]).T)[:, 0]

    @contextmanager
    def noisy_policy(self, sigma: float, seed: int) -> Iterator[None]:
        """Add to the trainer's norms, within the context, the noise that an engine adds to its norms when
        ``set_norm_noise`` is called with these values."""
        live = self.policy.norm_weights()
        clean = {name: weight.clone() for name, weight in live.items()}
        for name, weight in noisy_norms(clean, NormNoise(sigma, seed)).items():
            live[name].copy_(weight)
        yield
        for name, weight in clean.items():
            live[name].copy_(weight)

    def expected_fingerprint(
        self, adapter: Mapping[str, Tensor] | None = None, norms: Mapping[str, Tensor] | None = None
    ) -> dict[str, int]:
        return expected_fingerprint(
            adapter or self.adapter, norms or self.norms, scaling=self.policy.lora_scaling, dtype=self.policy.dtype
        )


@pytest.fixture(scope="session", autouse=True)
def _kernels_are_interpreted() -> None:
    """Import this project's kernels before any test does, so that without a GPU they run in Triton's interpreter."""
    with interpreted():
        for name in ("qerl_pl.kernels.lora", "qerl_pl.kernels.lora_experts", "qerl_pl.hopper.token_scores"):
            import_module(name)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Write three checkpoints of the same random model, and return their folders: "dense", "nvfp4", and "separate", in
    NVFP4 with a different tensor scale per linear layer."""
    folder = tmp_path_factory.mktemp("checkpoints")
    save_dense(folder / "dense")
    quantize_checkpoint(folder / "dense", folder / "nvfp4")
    save_with_separate_scales(folder / "nvfp4", folder / "separate")
    return {name: str(folder / name) for name in ("dense", "nvfp4", "separate")}


@pytest.fixture(scope="session")
def unpadded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small random NVFP4 base for tests on Hopper: its linear layers have sizes that the Hopper kernels
    accept without padding."""
    folder = tmp_path_factory.mktemp("unpadded")
    save_dense(folder / "dense", hidden_size=256, intermediate_size=512, num_key_value_heads=4, initializer_range=0.05)
    quantize_checkpoint(folder / "dense", folder / "nvfp4")
    return folder / "nvfp4"


def make_policy(checkpoint: str, *, train_norms: bool = False, dtype: torch.dtype = torch.float32) -> Policy:
    # Mistakes in padding and scaling would be detected: vLLM has to pad rank 6, for which it has no kernels, and the
    # scale, 12 / sqrt(6), is no power of two.
    lora = LoraSettings(rank=6, alpha=12, rslora=True, train_norms=train_norms)
    return load_policy(checkpoint, dtype=dtype, lora=lora, seed=0)


def make_engine(name: str) -> RolloutEngine:
    if name == "vllm":
        # The cache and the limits are so small that prompts wait for each other, and sequences are preempted.
        return VLLMEngine(block_size=BLOCK_SIZE, max_num_seqs=64, max_num_batched_tokens=256, kv_cache_bytes=2**20)
    return TransformersEngine(batch_tokens=1024)


@contextmanager
def started_engine(policy: Policy, engine: RolloutEngine | None = None) -> Iterator[Setup]:
    """Give a policy a random adapter, and start an engine that samples from it, vLLM unless another one is given. The
    engine is closed at the end of the context."""
    adapter = random_adapter(policy, seed=1)
    policy.load_adapter_state(adapter)
    norms = {name: weight.clone() for name, weight in policy.norm_weights().items()}
    engine = engine or make_engine("vllm")
    engine.start(policy, max_model_len=MAX_MODEL_LEN)
    try:
        yield Setup(engine, policy, adapter, random_adapter(policy, seed=2), norms)
    finally:
        engine.close()


FORMS = {"dense": ("dense", False), "nvfp4": ("nvfp4", False), "trained norms": ("separate", True)}
"""Name -> checkpoint, and whether norms are trained."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("transformers", "dense"), id="transformers-dense", marks=pytest.mark.long),
        pytest.param(("transformers", "nvfp4"), id="transformers-nvfp4", marks=pytest.mark.long),
        pytest.param(("transformers", "trained norms"), id="transformers-trained norms"),
        pytest.param(("vllm", "dense"), id="vllm-dense", marks=[pytest.mark.vllm, pytest.mark.long]),
        pytest.param(("vllm", "nvfp4"), id="vllm-nvfp4", marks=[pytest.mark.vllm, pytest.mark.long]),
        pytest.param(("vllm", "trained norms"), id="vllm-trained norms", marks=pytest.mark.vllm),
    ],
)
def running(request: pytest.FixtureRequest, checkpoints: dict[str, str]) -> Iterator[Setup]:
    """Start an engine for the tests of a module, and close it before the next one starts: vLLM engines of a process
    share global state, which the first one that closes removes."""
    name, form = request.param
    checkpoint, train_norms = FORMS[form]
    policy = make_policy(checkpoints[checkpoint], train_norms=train_norms)
    with started_engine(policy, make_engine(name)) as setup:
        yield setup


@pytest.fixture
def setup(running: Setup) -> Setup:
    running.reset()
    return running


def some_prompts(*lengths: int) -> list[list[int]]:
    """Make different prompts without end tokens, one for each length."""
    return [[8 + (3 * i * i + 7 * i + 5 * row) % (VOCAB_SIZE - 8) for i in range(n)] for row, n in enumerate(lengths)]


def total_variation(counts: Tensor, probabilities: Tensor) -> float:
    """Compute half the L1 distance of two distributions, a number in [0, 1]."""
    return ((counts / counts.sum() - probabilities).abs().sum() / 2).item()


def sampling_error(probabilities: Tensor, num_samples: int) -> float:
    """Compute an upper bound of the mean ``total_variation`` between a distribution and ``num_samples`` independent
    samples from it."""
    return (probabilities.sqrt().sum() / 2 / math.sqrt(num_samples)).item()


def save_mixture(folder: Path, family: str = "qwen3_moe", **settings: Any) -> None:
    """Write a small random mixture of experts to ``folder / "dense"``, and the same model quantised to NVFP4 to
    ``folder / "nvfp4"``."""
    save_dense(folder / "dense", tiny_config(family, **settings))
    quantize_checkpoint(folder / "dense", folder / "nvfp4")


def first_mixture(folder: Path) -> str:
    """Return the name of the first module with experts of the model in a folder, such as "model.layers.0.mlp"."""
    ending = ".gate.weight"
    return next(name for name in Checkpoint(folder).names() if name.endswith(ending)).removesuffix(ending)


def assert_change_is_noticed(
    engine: VLLMEngine, ending: str | tuple[str, ...], change: Callable[[Tensor], object], message: str
) -> None:
    """Check that the engine detects a changed base weight. ``change`` changes the first parameter of vLLM's model whose
    name ends in ``ending``, or in one of several endings; the checksums of weights that the engine computes next have
    to fail with ``message``. Then the parameter is restored."""
    parameters = engine._call(lambda worker: dict(worker.get_model().named_parameters()))
    weight = next(parameter for name, parameter in parameters.items() if name.endswith(ending))
    kept = weight.data.clone()
    change(weight.data)
    assert not torch.equal(weight.data.view(torch.uint8), kept.view(torch.uint8))
    with pytest.raises(RuntimeError, match=f"does not compute with the trainer's base.*{message}"):
        engine.fingerprint()
    weight.data.copy_(kept)


def assert_sampled_by_its_policy(engine: VLLMEngine, prompts: list[list[int]], sampling: Sampling) -> None:
    """Check that an engine in bf16 reports the log-probabilities of its policy. Rounding alone changes the
    log-probability of one in some hundred tokens by half a nat, so single tokens may differ by much more than the
    mean."""
    policy = engine._policy
    device = next(policy.parameters()).device
    groups = engine.generate(prompts, sampling, 1)
    apart = []
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            row = torch.tensor([[*prompt, *completion.tokens]], device=device)
            sampled = torch.zeros_like(row, dtype=torch.bool)
            sampled[:, len(prompt) :] = True
            own = policy.token_stats(row, sampled, temperature=1.0).logprobs[0, len(prompt) :]
            apart.append((torch.tensor(completion.logprobs) - own.detach().cpu()).abs())
    assert torch.cat(apart).mean() < 0.1
    assert torch.cat(apart).max() < 1.5


def out_of_memory(*args: object) -> None:
    raise torch.OutOfMemoryError("no room for the adapter")


def rewrite(base: Path, name: str, write: Callable[[torch.Tensor], object]) -> None:
    """Change one tensor of a checkpoint in place."""
    for file in base.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            write(tensors[name])
            save_file(tensors, file, metadata={"format": "pt"})
            return
    raise AssertionError(name)
