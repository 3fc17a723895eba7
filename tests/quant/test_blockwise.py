"""A block at a time equals the whole model at once."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from qerl_pl.model.files import Checkpoint
from qerl_pl.quant.blockwise import BlockStream
from qerl_pl.quant.loading import meta_model
from tests.families import NAMES, tiny_config
from tests.rollout.conftest import save_dense

TOKENS = torch.randint(0, 64, (3, 40), generator=torch.Generator().manual_seed(0))
SLIDING = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [*((name, {}) for name in NAMES), ("qwen2", SLIDING)],
    ids=[*NAMES, "qwen2 with a sliding window"],
)
def test_the_stream_passes_the_blocks_as_the_model_does(tmp_path, architecture, sizes):
    path = tmp_path / architecture
    save_dense(path, CONFIG_MAPPING[architecture].from_dict(tiny_config(architecture).to_dict(), **sizes))
    model: nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    inputs: dict[str, Tensor] = {}

    def remember(name: str, _module: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs[name] = args[0]

    linears = [name for name, module in model.named_modules() if name.endswith(("q_proj", "down_proj"))]
    for name in linears:
        model.get_submodule(name).register_forward_pre_hook(partial(remember, name))
    hidden: list[Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _module, _args, output: hidden.append(output))
    embedded: list[Tensor] = []
    model.model.layers[0].register_forward_pre_hook(lambda _module, args: embedded.append(args[0]))
    with torch.no_grad():
        model(TOKENS)

    checkpoint = Checkpoint(path)
    stream = BlockStream(meta_model(path), checkpoint, TOKENS, "cpu")
    assert torch.equal(stream.hidden, embedded[0])
    for index, expected in enumerate(hidden):
        block = f"model.layers.{index}"
        tensors = {name: checkpoint.read(name) for name in checkpoint.names() if name.startswith(f"{block}.")}
        held = [name for name in linears if name.startswith(f"{block}.")]
        before = stream.hidden.clone()
        moments = stream.second_moments(block, tensors, held)
        assert torch.equal(stream.hidden, before)
        assert list(moments) == held
        for name, moment in moments.items():
            x = inputs[name].flatten(0, 1)
            torch.testing.assert_close(moment, x.T @ x / len(x), rtol=1e-4, atol=1e-5)
        stream.advance(block, tensors)
        torch.testing.assert_close(stream.hidden, expected, rtol=1e-5, atol=1e-5)


def test_sequences_are_batched_by_tokens_without_changing_the_result(make_checkpoint, monkeypatch):
    path = make_checkpoint(dtype=torch.float32)
    checkpoint = Checkpoint(path)
    tensors = {name: checkpoint.read(name) for name in checkpoint.names() if name.startswith("model.layers.0.")}

    def moment_and_hidden() -> tuple[Tensor, Tensor]:
        stream = BlockStream(meta_model(path), checkpoint, TOKENS, "cpu")
        name = "model.layers.0.mlp.down_proj"
        moment = stream.second_moments("model.layers.0", tensors, [name])[name]
        stream.advance("model.layers.0", tensors)
        return moment, stream.hidden

    whole = moment_and_hidden()
    monkeypatch.setattr("qerl_pl.quant.blockwise._TOKENS", 50)
    for one, other in zip(moment_and_hidden(), whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_blocks_leave_nothing_on_the_device(make_checkpoint):
    path = make_checkpoint(dtype=torch.float32)
    checkpoint = Checkpoint(path)
    skeleton = meta_model(path)
    stream = BlockStream(skeleton, checkpoint, TOKENS, "cpu")
    for index in range(2):
        block = f"model.layers.{index}"
        stream.advance(
            block, {name: checkpoint.read(name) for name in checkpoint.names() if name.startswith(f"{block}.")}
        )
    assert all(parameter.is_meta for parameter in skeleton.parameters())
    assert all(parameter.is_meta for _, block in stream.blocks.values() for parameter in block.parameters())
