"""Let processes that share a GPU execute their kernels at the same time, by NVIDIA's Multi-Process Service (MPS).

Without MPS a GPU executes one process at a time and switches between them, so small models leave most of it idle.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

CONTROL = "nvidia-cuda-mps-control"  # comes with NVIDIA's driver
PIPES = "CUDA_MPS_PIPE_DIRECTORY"  # CUDA programs use the service that listens in this folder
SECONDS = 60.0  # for a command of the service
MAKE_CONTEXT = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
device, context = ctypes.c_int(), ctypes.c_void_p()
failed = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0)
raise SystemExit(1 if failed or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) else 0)
"""


@contextmanager
def gpus_shared() -> Iterator[dict[str, str]]:
    """Start MPS for the processes of this context, and end it with the context.

    Yields:
        Environment variables with which a process uses the service; none if a service runs already, which CUDA programs
        find by themselves, or if none can be started, of which a message gives the reason.
    """
    failed = "" if shutil.which(CONTROL) else f"{CONTROL} was not found"
    if failed or not _run([CONTROL], os.environ, "get_server_list\n"):
        _warn(failed)
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        variables = {PIPES: folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        # the service offers all GPUs; a process selects its own by CUDA_VISIBLE_DEVICES
        environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"} | variables
        try:
            failed = _run([CONTROL, "-d"], environment) or _run([sys.executable, "-c", MAKE_CONTEXT], environment)
            _warn(failed)
            yield {} if failed else variables
        finally:
            _run([CONTROL], environment, "quit\n")


def _run(words: list[str], environment: Mapping[str, str], sent: str = "") -> str:
    """Run a command; returns why it failed, "" if it did not."""
    try:
        done = subprocess.run(
            words, input=sent, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    output = " ".join((done.stdout + done.stderr).split())
    return f"{words[0]} ended with status {done.returncode}: {output}" if done.returncode else ""


def _warn(failed: str) -> None:
    if failed:
        print(f"runs that share a GPU take turns, which is slower, because MPS cannot be used ({failed})", flush=True)
