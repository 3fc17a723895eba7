"""Whole runs with real pretrained models.

`make test-real` downloads the smallest model. The environment variable QERL_MODELS names a folder with GGUF files of
other models.
"""

import os
import signal
from pathlib import Path

import pytest
import torch

import train
from qerl_pl.results.curves import read_curves
from tests.callbacks.conftest import with_arguments
from tests.integration.conftest import ROOT, assert_same_run, launch, load_last
from tests.integration.test_families import STAGES, arguments, assert_exports_are_served, assert_whole_run
from tests.program import Program

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.vllm]

MODELS = Path(os.environ.get("QERL_MODELS", ROOT / "models" / "real"))
DATA = Path(os.environ.get("QERL_DATA", ROOT.parent / "shared" / "data"))
TOY = (
    "--trainer.callbacks.sigma_start=0.01",
    "--trainer.callbacks.sigma_end=0.001",
    "--model.rewards=[{name: even, weight: 1.0, reward: tests.integration.toy.even_tokens}]",
    "--model.micro_batch_tokens=400",
    "--data.max_prompt_tokens=96",
    "--model.engine.init_args.block_size=32",
)
CANARY: dict[str, object] = {"sample_every": 8, "score_every": 16, "num_tokens": 64}  # more than a block of the cache
ROLLOUTS = 20
ON_GPU = ("qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")


def model_file(name: str) -> Path:
    """Return the path of a model's GGUF file; skips the test if there is no such file."""
    if not (file := MODELS / f"{name}.gguf").is_file():
        pytest.skip(f"{file} is not there: `make test-real` gets smollm2-135m; QERL_MODELS names a folder with others")
    return file


@pytest.mark.timeout(1200)
def test_the_smallest_model_through_a_whole_run_on_a_cpu(run, tmp_path, monkeypatch):
    """The model is dequantised, quantised to NVFP4, trained with noise and every check, resumed, exported, and served
    by stock vLLM and PEFT. SmolLM2-135M has the widths (576, 1536) and the norms of a real model. A second run, in a
    process of its own, is stopped and resumed; it has to end with the same bits as the first."""
    base = model_file("smollm2-135m")
    monkeypatch.setenv("QERL_PL_CACHE", str(tmp_path / "cache"))
    checks = with_arguments("callbacks.canary.SyncCanary", CANARY, tmp_path)
    settings = ("-c", checks, *STAGES, *TOY)
    stops = ("--trainer.callbacks+=tests.integration.toy.CtrlC", "--trainer.callbacks.at=1")
    resumed = tmp_path / "resumed"

    def start(*more: str) -> Program:
        return launch("fit", base, resumed, *arguments(base), *settings, *more)

    stopped = start(*stops)
    used = assert_whole_run(run, "llama", base, tmp_path, *settings, gap=1e-4)
    output, _ = stopped.communicate()
    assert stopped.returncode == 128 + signal.SIGINT, output
    assert load_last(resumed)["global_step"] == 2
    rest = start("--ckpt_path", "last")
    assert_exports_are_served(used, tmp_path / "run", tmp_path)
    output, _ = rest.communicate()
    assert rest.returncode == 0, output
    assert_same_run(tmp_path / "run", resumed)


@pytest.mark.gpu
@pytest.mark.timeout(1200)  # several such runs and other programs may share the GPU
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("arm", [(), ("-c", "configs/arms/nvfp4_aqn.yaml")], ids=["bf16", "nvfp4_aqn"])
@pytest.mark.parametrize("name", ON_GPU)
def test_a_real_model_trains_on_gsm8k_with_every_check_and_no_alarm(run, tmp_path, monkeypatch, name, arm):
    monkeypatch.setenv("QERL_PL_CACHE", str(MODELS / "cache"))
    problems = [DATA / f"gsm8k_{part}.jsonl" for part in ("train", "test")]
    if not all(path.is_file() for path in problems):
        pytest.skip(f"{problems[0]} or {problems[1].name} is not there; set QERL_DATA to a folder with both")
    recipe = ("-c", "configs/tasks/gsm8k_verl.yaml", *arm, "--model.base", str(model_file(name)))
    sources = [
        f"--data.source.{part}_path={path}" for part, path in zip(("train", "validation"), problems, strict=True)
    ]
    sizes = ("--data.val_limit=64", "--data.batch_size=16", "--model.sampling.max_tokens=256")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["train.py"])
    train.main(
        ["fit", *recipe, *sources, *sizes, f"--trainer.max_steps={ROLLOUTS}", "--run_dir", str(tmp_path / "run")]
    )
    curves = read_curves(tmp_path / "run")
    assert curves["train/reward"].steps == list(range(ROLLOUTS))
    assert max(curves["canary/probe_share"].values) < 0.1
