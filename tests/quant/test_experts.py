"""Mixtures of experts equal references with loops: routing, products, gradients and loading. Checkpoints of mixtures
that cannot be used are refused."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from qerl_pl.memory.shape import checkpoint_shape
from qerl_pl.model.family import Experts
from qerl_pl.quant import quantize
from qerl_pl.quant.calibration import Calibration
from qerl_pl.quant.experts import (
    PARTS,
    Expert,
    FrozenExperts,
    Mixture,
    Replay,
    SeparateExperts,
    StackedLinear,
    choose,
    packed_experts,
    stack_experts,
    weigh,
)
from qerl_pl.quant.families import check_family
from qerl_pl.quant.formats import Format
from qerl_pl.quant.formats import quantize as to_nearest
from qerl_pl.quant.grouped import grouped, sort_rows
from qerl_pl.quant.linear import FrozenLinear
from qerl_pl.quant.loading import load_base
from qerl_pl.quant.mxfp4 import MXFP4
from qerl_pl.quant.nvfp4 import NVFP4
from qerl_pl.quant.quantize import quantize_checkpoint
from tests.combinations import first_of, pairwise
from tests.families import MIXTURES, tiny_config
from tests.packed import frozen_linear
from tests.quant.test_loading import as_modelopt
from tests.quant.test_quantize import interrupted_at
from tests.reference.experts import mixture
from tests.rollout.conftest import first_mixture, save_dense, save_mixture

SOFTMAX = Experts()
SIGMOID = Experts(correction="e_score_correction_bias", scale="routed_scaling_factor")
"""Experts as in GLM-4.5."""


def random_mixture(
    number: int = 5,
    chosen: int = 2,
    *,
    normalised: bool = True,
    fmt: Format | None = NVFP4,
    inner: int = 96,
    shared: bool = False,
    names: Experts = SOFTMAX,
) -> Mixture:
    """Make a random mixture of experts whose weights are stacked to one tensor per projection. The weights grow from
    expert to expert, so that the experts have different tensor scales. ``names`` says after which family the router
    works: as in Qwen3-MoE (``SOFTMAX``) or in GLM-4.5 (``SIGMOID``)."""
    generator = torch.Generator().manual_seed(0)
    config = SimpleNamespace(hidden_size=64, num_experts=number, num_experts_per_tok=chosen, norm_topk_prob=normalised)
    config.moe_intermediate_size, config.routed_scaling_factor = inner, 1.8
    made = Mixture(config, names, torch.float32)
    made.gate.weight = nn.Parameter(torch.randn(number, 64, generator=generator) / 4, requires_grad=False)
    if names.correction is not None:
        correction = nn.Parameter(torch.randn(number, generator=generator), requires_grad=False)
        made.gate.register_parameter(names.correction, correction)
    assert isinstance(made.experts, SeparateExperts)
    for index, expert in enumerate(made.experts):
        for part in PARTS:
            linear: Any = expert.get_submodule(part)
            weight = torch.randn(linear.weight.shape, generator=generator) / 8 * (1 + index)
            if fmt is None:
                linear.weight = nn.Parameter(weight, requires_grad=False)
            else:
                expert.set_submodule(part, frozen_linear(to_nearest(weight, fmt), fmt=fmt))
    stack_experts(made)
    if shared:
        expert, gate = Expert(64, 48, torch.float32).to_empty(device="cpu"), nn.Linear(64, 1, bias=False)
        for weight in (*expert.parameters(), gate.weight):
            nn.init.normal_(weight.requires_grad_(False), std=0.3, generator=generator)
        if names.correction is None:
            made.shared_expert, made.shared_expert_gate = expert, gate
        else:
            made.shared_experts = expert
    return made


def by_loops(made: Mixture, x: Tensor, ids: list[list[int]] | None = None) -> Tensor:
    """Compute the output of a mixture for x [T, H] by loops over tokens and experts."""
    expert, gate, correction = made.shared_experts or made.shared_expert, made.shared_expert_gate, made.correction
    shared = None
    if isinstance(expert, Expert):
        weights = expert.gate_proj.weight, expert.up_proj.weight, expert.down_proj.weight
        shared = (None if gate is None else gate.weight[0], weights)
    return mixture(
        x,
        made.gate.weight,
        expert_weights(made),
        made.chosen,
        normalised=made.normalised,
        ids=ids,
        shared=shared,
        correction=None if correction is None else made.gate.get_parameter(correction),
        scale=made.scale,
    )


def stacks(made: Mixture) -> list[StackedLinear]:
    assert isinstance(made.experts, FrozenExperts)
    return [made.experts.gate_proj, made.experts.up_proj, made.experts.down_proj]


def expert_weights(made: Mixture) -> list[tuple[Tensor, Tensor, Tensor]]:
    gate, up, down = (part.dense(torch.float32) for part in stacks(made))
    return list(zip(gate, up, down, strict=True))


WAYS = [
    (True, False, SOFTMAX),
    (False, False, SOFTMAX),
    (True, True, SOFTMAX),
    (True, True, SIGMOID),
    (False, False, SIGMOID),
]


@pytest.mark.parametrize(
    ("sizes", "way", "fmt"), pairwise([(5, 2, 33), (3, 3, 7), (8, 1, 5), (1, 1, 1)], WAYS, [NVFP4, MXFP4, None])
)
def test_values_and_gradients_are_those_of_loops_over_tokens(sizes, way, fmt):
    (number, chosen, tokens), (normalised, shared, names) = sizes, way
    made = random_mixture(number, chosen, normalised=normalised, fmt=fmt, shared=shared, names=names)
    x = torch.randn(1, tokens, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    same = x.detach()[0].double().requires_grad_()
    expected = by_loops(made, same)
    weights = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(2))
    (made(x)[0] * weights).sum().backward()
    (expected * weights).sum().backward()
    assert x.grad is not None
    assert same.grad is not None
    assert (made(x)[0] - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (x.grad[0] - same.grad).abs().max() <= 1e-5 * same.grad.abs().max()
    assert all(not parameter.requires_grad for parameter in made.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize(("number", "chosen", "tokens"), [(5, 2, 33), (8, 1, 1), (128, 8, 77)])
def test_values_and_gradients_on_a_gpu_are_those_of_loops(dtype, tolerance, number, chosen, tokens):
    made = random_mixture(number, chosen).cuda()
    x = torch.randn(1, tokens, 64, generator=torch.Generator().manual_seed(1)).to("cuda", dtype).requires_grad_()
    same = x.detach()[0].double().requires_grad_()
    expected = mixture(same, made.gate.weight, expert_weights(made), chosen, normalised=True)
    weights = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(2)).cuda()
    (made(x)[0] * weights).sum().backward()
    (expected * weights).sum().backward()
    assert x.grad is not None
    assert same.grad is not None
    assert (made(x)[0] - expected).norm() <= tolerance * expected.norm()
    assert (x.grad[0] - same.grad).norm() <= tolerance * same.grad.norm()


def test_equal_probabilities_choose_the_lower_index():
    probabilities = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0], [3.0, 3.0, 3.0, 3.0, 3.0]]).softmax(-1)
    ids = choose(probabilities, 2)
    assert ids.tolist() == [[1, 2], [0, 1]]
    assert weigh(probabilities, ids, normalised=True).tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_a_correction_changes_which_experts_are_chosen_and_not_their_weights():
    made = random_mixture(4, 2, names=SIGMOID)
    made.gate.weight.zero_()  # scores of 1/2
    made.gate.get_parameter("e_score_correction_bias").copy_(torch.tensor([0.0, 2.0, -1.0, 1.0]))
    scores, corrected = made.scores(torch.ones(1, 64))
    ids = choose(corrected, 2)
    assert ids.tolist() == [[1, 3]]
    assert weigh(scores, ids, normalised=False).tolist() == [[0.5, 0.5]]
    assert weigh(scores, ids, normalised=True, scale=3.0).tolist() == [[1.5, 1.5]]


@pytest.mark.parametrize("names", [SOFTMAX, SIGMOID])
@pytest.mark.parametrize("normalised", [True, False])
def test_replayed_experts_give_the_values_and_gradients_of_loops(normalised, names):
    generator = torch.Generator().manual_seed(1)
    made = random_mixture(6, 3, normalised=normalised, names=names)
    x = torch.randn(1, 17, 64, generator=generator).requires_grad_()
    given = torch.rand(17, 6, generator=generator).argsort(dim=1)[:, :3]
    made.replay = Replay(given.to(torch.uint8), torch.zeros(17, dtype=torch.uint8))
    same = x.detach()[0].double().requires_grad_()
    expected = by_loops(made, same, ids=given.tolist())
    weights = torch.randn(17, 64, generator=generator)
    found = made(x)[0]
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    assert x.grad is not None
    assert same.grad is not None
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (x.grad[0] - same.grad).abs().max() <= 1e-5 * same.grad.abs().max()
    own = choose(made.scores(x[0])[1], 3)
    assert made.replay.others.tolist() == [len({*a} - {*b}) for a, b in zip(given.tolist(), own.tolist(), strict=True)]


@pytest.mark.parametrize("names", [SOFTMAX, SIGMOID])
def test_replaying_the_routers_own_experts_changes_no_bit(names):
    made = random_mixture(6, 3, names=names)
    x = torch.randn(1, 17, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    plain = made(x)
    [expected] = torch.autograd.grad(plain.square().sum(), x)
    own = choose(made.scores(x[0])[1], 3)
    made.replay = Replay(own.to(torch.uint8), torch.ones(17, dtype=torch.uint8))
    replayed = made(x)
    [gradient] = torch.autograd.grad(replayed.square().sum(), x)
    assert torch.equal(replayed, plain)
    assert torch.equal(gradient, expected)
    assert not made.replay.others.any()


def test_rows_are_sorted_by_expert_then_token_and_found_again():
    ids = torch.tensor([[3, 0], [0, 3], [4, 3]])
    routes = sort_rows(ids, 6)
    assert ids.flatten()[routes.order].tolist() == [0, 0, 3, 3, 3, 4]
    assert (routes.order // 2).tolist() == [0, 1, 0, 1, 2, 2]
    assert routes.ends.tolist() == [2, 2, 2, 5, 6, 6]
    assert torch.equal(routes.order[routes.inverse], torch.arange(6).view(3, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_grouped_product_is_that_of_each_experts_rows_also_without_any(dtype):
    generator = torch.Generator().manual_seed(0)
    rows, matrices = torch.randn(9, 32, generator=generator), torch.randn(4, 32, 16, generator=generator)
    ends = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    found = grouped(rows.to(dtype), matrices.to(dtype), ends)
    expected = torch.cat([rows[:4].to(dtype) @ matrices[1].to(dtype), rows[4:].to(dtype) @ matrices[3].to(dtype)])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4])
def test_stacks_are_dequantised_as_each_expert_is_alone(fmt):
    made = random_mixture(fmt=fmt)
    linears = dict(packed_experts(made))
    assert len(linears) == 15
    for part, stack in zip(PARTS, stacks(made), strict=True):
        for expert, weight in enumerate(stack.dense(torch.bfloat16)):
            linear = linears[f"experts.{expert}.{part}"]
            assert torch.equal(weight, linear.dense(torch.bfloat16))
            assert linear.codes.data_ptr() == stack.codes[expert].data_ptr()  # no copy


@pytest.fixture(scope="module", params=MIXTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a checkpoint with a mixture of experts, as ``dense`` and ``nvfp4``."""
    folder = tmp_path_factory.mktemp("experts")
    save_mixture(folder, request.param)
    return folder


def changed(source: Path, target: Path, tensors: dict[str, Tensor]) -> Path:
    """Copy a checkpoint and replace its tensors; returns the folder of the copy."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_a_loaded_nvfp4_mixture_computes_the_bits_of_its_dequantised_experts(folder, tmp_path):
    packed = load_base(folder / "nvfp4", dtype=torch.float32, device="cpu")
    tensors = tensors_of(folder / "dense")
    linears = {name: linear for name, linear in packed.named_modules() if isinstance(linear, FrozenLinear)}
    for name, linear in (linears | dict(packed_experts(packed))).items():
        tensors[f"{name}.weight"] = linear.dense(torch.float32)
    dense = load_base(changed(folder / "dense", tmp_path / "same", tensors), dtype=torch.float32, device="cpu")
    tokens = torch.randint(8, 64, (1, 40), generator=torch.Generator().manual_seed(0))
    assert torch.equal(packed(input_ids=tokens).logits, dense(input_ids=tokens).logits)


def test_stacked_tensors_are_read_as_those_of_each_expert(folder, tmp_path):
    tensors, name = tensors_of(folder / "dense"), f"{first_mixture(folder / 'dense')}.experts"
    taken = {part: [tensors.pop(f"{name}.{expert}.{part}.weight") for expert in range(8)] for part in PARTS}
    gate, up, down = map(torch.stack, taken.values())
    whole = {f"{name}.gate_up_proj": torch.cat([gate, up], dim=1), f"{name}.down_proj": down}
    stacked = changed(folder / "dense", tmp_path / "stacked", tensors | whole)
    expected = load_base(folder / "dense", dtype=torch.float32, device="cpu").state_dict()
    found = load_base(stacked, dtype=torch.float32, device="cpu").state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    quantize_checkpoint(stacked, tmp_path / "nvfp4")
    assert tensors_of(tmp_path / "nvfp4").keys() == tensors_of(folder / "nvfp4").keys()


@first_of("folder", MIXTURES)
def test_a_mixture_is_quantised_with_calibration_better_than_without_and_goes_on_after_a_kill(
    folder, tmp_path, monkeypatch
):
    tokens = torch.randint(8, 64, (4, 64), generator=torch.Generator().manual_seed(0))
    calibration = Calibration(tokens, "random")
    nearest = quantize_checkpoint(folder / "dense", tmp_path / "rtn", calibration=calibration)
    whole = quantize_checkpoint(folder / "dense", tmp_path / "whole", method="gptq", calibration=calibration)
    errors = [
        sum(layer.output_error or 0 for layer in layers if ".experts." in layer.name) for layers in (whole, nearest)
    ]
    assert errors[0] < errors[1]
    with monkeypatch.context() as patch:
        patch.setattr(quantize, "pack_file", interrupted_at("model-00003-of-00003.safetensors"))
        with pytest.raises(KeyboardInterrupt):
            quantize_checkpoint(folder / "dense", tmp_path / "part", method="gptq", calibration=calibration)
    quantize_checkpoint(folder / "dense", tmp_path / "part", method="gptq", calibration=calibration)
    found, expected = tensors_of(tmp_path / "part"), tensors_of(tmp_path / "whole")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@first_of("folder", MIXTURES)
@pytest.mark.parametrize("together", [1, 3 * 64 * 128])
def test_experts_are_packed_alike_and_reported_in_order_whatever_number_is_packed_at_once(
    folder, tmp_path, monkeypatch, together
):
    whole = quantize_checkpoint(folder / "dense", tmp_path / "whole")
    monkeypatch.setattr(quantize, "TOGETHER", together)
    assert quantize_checkpoint(folder / "dense", tmp_path / "parts") == whole
    found, expected = tensors_of(tmp_path / "parts"), tensors_of(tmp_path / "whole")
    assert found.keys() == expected.keys()
    assert all(
        torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)) for name, tensor in expected.items()
    )


@pytest.mark.parametrize("kind", ["dense", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plan_counts_the_bytes_of_a_mixture(folder, kind, dtype):
    shape = checkpoint_shape(folder / kind, dtype)
    held = load_base(folder / kind, dtype=dtype, device="cpu").state_dict().values()
    assert shape.base_bytes == sum(tensor.nbytes for tensor in held)
    assert shape.experts in ((8, 2, 64, 1, 0), (8, 2, 64, 2, 96), (8, 2, 64, 1, 2 * 64))
    assert shape.fitting_bytes == 0 or kind == "nvfp4"


@pytest.mark.parametrize(
    ("quantization", "shares"),
    [
        ({"quant_algo": "W4A16_NVFP4"}, False),
        ({"quant_algo": "NVFP4"}, True),
        ({"quant_algo": "W4A16_NVFP4", "kv_cache_quant_algo": "FP8"}, True),
    ],
    ids=["as it is", "converted for its activations", "converted for its cache"],
)
def test_vllm_shares_the_experts_of_a_modelopt_folder_only_if_it_is_converted(folder, tmp_path, quantization, shares):
    copy = tmp_path / "copy"
    shutil.copytree(folder / "nvfp4", copy)
    as_modelopt(copy, quantization, in_config=True)
    shape, whole = (checkpoint_shape(path, torch.bfloat16) for path in (copy, folder / "nvfp4"))
    sizes = shape.experts
    weights = 3 * sizes.layers * sizes.num * sizes.inner * shape.hidden
    assert whole.fitting_bytes - shape.fitting_bytes == (0 if shares else weights // 2 + weights // NVFP4.block)
    assert replace(shape, fitting_bytes=whole.fitting_bytes) == whole


def with_config(folder: Path, target: Path, **values: object) -> Path:
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | values))
    return target


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_experts": 0, "n_routed_experts": 0}, "(num|n_routed)_experts is 0; expected a whole number above 0"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9 and there are 8 experts"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is None; expected"),
        ({"model_type": "olmoe"}, r"is a mixture of experts \('olmoe'\), which is not supported"),
    ],
)
def test_impossible_sizes_are_refused(folder, tmp_path, values, message):
    with pytest.raises(ValueError, match=message):
        quantize_checkpoint(with_config(folder / "dense", tmp_path / "bad", **values), tmp_path / "out")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0; expected"),
        ({"norm_topk_prob": False}, "norm_topk_prob is false, which transformers ignores for qwen3_5_moe_text"),
        ({"intermediate_size": None, "norm_topk_prob": True}, None),
    ],
)
def test_a_mixture_of_qwen3_5_needs_a_shared_expert_and_shares_that_add_up_to_one(tmp_path, values, message):
    save_dense(tmp_path / "dense", tiny_config("qwen3_5_moe_text"))
    changed = with_config(tmp_path / "dense", tmp_path / "changed", **values)
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        quantize_checkpoint(changed, tmp_path / "out")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n_shared_experts": 0}, "n_shared_experts is 0; expected a whole number above 0"),
        ({"n_group": 4}, "n_group is 4; expected 1, because routers that choose groups"),
        ({"topk_group": 2}, "topk_group is 2; expected 1, because"),
        (
            {"first_k_dense_replace": 2},
            "first_k_dense_replace is 2; expected a whole number of blocks .*, from 0 to 1, because",
        ),
        ({"first_k_dense_replace": None}, "first_k_dense_replace is None; expected"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor is 0; expected a finite number above 0"),
        ({"head_dim": None}, "has no head_dim, which vLLM needs"),
        ({"use_qk_norm": "true"}, "use_qk_norm is 'true'; expected true or false"),
        ({"norm_topk_prob": False, "first_k_dense_replace": 0}, None),
    ],
)
def test_a_mixture_of_glm_with_other_routers_or_without_experts_is_refused(tmp_path, values, message):
    config = json.loads(tiny_config("glm4_moe").to_json_string(use_diff=False))
    (tmp_path / "config.json").write_text(json.dumps(config | values))
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        check_family(tmp_path)


def test_blocks_for_multi_token_prediction_are_left_out(tmp_path):
    save_dense(tmp_path / "dense", tiny_config("glm4_moe", num_nextn_predict_layers=1))
    tensors = tensors_of(tmp_path / "dense")
    extra = {name.replace(".1.", ".2.", 1): tensor.clone() for name, tensor in tensors.items() if "layers.1." in name}
    extra["model.layers.2.eh_proj.weight"] = torch.randn(128, 256)
    with_extra = changed(tmp_path / "dense", tmp_path / "published", tensors | extra)
    tokens = torch.randint(8, 64, (1, 40), generator=torch.Generator().manual_seed(0))
    plain, found = (load_base(path, dtype=torch.float32, device="cpu") for path in (tmp_path / "dense", with_extra))
    assert torch.equal(found(input_ids=tokens).logits, plain(input_ids=tokens).logits)
    quantize_checkpoint(with_extra, tmp_path / "nvfp4", calibration=Calibration(tokens, "random"))
    assert not [name for name in tensors_of(tmp_path / "nvfp4") if ".layers.2." in name]


def test_a_missing_or_misshapen_expert_is_refused(folder, tmp_path):
    tensors = tensors_of(folder / "dense")
    name = f"{first_mixture(folder / 'dense')}.experts.7.up_proj.weight"
    lacking = changed(folder / "dense", tmp_path / "lacking", {key: t for key, t in tensors.items() if key != name})
    with pytest.raises(ValueError, match=rf"incomplete checkpoint: {name} missing"):
        quantize_checkpoint(lacking, tmp_path / "out")
    with pytest.raises(ValueError, match=rf"missing {name}; unexpected nothing"):
        load_base(lacking, dtype=torch.float32, device="cpu")
    short = changed(folder / "dense", tmp_path / "short", tensors | {name: tensors[name][:32]})
    with pytest.raises(ValueError, match=rf"{name} is F32 \[32, 128\]; the model .* expects .* \[64, 128\]"):
        quantize_checkpoint(short, tmp_path / "out")
    with pytest.raises(ValueError, match=rf"{name} is torch.float32 \[32, 128\]; the model expects"):
        load_base(short, dtype=torch.float32, device="cpu")


def test_a_packed_router_and_a_partly_packed_mixture_are_refused(folder, tmp_path):
    packed, dense = tensors_of(folder / "nvfp4"), tensors_of(folder / "dense")
    mlp = first_mixture(folder / "dense")
    router = f"{mlp}.gate"
    weight = to_nearest(dense[f"{router}.weight"], NVFP4)
    as_router = {
        f"{router}.weight_packed": weight.codes,
        f"{router}.weight_scale": weight.block_scale.view(torch.float8_e4m3fn),
        f"{router}.weight_global_scale": (1 / weight.global_scale).float().view(1),
    }
    rest = {name: tensor for name, tensor in packed.items() if name != f"{router}.weight"}
    with pytest.raises(ValueError, match=f"holds the router {router} in 4 bits; expected 16,"):
        load_base(changed(folder / "nvfp4", tmp_path / "router", rest | as_router), dtype=torch.float32, device="cpu")
    name = f"{mlp}.experts.3.down_proj"
    rest = {key: tensor for key, tensor in packed.items() if not key.startswith(f"{name}.")}
    mixed = changed(folder / "nvfp4", tmp_path / "mixed", rest | {f"{name}.weight": dense[f"{name}.weight"]})
    message = rf"{mlp}.experts.0.gate_proj is in 4 bits and {name} is not; engines use one format for all experts"
    with pytest.raises(ValueError, match=message):
        load_base(mixed, dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match=r"is in 4 bits and .* is not; engines use one format for all experts"):
        quantize_checkpoint(folder / "dense", tmp_path / "out", ignore=["lm_head", r"re:.*experts\.3\.down_proj"])
