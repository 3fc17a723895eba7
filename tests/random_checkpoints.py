"""Write checkpoints with the shapes of real models and random weights: python -m tests.random_checkpoints FOLDER

They serve measurements, because speed and memory do not depend on the weights. Linear layers are drawn in NVFP4, and a
dense checkpoint has the same weights, rounded to bf16, so both formats of a size are the same model. The tokenizer is
that of the quickstart's tiny model, whose tokens are bytes.
"""

import argparse
import fcntl
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qerl_pl.quant.layouts import WRITERS
from qerl_pl.quant.loading import empty_model
from qerl_pl.quant.nvfp4 import NVFP4
from qerl_pl.quant.output import OutputFolder
from qerl_pl.tools.tiny import END_ID, make_tokenizer
from tests.bench.harness import DEVICE, FORMATS
from tests.random_models import MODELS, model_config, random_weight, stays_dense

SHARD_BYTES = 4 * 2**30


def write_random_checkpoint(folder: Path, size: str, fmt: str, *, num_layers: int | None = None) -> Path:
    """Write a checkpoint with random weights, which vLLM and the trainer can load, to the subfolder ``f"{size}-{fmt}"``
    of ``folder``, unless this subfolder exists already; returns the subfolder's path. ``size`` is one of ``MODELS`` and
    gives the shapes of the weights, ``fmt`` is "nvfp4" or "bf16", and ``num_layers`` replaces the model's number of
    blocks."""
    path = folder / f"{size}-{fmt}"
    if path.exists():
        return path
    config = model_config(size, num_layers=num_layers)
    model = empty_model(config, torch.bfloat16)
    config.architectures, config.dtype = [type(model).__name__], torch.bfloat16
    config.eos_token_id = END_ID
    source = folder / f"{size}-{fmt}.source"
    shutil.rmtree(source, ignore_errors=True)
    config.save_pretrained(source)
    make_tokenizer().save_pretrained(source)
    about = config.to_dict()
    if fmt == "nvfp4":
        linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        dense = [name for name in linears if stays_dense(model, name)]
        about["quantization_config"] = WRITERS["nvfp4"].config(dense, torch.bfloat16)
    torch.manual_seed(0)
    output = OutputFolder(path, {"size": size, "format": fmt})
    shard: dict[str, Tensor] = {}
    held = 0
    for name, tensor in _tensors(model, fmt):
        if shard and held + tensor.nbytes > SHARD_BYTES:
            output.add(f"model-{len(output.done):05}.safetensors", shard)
            shard, held = {}, 0
        shard[name] = tensor.cpu()
        held += tensor.nbytes
    output.add(f"model-{len(output.done):05}.safetensors", shard)
    output.finish(source, about)
    shutil.rmtree(source)
    return path


def written_apart(folder: Path, size: str, fmt: str) -> Path:
    """Call ``write_random_checkpoint`` in a process of its own, so that none of the GPU's memory stays in use; returns
    the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.random_checkpoints", str(folder), "--size", size, "--format", fmt]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.strip().splitlines()[-1])


def _tensors(model: PreTrainedModel, fmt: str) -> Iterator[tuple[str, Tensor]]:
    for name, module in model.named_modules():
        for leaf, meta in module.named_parameters(recurse=False):
            full = f"{name}.{leaf}"
            if name == "lm_head" and model.config.tie_word_embeddings:
                continue
            if isinstance(module, nn.Linear) and leaf == "weight" and not stays_dense(model, name):
                weight = random_weight(module.out_features, module.in_features, DEVICE)
                if fmt == "nvfp4":
                    tensors = WRITERS["nvfp4"].tensors(weight, torch.bfloat16)
                    yield from ((name + suffix, tensor) for suffix, tensor in tensors.items())
                else:
                    yield full, NVFP4.dequantize(weight, torch.bfloat16)
                continue
            value = torch.zeros(meta.shape, dtype=torch.bfloat16, device=DEVICE)
            if "norm" in name:
                value.fill_(1.0)
            elif leaf == "weight":
                value.normal_(std=0.02)
            yield full, value


def main(argv: list[str] | None = None) -> None:
    """Write a checkpoint and print its path."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", default="tiny", choices=MODELS)
    parser.add_argument("--format", default="nvfp4", choices=FORMATS)
    args = parser.parse_args(argv)
    with (args.folder / f"{args.size}-{args.format}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another benchmark may be writing the same checkpoint: wait for it
        print(write_random_checkpoint(args.folder, args.size, args.format))


if __name__ == "__main__":
    main()
