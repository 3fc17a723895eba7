"""load_base against transformers' own loading, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path

import bitsandbytes.functional
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from qerl_pl.quant.linear import FrozenLinear
from qerl_pl.quant.loading import load_base
from qerl_pl.quant.quantize import quantize_checkpoint
from tests.quant.published import edit_config, read_all, rewrite
from tests.reference.dequantize import dequantize_reference

TOKENS = torch.randint(0, 96, (2, 80), generator=torch.Generator().manual_seed(1))


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def packed_modules(model: nn.Module) -> dict[str, FrozenLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, FrozenLinear)}


def edit_weights(path: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = read_all(path)
    edit(tensors)
    rewrite(path, tensors)


def as_modelopt(path: Path, quantization: dict, *, in_config: bool) -> None:
    """Rewrite a compressed-tensors folder of this project under ModelOpt's names and conventions."""
    renamed = {}
    for name, tensor in read_all(path).items():
        if name.endswith("weight_global_scale"):
            renamed[name.replace("weight_global_scale", "weight_scale_2")] = (1 / tensor[0]).reshape(())
        else:
            renamed[name.replace("weight_packed", "weight")] = tensor
    rewrite(path, renamed, shards=2)
    edit_config(path, quantization_config={"quant_method": "modelopt", **quantization} if in_config else None)
    if not in_config:
        (path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))


@pytest.mark.parametrize(
    ("architecture", "tied", "shard"),
    [("qwen2", False, "60KB"), ("qwen2", True, "5GB"), ("qwen3", False, "5GB"), ("llama", True, "60KB")],
)
def test_an_unquantised_checkpoint_gives_the_logits_of_from_pretrained(make_checkpoint, architecture, tied, shard):
    path = make_checkpoint(architecture, tied=tied, shard=shard)
    assert (len(list(path.glob("*.safetensors"))) > 1) == (shard == "60KB")
    model = load_base(path, dtype=torch.float32, device="cpu")
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert torch.equal(logits(model), logits(expected))
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model.generation_config.top_k == 7


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize(
    ("architecture", "name"),
    [("qwen2", "nvfp4"), ("qwen3", "nvfp4"), ("llama", "nvfp4"), ("qwen3", "mxfp4"), ("qwen2", "nf4")],
)
def test_a_packed_checkpoint_equals_transformers_own_reading_of_it(make_checkpoint, tmp_path, architecture, name):
    path, ignore = tmp_path / "packed", ["lm_head", "model.layers.1.mlp.down_proj"]
    quantize_checkpoint(make_checkpoint(architecture), path, format=name, ignore=ignore)
    model = load_base(path, dtype=torch.bfloat16, device="cpu")
    packed = packed_modules(model)
    assert len(packed) == 2 * 7 - 1
    decompressed = CompressedTensorsConfig(run_compressed=False)
    extra = {} if name == "nf4" else {"quantization_config": decompressed}
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, **extra)
    for layer, module in packed.items():
        weight = theirs.get_parameter(f"{layer}.weight")
        if name == "nf4":
            weight = bitsandbytes.functional.dequantize_4bit(weight.data, getattr(weight, "quant_state"))  # noqa: B009
        assert torch.equal(module.dense(torch.bfloat16), weight), layer
    if name != "nf4":  # bitsandbytes multiplies by a kernel of its own
        assert torch.equal(logits(model), logits(theirs))


@pytest.mark.parametrize("tied", [False, True])
def test_packed_logits_in_fp32_equal_a_dense_model_with_the_dequantised_weights(make_checkpoint, tmp_path, tied):
    source = make_checkpoint(tied=tied)
    quantize_checkpoint(source, tmp_path / "packed")
    model = load_base(tmp_path / "packed", dtype=torch.float32, device="cpu")
    dense = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for name, module in packed_modules(model).items():
        dense.get_parameter(f"{name}.weight").data = dequantize_reference(module.packed)
    torch.testing.assert_close(logits(model), logits(dense), rtol=0, atol=1e-4)


@pytest.mark.parametrize("in_config", [True, False], ids=["config.json", "hf_quant_config.json"])
def test_a_modelopt_checkpoint_gives_the_same_weights(make_checkpoint, tmp_path, in_config):
    path = tmp_path / "packed"
    quantize_checkpoint(make_checkpoint(), path)
    expected = packed_modules(load_base(path, dtype=torch.float32, device="cpu"))
    as_modelopt(path, {"quant_algo": "W4A16_NVFP4", "exclude_modules": ["lm_head"]}, in_config=in_config)
    packed = packed_modules(load_base(path, dtype=torch.float32, device="cpu"))
    assert packed.keys() == expected.keys()
    for name, module in packed.items():
        assert torch.equal(module.codes, expected[name].codes)
        assert torch.equal(module.block_scale, expected[name].block_scale)
        assert module.packed.global_scale == expected[name].packed.global_scale.float()  # stored as an fp32 multiplier


def test_no_dense_copy_of_a_packed_weight_is_ever_made(make_checkpoint, tmp_path):
    quantize_checkpoint(make_checkpoint(), tmp_path / "packed")
    made: set[tuple[int, ...]] = set()

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, list | tuple) else [out]:
                if isinstance(tensor, Tensor) and tensor.is_floating_point() and not tensor.is_meta:
                    made.add(tuple(tensor.shape))
            return out

    with Recorder():
        model = load_base(tmp_path / "packed", dtype=torch.bfloat16, device="cpu")
    assert tuple(model.lm_head.weight.shape) in made
    assert made.isdisjoint((module.out_features, module.in_features) for module in packed_modules(model).values())


def test_nothing_keeps_the_files_open_for_reading_after_loading(make_checkpoint):
    path = make_checkpoint()
    model = load_base(path, dtype=torch.bfloat16, device="cpu")
    before = logits(model)
    with (path / "model.safetensors").open("r+b") as file:  # overwritten in place: a mapped tensor would see it
        file.seek(0, 2)
        size = file.tell()
        file.seek(0)
        file.write(b"\xff" * size)
    assert torch.equal(logits(model), before)


def test_only_what_is_not_packed_follows_the_dtype(make_checkpoint, tmp_path):
    quantize_checkpoint(make_checkpoint(), tmp_path / "packed")
    model = load_base(tmp_path / "packed", dtype=torch.float32, device="cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.dtype == model.config.dtype == torch.float32
    packed = model.get_submodule("model.layers.0.self_attn.q_proj")
    assert {name: buffer.dtype for name, buffer in packed.named_buffers()} == {
        "codes": torch.uint8,
        "block_scale": torch.uint8,
        "global_scale_bits": torch.int64,
        "bias": torch.float32,
    }
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


def test_a_checkpoint_that_holds_only_the_copy_of_a_tied_weight_loads(make_checkpoint):
    path = make_checkpoint(tied=True)
    expected = logits(load_base(path, dtype=torch.float32, device="cpu"))
    edit_weights(path, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    assert torch.equal(logits(load_base(path, dtype=torch.float32, device="cpu")), expected)


def test_tied_weights_that_differ_in_the_file_are_refused(make_checkpoint):
    path = make_checkpoint(tied=True)
    edit_weights(path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}))
    with pytest.raises(ValueError, match=r"lm_head\.weight is tied .*holds different values"):
        load_base(path, dtype=torch.float32, device="cpu")


def test_rotary_frequencies_of_old_checkpoints_are_ignored(make_checkpoint):
    path = make_checkpoint("llama")
    key = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(path, lambda tensors: tensors.update({key: torch.ones(8)}))
    load_base(path, dtype=torch.float32, device="cpu")


UP, NORM, SCALE = "model.layers.1.mlp.up_proj", "model.norm.weight", "model.layers.1.mlp.up_proj.weight_scale"


def number_at(name: str, *places: int, number: float) -> Callable[[dict[str, Tensor]], object]:
    """Make a function that sets some elements of a tensor to a number."""

    def edit(tensors: dict[str, Tensor]) -> None:
        changed = tensors[name].float()
        changed.view(-1)[list(places)] = number
        tensors[name] = changed.to(tensors[name].dtype)

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.layers.1.input_layernorm.weight"), r"missing .*\.1\.input_layernorm\.weight; unexp"),
        (lambda t: t.pop(f"{UP}.weight_global_scale"), r"missing model\.layers\.1\.mlp\.up_proj\.global_scale_bits"),
        (lambda t: t.update(extra=torch.ones(1)), r"missing nothing; unexpected extra"),
        (
            lambda t: t.update({NORM: torch.ones(63)}),
            r"model\.norm\.weight is torch\.float32 \[63\]; the model expects torch\.float32 \[64\]",
        ),
        (lambda t: t.update({NORM: torch.ones(64).byte()}), r"model\.norm\.weight is torch\.uint8"),
        (number_at(NORM, 1, number=float("nan")), f"{NORM} holds NaN or infinity in 1 of"),
        (number_at(NORM, 1, number=float("inf")), f"{NORM} holds NaN or infinity in 1 of"),
        (number_at(SCALE, 1, number=float("nan")), f"{SCALE} holds NaN or infinity in 1 of"),
        (number_at(SCALE, 1, 3, number=-2.0), f"{SCALE} holds 2 negative block scales of"),
    ],
)
def test_tensors_that_do_not_fit_are_named(make_checkpoint, tmp_path, edit, message):
    quantize_checkpoint(make_checkpoint(), tmp_path / "packed")
    edit_weights(tmp_path / "packed", edit)
    with pytest.raises(ValueError, match=message):
        load_base(tmp_path / "packed", dtype=torch.float32, device="cpu")


def test_a_negative_zero_is_no_negative_block_scale(make_checkpoint, tmp_path):
    quantize_checkpoint(make_checkpoint(), tmp_path / "packed")
    edit_weights(tmp_path / "packed", number_at(SCALE, 0, number=-0.0))
    load_base(tmp_path / "packed", dtype=torch.float32, device="cpu")


def test_a_folder_that_is_not_a_model_is_refused(make_checkpoint, tmp_path):
    def load(path: Path) -> None:
        load_base(path, dtype=torch.float32, device="cpu")

    with pytest.raises(ValueError, match="nowhere does not exist"):
        load(tmp_path / "nowhere")
    (tmp_path / "models" / "one").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"models has no config\.json, .*; give a model's folder"):
        load(tmp_path / "models")
    (tmp_path / "models" / "one" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"give one of the folders in it that have one: .*models/one$"):
        load(tmp_path / "models")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match=r"no config\.json"):
        load(empty)
    (empty / "config.json").write_text("{")
    (empty / "model.safetensors").write_bytes(b"\0" * 4)
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load(empty)
    (empty / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no \.safetensors files; weights in other formats are not read$"):
        load(empty)
    for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth"):
        (empty / name).write_bytes(b"pickle")
        with pytest.raises(ValueError, match=rf"not read: {name} is a pickle that may run code; save .* safetensors"):
            load(empty)
        (empty / name).unlink()
    save_file({"a": torch.ones(1)}, empty / "model.safetensors")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        load(empty)
    sharded = make_checkpoint(shard="60KB")
    next(iter(sharded.glob("*.safetensors"))).unlink()
    with pytest.raises(ValueError, match=r"is missing, though model\.safetensors\.index\.json names it"):
        load(sharded)
