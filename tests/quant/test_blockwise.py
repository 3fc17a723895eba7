"""Running one block at a time gives the same hidden states as the whole model."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from qerl_pl.model.family import FAMILIES
from qerl_pl.model.files import Checkpoint
from qerl_pl.quant.blockwise import BlockStream
from qerl_pl.quant.loading import load_base, meta_model
from tests.families import NAMES, tiny_config
from tests.rollout.conftest import save_dense

TOKENS = torch.randint(0, 64, (3, 40), generator=torch.Generator().manual_seed(0))
SLIDING = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("architecture", "sizes", "tokens_at_once"),
    [*((name, {}, 8192) for name in NAMES), ("qwen2", {}, 50), ("qwen2", SLIDING, 8192)],
    ids=[*NAMES, "qwen2 by one sequence", "qwen2 with a sliding window"],
)
def test_the_stream_passes_the_blocks_as_the_model_does(tmp_path, monkeypatch, architecture, sizes, tokens_at_once):
    monkeypatch.setattr("qerl_pl.quant.blockwise._TOKENS", tokens_at_once)
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

    checkpoint, skeleton = Checkpoint(path), meta_model(path)
    stream = BlockStream(skeleton, checkpoint, TOKENS, "cpu")
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
            x = inputs[name].flatten(0, -2)
            torch.testing.assert_close(moment, x.T @ x / len(x), rtol=1e-4, atol=1e-5)
        stream.advance(block, tensors)
        torch.testing.assert_close(stream.hidden, expected, rtol=1e-5, atol=1e-5)
    assert all(parameter.is_meta for parameter in skeleton.parameters()), "nothing is left on the device"
    assert all(parameter.is_meta for _, block in stream.blocks.values() for parameter in block.parameters())


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.fp32])
def test_a_stream_in_bf16_holds_those_parameters_in_fp32_that_the_trainer_does(tmp_path, family):
    save_dense(tmp_path, tiny_config(family))
    policy = load_base(tmp_path, dtype=torch.bfloat16, device="cpu")
    hidden: list[Tensor] = []
    for layer in policy.model.layers:
        layer.register_forward_hook(lambda _module, _args, output: hidden.append(output))
    with torch.no_grad():
        policy(TOKENS)
    checkpoint = Checkpoint(tmp_path)
    stream = BlockStream(meta_model(tmp_path, torch.bfloat16), checkpoint, TOKENS, "cpu")
    for index, expected in enumerate(hidden):
        block = f"model.layers.{index}."
        stream.advance(block[:-1], {name: checkpoint.read(name) for name in checkpoint.names() if block in name})
        assert torch.equal(stream.hidden, expected)
