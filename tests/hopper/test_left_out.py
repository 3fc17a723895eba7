"""The product works without the folder qerl_pl/hopper: imports, memory plans, training, and rollouts by vLLM's
kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the product's packages without the folder qerl_pl/hopper."""
    folder = tmp_path_factory.mktemp("product")
    for name in ("qerl_pl", "callbacks", "datamodules", "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("hopper", "__pycache__"))
    return folder


HERE_ALONE = """
import sys

# An installation of the clone by `pip install -e` would find the folder there.
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in str(finder).lower()]
"""


def run(product: Path, script: str, *arguments: object) -> str:
    """Run a Python script in a process that imports ``product``, a copy of the repository without qerl_pl/hopper.
    Returns what the script prints."""
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # vLLM may be found there
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(product), str(ROOT), *filter(None, others)])}
    command = [sys.executable, "-c", HERE_ALONE + script, *map(str, arguments)]
    done = subprocess.run(command, cwd=product, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


IMPORTED = """
import pkgutil
import sys
from importlib import import_module
from pathlib import Path

import torch

import qerl_pl
from qerl_pl.rollout.vllm.setup import prepare_environment

assert Path(qerl_pl.__file__).parent.parent == Path.cwd(), qerl_pl.__file__
prepare_environment()
others = {"cpu", "cpu_delta_net"} if torch.cuda.is_available() else {"cuda"}
names = [module.name for module in pkgutil.walk_packages(qerl_pl.__path__, "qerl_pl.")]
assert len(names) > 100
for name in names:
    if name.rpartition(".")[2] not in others | {"__main__"}:
        import_module(name)
"""


@pytest.mark.long
def test_every_module_is_imported(product):
    run(product, IMPORTED)


TRAINED = """
import sys
from pathlib import Path

from qerl_pl.__main__ import main
from qerl_pl.tools.tiny import make_tiny

make_tiny(Path("dense"), seed=0, sft_steps=0)
assert not main(["quantize", "--model", "dense", "--output", "nvfp4"])
toy = ["-c", "quickstart", "--model.base", "nvfp4"]
assert not main(["plan", *toy, "--gpu-memory", "8", "--hopper"])
main(["doctor"])
small = ["--data.batch_size", "2", "--trainer.limit_val_batches", "1", "--trainer.max_steps", "10"]
sys.argv = ["qerl", "fit", *toy, *small, "--run_dir", "run"]
assert not main(sys.argv[1:])
assert not [name for name in sys.modules if name.startswith("qerl_pl.hopper")]
"""


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs vLLM's CPU platform")
def test_a_small_run_on_a_cpu_is_planned_and_trained(product):
    printed = run(product, TRAINED)
    reason = "this installation has no folder qerl_pl/hopper"
    assert f"for speed alone (qerl_pl/hopper/patches.py): nothing, because {reason}\n" in printed
    assert printed.count(f"rollouts run without this project's changes of vLLM for speed: {reason}") == 1
    assert (product / "run" / "checkpoints" / "last.ckpt").exists()


SAMPLED = """
import sys

import torch

from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.vllm import VLLMEngine, worker
from tests.rollout.conftest import (
    MAX_MODEL_LEN,
    assert_sampled_by_its_policy,
    make_policy,
    random_adapter,
    some_prompts,
)

policy = make_policy(sys.argv[1], dtype=torch.bfloat16).cuda()
policy.load_adapter_state(random_adapter(policy, seed=1))
engine = VLLMEngine(kv_cache_bytes=2**30, max_num_seqs=64)
assert not engine.memory.one_copy
engine.start(policy, max_model_len=MAX_MODEL_LEN)
kernels = engine._call(worker.linear_kernels)
assert sum(kernels.values()) == 8 and not any("Native" in name for name in kernels), kernels
for copies in (1, 8, 40):
    assert_sampled_by_its_policy(engine, some_prompts(1, 40, 70), Sampling(num_completions=copies, max_tokens=12))
held = engine.fingerprint()
engine.sleep()
engine.wake()
assert engine.fingerprint() == held
engine.close()
found = {name: str(module) for name, module in sys.modules.items() if name.startswith("qerl_pl.hopper")}
assert not found, found
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_vllms_kernels_sample_from_the_policy(product, unpadded):
    run(product, SAMPLED, unpadded)
