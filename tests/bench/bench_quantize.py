"""The offline quantiser on a 7B-shape bf16 checkpoint, round to nearest: python -m tests.bench.bench_quantize

The checkpoint is random and is written first, under the folder for temporary files (15 GB, and 6 GB for the result).
``host_bytes`` is the peak of memory that the quantiser's process owns; pages of the mapped checkpoint, which the system
takes back when it needs them, come on top in ``host_mapped_bytes``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from qerl_pl.quant.layouts import read_layout
from qerl_pl.quant.loading import load_base
from tests.bench.harness import check, emit, model_config, random_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHARD_BYTES = 4 * 2**30


def write_checkpoint(folder: Path, size: str) -> int:
    """A random dense checkpoint in shards; returns its bytes."""
    config = model_config(size)
    model = random_model(config, None, dtype=torch.bfloat16, device=DEVICE)
    folder.mkdir()
    config.architectures = ["Qwen2ForCausalLM"]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, parameter in model.named_parameters():
        if shards[-1] and sum(t.nbytes for t in shards[-1].values()) + parameter.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = parameter.detach()
    names = [f"model-{index + 1:05}-of-{len(shards):05}.safetensors" for index in range(len(shards))]
    for name, tensors in zip(names, shards, strict=True):
        save_file({key: tensor.cpu() for key, tensor in tensors.items()}, folder / name, metadata={"format": "pt"})
    places = {key: name for name, tensors in zip(names, shards, strict=True) for key in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return sum(parameter.nbytes for parameter in model.parameters())


def watch(command: list[str]) -> tuple[float, dict[str, int]]:
    """Seconds of a command, and the peaks of its memory: own, mapped, and on the GPU."""
    peaks = {"host_bytes": 0, "host_mapped_bytes": 0, "device_bytes": 0}
    free_before = torch.cuda.mem_get_info()[0] if DEVICE == "cuda" else 0
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=sys.stderr)
    while process.poll() is None:
        fields = _memory(process.pid)
        peaks["host_bytes"] = max(peaks["host_bytes"], fields.get("RssAnon", 0) + fields.get("RssShmem", 0))
        peaks["host_mapped_bytes"] = max(peaks["host_mapped_bytes"], fields.get("RssFile", 0))
        if DEVICE == "cuda":
            peaks["device_bytes"] = max(peaks["device_bytes"], free_before - torch.cuda.mem_get_info()[0])
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed with {process.returncode}")
    return time.perf_counter() - start, peaks


def _memory(pid: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):  # it ended between the two looks
        return {}
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss")}


def main(argv: list[str] | None = None) -> None:
    """Print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="7B" if DEVICE == "cuda" else "tiny")
    parser.add_argument("--folder", type=Path, help="default: a new one for temporary files")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        source, target = Path(name, "dense"), Path(name, "packed")
        num_bytes = write_checkpoint(source, args.size)
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
        command = [sys.executable, "-m", "qerl_pl", "quantize", "--model", str(source), "--output", str(target)]
        seconds, peaks = watch([*command, "--format", "nvfp4", "--method", "rtn"])
        layout = read_layout(target)
        model = load_base(target, dtype=torch.bfloat16, device=DEVICE)
        packed = sum(name.endswith(".codes") for name, _ in model.named_buffers())
        expected = 7 * model.config.num_hidden_layers
        check([("the number of packed linears", float(layout is None or packed != expected), 0)])
        written = sum(file.stat().st_size for file in target.iterdir())
    shape = {"model": args.size, "method": "rtn"}
    emit("quantize/nvfp4", shape, "bfloat16", [seconds], read_bytes=num_bytes, written_bytes=written, **peaks)


if __name__ == "__main__":
    main()
