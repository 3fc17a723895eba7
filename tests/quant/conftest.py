"""Small random checkpoints of the supported architectures, and a layer with outlier channels."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.families import tiny_config

LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
OWN = {"qwen3": {"head_dim": 24}, "llama": {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32}}}


@pytest.fixture
def _compressed_tensors_without_its_compiler():
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def add_tokenizer(path: Path) -> None:
    """Write a tokenizer with one token per letter or digit to a folder, so that tests know the length of a text in
    tokens."""
    vocabulary = {letter: number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz0123456789")}
    tokenizer = Tokenizer(models.WordLevel({**vocabulary, "<unk>": 36, "<eos>": 37}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>").save_pretrained(path)


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    def make(
        architecture: str = "qwen2",
        *,
        tied: bool = False,
        shard: str = "5GB",
        dtype: torch.dtype = torch.bfloat16,
        **sizes: object,
    ) -> Path:
        torch.manual_seed(0)
        sizes = {**SIZES, **OWN.get(architecture, {}), "tie_word_embeddings": tied, **sizes}
        config = tiny_config(architecture, **sizes)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, weight in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):  # not their initial zeros and ones
                torch.nn.init.normal_(weight, mean=1.0, std=0.2)
        path = tmp_path / f"{architecture}-{tied}-{shard}"
        model.generation_config.top_k = 7
        model.generation_config.do_sample = True
        model.to(dtype).save_pretrained(path, max_shard_size=shard)
        add_tokenizer(path)
        return path

    return make


def layer_with_outliers(rows: int, cols: int, num_inputs: int = 1024) -> tuple[Tensor, Tensor]:
    """Draw a linear layer that is hard to quantise: a weight [N, K], and the mean of x x^T [K, K] over inputs x with
    correlated channels. K // 64 of the K channels, at random places, are multiplied by 20."""
    generator = torch.Generator().manual_seed(rows)
    weight = 0.02 * torch.randn(rows, cols, generator=generator)
    mixing = torch.randn(cols // 4, cols, generator=generator) / (cols // 4) ** 0.5
    inputs = torch.randn(num_inputs, cols // 4, generator=generator) @ mixing
    inputs += 0.5 * torch.randn(num_inputs, cols, generator=generator)
    scale = torch.exp(0.6 * torch.randn(cols, generator=generator))
    scale[torch.randperm(cols, generator=generator)[: cols // 64]] *= 20
    inputs *= scale
    return weight, inputs.T @ inputs / num_inputs
