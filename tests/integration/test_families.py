"""Each model family through a whole run: quantised at first use, trained on what vLLM samples, exported."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from qerl_pl.__main__ import main as command
from qerl_pl.quant.layouts import read_layout
from qerl_pl.quant.nvfp4 import NVFP4
from tests import support
from tests.families import NAMES, WHOLE, tiny_config, with_vision
from tests.integration.conftest import VLLM, load_last
from tests.rollout.conftest import save_dense

SHORT = ("--trainer.max_steps", "3", "--trainer.val_check_interval", "3", "--model.warmup_steps", "0")
STAGES = ("--trainer.callbacks.num_stages", "3")
QUANTIZE = ("--model.quantize", "nvfp4")
VOCABULARY = 320  # a multiple of 64 above the quickstart's, which vLLM does not pad
ON_GPU = ("qwen3", "llama", "gemma3_text", "gemma4_text")
GPU_SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "initializer_range": 0.05}
GPU_ENGINE = ("--model.engine.max_num_seqs", "16", "--model.engine.kv_cache_bytes", str(2**28))


@pytest.fixture
def make_base(bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Folder of a random model of a family, as it is published, with the quickstart's tokenizer."""
    monkeypatch.setenv("QERL_PL_CACHE", str(tmp_path / "cache"))

    def make(family: str, **sizes: float) -> Path:
        config = tiny_config(family)
        tokenizer = AutoTokenizer.from_pretrained(bases["dense"])
        for name, value in {**sizes, "vocab_size": VOCABULARY, "eos_token_id": tokenizer.eos_token_id}.items():
            setattr(config, name, value)
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


def assert_whole_run(run, family: str, base: Path, folder: Path, *more: str, gap: float) -> None:
    """Quantise, train three steps with noise and the canary, and export; notes each part that works."""
    cli = run("fit", folder / "run", "--model.base", str(base), *QUANTIZE, *SHORT, *STAGES, *VLLM, *more)
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
    assert metrics["canary/score_gap"] < gap  # with the same noise in trainer and engine
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


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.parametrize("family", NAMES)
def test_a_family_through_a_whole_run(run, make_base, tmp_path, family):
    assert_whole_run(run, family, make_base(family), tmp_path, gap=1e-4)


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", ON_GPU)
def test_a_family_through_a_whole_run_in_bf16_with_compiled_vllm(run, make_base, tmp_path, family):
    base = make_base(family, **GPU_SIZES)
    assert_whole_run(run, family, base, tmp_path, "--model.dtype", "bfloat16", *GPU_ENGINE, gap=math.inf)
