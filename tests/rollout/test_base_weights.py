"""An engine starts only if it has the trainer's base weights; otherwise the start of the run fails."""

import gc
import logging
import re
import shutil

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from qerl_pl.hopper import driver
from qerl_pl.hopper.tile_order import is_in_tile_order
from qerl_pl.quant.selection import fused_groups
from qerl_pl.rollout.vllm import VLLMEngine
from tests.rollout.conftest import MAX_MODEL_LEN, make_engine, make_policy, rewrite, some_prompts

base_weights = pytest.importorskip("qerl_pl.rollout.vllm.base_weights")
one_copy = pytest.importorskip("qerl_pl.hopper.one_copy")
LinearBase = pytest.importorskip("vllm.model_executor.layers.linear").LinearBase
pytestmark = pytest.mark.vllm
CHANGES = {
    "a code": ("model.layers.1.mlp.up_proj.weight_packed", lambda codes: codes[3, 5].bitwise_xor_(1)),
    "a scale": ("model.layers.0.self_attn.v_proj.weight_scale", lambda scale: scale.view(torch.uint8)[2, 1].add_(1)),
    "a tensor scale": ("model.layers.0.mlp.down_proj.weight_global_scale", lambda divisor: divisor.mul_(1.5)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_base_that_changes_between_trainer_and_engine_stops_the_start(checkpoints, tmp_path, change):
    base = tmp_path / "base"
    shutil.copytree(checkpoints["nvfp4"], base)
    policy = make_policy(str(base))
    name, write = CHANGES[change]
    rewrite(base, name, write)
    engine = make_engine("vllm")
    with pytest.raises(ValueError, match=rf"base has changed.*{name.split('.')[2]}.*start the run again"):
        engine.start(policy, max_model_len=MAX_MODEL_LEN)


@pytest.fixture(scope="module")
def started(checkpoints):
    engine = make_engine("vllm")
    engine.start(make_policy(checkpoints["nvfp4"]), max_model_len=MAX_MODEL_LEN)
    yield engine
    engine.close()


def test_every_linear_of_the_engine_is_compared_with_the_trainers(started):
    fused = 4 * started._policy.config.num_hidden_layers
    assert started._call(base_weights.check_rows, started._policy.packed_linears()) == fused


@pytest.mark.parametrize("side", ["engine", "trainer"])
def test_a_base_that_is_overwritten_while_the_engine_runs_is_seen(started, side):
    if side == "engine":
        name = "model.layers.1.mlp.gate_up_proj.base_layer.weight"
        weight = started._call(lambda worker: dict(worker.get_model().named_parameters())[name].data)
        place = weight[len(weight) // 2]  # the first row of up_proj
    else:
        place = started._policy.packed_linears()["model.layers.1.mlp.up_proj"].codes[0]
    kept = place.clone()
    place.copy_(place.flip(0))
    with pytest.raises(RuntimeError, match=r"trainer's base: 1 of 8 linears differ.*layers\.1\.mlp\.gate_up_proj"):
        started.fingerprint()
    place.copy_(kept)
    started.fingerprint()


def test_an_engine_of_its_own_copy_agrees_with_a_trainer_in_tile_order(started, checkpoints):
    policy, tokens = make_policy(checkpoints["nvfp4"]), some_prompts(40)[0]
    one_copy.put_in_tile_order(policy.packed_linears())
    tiles = [name for name, linear in policy.packed_linears().items() if is_in_tile_order(linear.packed)]
    assert tiles
    model = started._call(lambda worker: worker.get_model())
    assert started._call(base_weights.check_rows, policy.packed_linears()) == 8
    with torch.no_grad():
        row = torch.tensor([tokens])
        scores = policy.model(input_ids=row).logits[0, :-1].log_softmax(-1).gather(1, row[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(started.score([tokens])[0]), scores, atol=1e-4, rtol=0)
    one_copy.lend(model, policy.packed_linears())
    lent = [each for each in base_weights.fused_linears(model, policy.packed_linears()) if each.layer.trainers_weight]
    assert len(lent) == len(fused_groups(tiles, present=policy.packed_linears().keys()))


def test_two_copies_are_logged(started, caplog):
    with caplog.at_level(logging.INFO):
        started._call(base_weights.log_copies, started._policy.packed_linears())
        started._call(base_weights.log_copies, {})
    assert len(re.findall(r"vLLM has its own copy of the base, next to the trainer's \d+ kB of", caplog.text)) == 1


def test_a_closed_engine_keeps_no_memory_of_the_trainer_alive(started):
    """After the engine is closed, nothing of it refers to the trainer's base weights, some of which vLLM's model
    shared, so their memory is freed when the trainer drops them. This holds even if compiled graphs or a traceback
    still refer to vLLM's model."""
    model = started._call(lambda worker: worker.get_model())
    tensors = {**started._policy.embedding_weights()}
    for name, linear in started._policy.packed_linears().items():
        tensors |= {f"{name}.codes": linear.codes, f"{name}.block_scale": linear.block_scale}
    memory = {name: StorageWeakRef(tensor.untyped_storage()) for name, tensor in tensors.items()}
    del tensors, linear
    started.close()
    gc.collect()
    assert [name for name, storage in memory.items() if not storage.expired()] == []
    assert sum(parameter.untyped_storage().nbytes() for parameter in model.parameters()) == 0


@pytest.mark.parametrize(("kernel", "expected"), [("auto", False), ("humming", False), ("native", True)])
def test_two_copies_are_planned_where_the_native_kernels_do_not_run(monkeypatch, kernel, expected):
    monkeypatch.setattr(driver, "is_available", lambda device: False)
    assert VLLMEngine(decoding_kernel=kernel).memory.one_copy == expected


@pytest.mark.parametrize("name", ["w13_weight", "w13_weight_scale", "w2_weight_scale_2"])
def test_sums_tell_a_flipped_bit_and_weights_that_two_experts_have_exchanged(name):
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.nn.Parameter:
        bits = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        return torch.nn.Parameter(bits, requires_grad=False)

    layer = torch.nn.Module()
    layer.w13_weight = torch.nn.Parameter(drawn(5, 4, 16).view(torch.int32), requires_grad=False)
    layer.w13_weight_scale = torch.nn.Parameter(drawn(5, 4, 3).view(torch.float8_e4m3fn), requires_grad=False)
    layer.w2_weight_scale_2 = torch.nn.Parameter(drawn(5, 4).view(torch.float32)[:, 0], requires_grad=False)
    before = base_weights.expert_sums(layer)
    assert len(before) == 3 * 5
    bits = layer.get_parameter(name).data
    bits = bits.view(torch.uint8 if bits.itemsize == 1 else torch.int32).view(5, -1)
    bits[3, -1] ^= 4
    assert (base_weights.expert_sums(layer) != before).sum() == 1
    bits[3, -1] ^= 4
    bits[[1, 2]] = bits[[2, 1]]
    assert (base_weights.expert_sums(layer) != before).sum() == 2
