"""A whole run with a small model of each family: the model is quantised at first use, trained on completions that vLLM
samples, and exported, and the run is resumed."""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from qerl_pl.__main__ import main as command
from qerl_pl.common.checks import CheckFailed
from qerl_pl.model.family import FAMILIES
from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.policy import load_policy
from qerl_pl.quant.declared import read_layout
from qerl_pl.quant.nvfp4 import NVFP4
from qerl_pl.results.curves import read_curves
from qerl_pl.rollout.vllm.arguments import query_scaling
from qerl_pl.tools.merge import write_merged
from qerl_pl.training.routing import MOST_OTHERS
from tests import support
from tests.families import MIXTURES, NAMES, OWN, WHOLE, tiny_config, with_vision
from tests.integration.conftest import VLLM, assert_same_run, load_last, without
from tests.rollout.conftest import random_adapter, save_dense
from tests.rollout.expert_faults import KERNELS, SLOTS

SHORT = ("--trainer.max_steps", "3", "--trainer.val_check_interval", "3", "--model.warmup_steps", "0")
STAGES = ("--trainer.callbacks.num_stages", "3")
QUANTIZE = ("--model.quantize", "nvfp4")
VOCABULARY = 320  # a multiple of 64 above the quickstart's, which vLLM does not pad
GPU_SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "initializer_range": 0.05}
DELTA_NET: dict[str, Any] = {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rope_parameters": {**OWN["qwen3_5_text"]["rope_parameters"], "mrope_section": [8, 4, 4]},
}
ON_GPU: dict[str, dict[str, Any]] = {  # sizes that the family's kernels take, beside those of all
    "qwen3": {},
    "llama": {},
    "gemma3_text": {},
    "gemma4_text": {"global_head_dim": 128},
    "qwen3_5_text": DELTA_NET,
    "qwen3_moe": {"moe_intermediate_size": 128},
    "qwen3_5_moe_text": {
        **DELTA_NET,
        "intermediate_size": None,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    },
    "glm4_moe": {"moe_intermediate_size": 128},
}
GPU_ENGINE = ("--model.engine.max_num_seqs", "16", "--model.engine.kv_cache_bytes", str(2**28))


@pytest.fixture
def make_base(bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a function that writes a small random model of a family, in the form in which checkpoints of the family
    are published (with a vision part if they have one), and with the quickstart's tokenizer. The function returns the
    folder."""
    monkeypatch.setenv("QERL_PL_CACHE", str(tmp_path / "cache"))

    def make(family: str, **sizes: Any) -> Path:
        tokenizer = AutoTokenizer.from_pretrained(bases["dense"])
        config = tiny_config(family, **{**sizes, "vocab_size": VOCABULARY, "eos_token_id": tokenizer.eos_token_id})
        save_dense(tmp_path / "base", with_vision(config) if family in WHOLE else config)
        for file in tmp_path.glob("base/token*"):
            file.unlink()
        if family == "qwen2":  # transformers loads this class for a Qwen2, whatever the folder says
            for file in (*bases["dense"].glob("token*"), *bases["dense"].glob("*.jinja")):
                shutil.copy(file, tmp_path / "base")
        else:
            PreTrainedTokenizerFast(
                tokenizer_object=tokenizer.backend_tokenizer,
                eos_token=tokenizer.eos_token,
                chat_template=tokenizer.chat_template,
            ).save_pretrained(tmp_path / "base")
        (tmp_path / "base" / "generation_config.json").unlink()
        return tmp_path / "base"

    return make


def first(names: Iterable[str]) -> list[Any]:
    """Return names as test parameters, all but the first marked ``long``, because each needs whole runs or the start of
    a process with vLLM."""
    return [pytest.param(name, marks=[pytest.mark.long] if at else []) for at, name in enumerate(names)]


def arguments(base: Path) -> tuple[str, ...]:
    """Return arguments of a run of three steps that quantises its base first."""
    return "--model.base", str(base), *QUANTIZE, *SHORT, *STAGES, *VLLM


STOCK = """
import json, os, sys
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", TORCHDYNAMO_DISABLE="1", VLLM_LOGGING_LEVEL="ERROR")
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
base, settings, *adapters = sys.argv[1:]
llm = LLM(base, dtype="float32", enforce_eager=True, max_model_len=128, enable_lora=True, max_lora_rank=8,
          kv_cache_memory_bytes=32 << 20, hf_overrides=json.loads(settings), enable_mixed_moe_lora_format=EXPERTS)
greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
for lora in (None, *(LoRARequest("adapter", 1, adapter, is_3d_lora_weight=EXPERTS) for adapter in adapters)):
    [request] = llm.generate({"prompt_token_ids": list(range(20, 60))}, greedy, lora_request=lora, use_tqdm=False)
    print("TOKENS", list(request.outputs[0].token_ids))
"""


def assert_stock_libraries_agree(base: Path, *adapters: Path) -> list[list[int]]:
    """Check that stock vLLM and stock transformers continue a prompt with the same greedy tokens, and that vLLM and
    PEFT do so with each adapter. vLLM has no CPU kernels for mixtures of experts with adapters, so there it uses those
    of ``rollout/vllm/cpu_experts.py``. Returns lists of tokens: those without an adapter, and those with each
    adapter."""
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    code = STOCK.replace("EXPERTS", str(FAMILIES[model.config.model_type].experts is not None))
    command_line = [sys.executable, "-c", code, base, json.dumps(query_scaling(model.config)), *adapters]
    process = subprocess.run(command_line, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    said = [line for line in process.stdout.splitlines() if line.startswith("TOKENS")]
    tokens, continued = torch.arange(20, 60).view(1, -1), []
    for adapter in (None, *adapters):
        stock = PeftModel.from_pretrained(model, adapter) if adapter else model
        found = stock.generate(input_ids=tokens, max_new_tokens=8, do_sample=False, eos_token_id=-1)
        continued.append(found[0, 40:].tolist())
        assert said.pop(0) == f"TOKENS {continued[-1]}", adapter
    return continued


def assert_exports_are_served(base: Path, run_dir: Path, folder: Path) -> None:
    """Check that vLLM without this project's changes samples from an exported policy the same greedy tokens as stock
    PEFT or transformers.

    These libraries cannot read NVFP4 on a CPU, so the exported adapter is used with a bf16 copy of the NVFP4 base. If
    vLLM's LoRA loader cannot load adapters of the family, the merged model is served instead.
    """
    untrained = load_policy(str(base), dtype=torch.float32, lora=LoraSettings(rank=4, alpha=8), seed=0)
    write_merged(untrained, folder / "bf16")
    if untrained.family.keys_as_values:  # vLLM's own LoRA loader would adapt the keys alone
        merge = ["--merge", "bf16", "--output", str(folder / "merged")]
        assert command(["export", "--run", str(run_dir), *merge]) == 0
        assert_stock_libraries_agree(folder / "bf16")
        assert_stock_libraries_agree(folder / "merged")
    else:
        assert_stock_libraries_agree(folder / "bf16", folder / "out")


def assert_whole_run(run, family: str, base: Path, folder: Path, *more: str, gap: float) -> Path:
    """Quantise a base, train three steps with noise on the norms and all checks, and export the adapter. Each part that
    works is recorded for the documentation's table of families. ``gap`` is the largest difference between trainer and
    engine that is allowed, in nats.

    Returns:
        Folder of the quantised base. The run is in ``folder / "run"``, the exported adapter in ``folder / "out"``.
    """
    cli = run("fit", folder / "run", *arguments(base), *more)
    metrics, policy = cli.trainer.callback_metrics, cli.model.policy
    used = Path(cli.model.settings.folder)
    assert used.parent == folder / "cache"
    assert (layout := read_layout(used)) is not None
    assert layout.fmt is NVFP4
    support.seen(family, "quantise")
    last = load_last(folder / "run")
    assert last["global_step"] == 3
    assert any(tensor.abs().max() > 0 for name, tensor in last["state_dict"].items() if "lora_B" in name)
    support.seen(family, "train")
    curves = read_curves(folder / "run")
    assert max(curves["canary/score_gap"].values) < gap  # with the same noise in trainer and engine
    assert curves["ledger/kernel/mean_abs"].values[0] < gap  # with the engine's norms clean
    assert curves["ledger/decode/mean_abs"].values[0] < gap
    support.seen(family, "vLLM rollout")
    num_norms = len(policy.family.noise_norms) * policy.num_layers
    assert metrics["aqn/noisy_norms"] == num_norms
    support.seen(family, "AQN")
    assert metrics["canary/tensors_checked"] == len(policy.adapter_state()) + num_norms
    support.seen(family, "canary")
    assert command(["export", "--run", str(folder / "run"), "--output", str(folder / "out")]) == 0
    assert json.loads((folder / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(used)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_config(policy.config), folder / "out")
    weights = {name.replace(".default", ""): tensor for name, tensor in model.state_dict().items()}
    assert all(torch.equal(weights[name], tensor) for name, tensor in last["state_dict"].items())
    support.seen(family, "export")
    return used


def assert_experts_are_replayed(folder: Path, family: str) -> None:
    """Check from the curves of a run that training used the experts that the sampler had chosen for each token, and
    that the trainer's routers would rarely have chosen others."""
    curves = read_curves(folder)
    changed, others = curves["router/changed_share"], curves["router/other_experts_max"]
    assert changed.steps == [0, 1, 2]
    assert changed.values[0] < 1e-3  # without noise
    assert max(others.values) < (0.1 if family == "qwen3_moe" else MOST_OTHERS)
    assert all(load >= 1 for load in curves["router/max_load"].values)
    parts = [curves[f"ledger/{cause}/k1"].values[0] for cause in ("routing", "kernel", "noise", "decode")]
    assert abs(parts[0]) < 1e-5
    assert sum(parts) == pytest.approx(curves["gap/k1"].values[0], abs=1e-4)  # of some rows, and of all


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("family", first(MIXTURES))
def test_experts_of_the_token_before_stop_a_run_in_their_rollout(run, make_base, tmp_path, family):
    base = make_base(family, initializer_range=0.05)
    fault = "--trainer.callbacks+=tests.integration.toy.ShiftedRoutes", "--trainer.callbacks.at=1"
    with pytest.raises(CheckFailed, match="the sampler's log-probabilities of rollout 1 differ from the trainer's"):
        run("fit", tmp_path / "run", *arguments(base), *fault)
    assert load_last(tmp_path / "run")["global_step"] == 1


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.parametrize("family", MIXTURES)
def test_experts_of_the_token_before_stop_the_update_unless_it_does_without_them(run, make_base, tmp_path, family):
    base = make_base(family, initializer_range=0.05)
    fault = "--trainer.callbacks+=tests.integration.toy.ShiftedRoutes", "--trainer.callbacks.at=1"
    alone = without("callbacks.rollout_evidence.RolloutEvidence")
    with pytest.raises(CheckFailed, match=r"of the experts that the engine returned .*model.router_replay to off"):
        run("fit", tmp_path / "alone", *alone, *arguments(base), *fault)
    assert load_last(tmp_path / "alone")["global_step"] == 1
    run("fit", tmp_path / "off", *arguments(base), *fault, "--model.router_replay", "off")


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("fault", [*first(SLOTS), *first(KERNELS)])
def test_a_fault_in_vllms_adapters_of_experts_stops_a_run_in_its_rollout(run, make_base, tmp_path, fault):
    base = make_base("qwen3_moe", initializer_range=0.05)
    callback = "--trainer.callbacks+=tests.integration.toy.FaultyExperts", "--trainer.callbacks.at=1"
    with pytest.raises(CheckFailed, match=r"the rollout engine|vLLM holds different adapters"):
        run("fit", tmp_path / "run", *arguments(base), *callback, f"--trainer.callbacks.fault={fault}")
    assert load_last(tmp_path / "run")["global_step"] == 1


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.parametrize("family", MIXTURES)
def test_stock_libraries_sample_alike_from_an_adapter_that_changes_experts_a_lot(tmp_path, family):
    save_dense(tmp_path / "base", tiny_config(family))
    (tmp_path / "base" / "generation_config.json").unlink()
    lora = LoraSettings(rank=6, alpha=12, rslora=True, expert_rank=5)
    policy = load_policy(str(tmp_path / "base"), dtype=torch.float32, lora=lora, seed=0)
    policy.peft_config.save_pretrained(str(tmp_path / "adapter"))
    adapter = {name: t if ".experts." in name else t * 0 for name, t in random_adapter(policy, seed=1).items()}
    save_file(adapter, tmp_path / "adapter" / "adapter_model.safetensors")
    without, with_adapter = assert_stock_libraries_agree(tmp_path / "base", tmp_path / "adapter")
    assert without != with_adapter


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.parametrize("family", NAMES)
def test_a_family_through_a_whole_run(run, make_base, tmp_path, family):
    # With larger random weights, the noise on the norms makes routers choose other experts for a tenth of the tokens.
    base = make_base(family, **({"initializer_range": 0.05} if family in MIXTURES else {}))
    used = assert_whole_run(run, family, base, tmp_path, gap=1e-4)
    if FAMILIES[family].experts:
        assert_experts_are_replayed(tmp_path / "run", family)
    resumed = tmp_path / "resumed"
    run(
        "fit", resumed, *arguments(base), "--trainer.callbacks+=tests.integration.toy.CtrlC", "--trainer.callbacks.at=1"
    )
    assert load_last(resumed)["global_step"] == 2
    run("fit", resumed, *arguments(base), "--ckpt_path", "last")
    assert_same_run(tmp_path / "run", resumed)
    support.seen(family, "resume")
    assert_exports_are_served(used, tmp_path / "run", tmp_path)
    support.seen(family, "stock vLLM and PEFT")


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", ON_GPU)
def test_a_family_through_a_whole_run_in_bf16_with_compiled_vllm(run, make_base, tmp_path, family):
    if family == "gemma4_text":
        pytest.importorskip("cutlass", reason="vLLM's attention for it needs: pip install nvidia-cutlass-dsl")
    base = make_base(family, **{**GPU_SIZES, **ON_GPU[family]})
    assert_whole_run(run, family, base, tmp_path, "--model.dtype", "bfloat16", *GPU_ENGINE, gap=math.inf)
