"""Compile CUDA C++ kernels for Hopper with NVRTC, without a CUDA toolkit; cache the binaries and launch them."""

import ctypes
import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

FOLDER, COMMON = Path(__file__).parent, ("hopper.cuh", "nvfp4.cuh", "lora.cuh")
ARCHITECTURE = "sm_90a"
_COMPILING = ThreadPoolExecutor(thread_name_prefix="NVRTC")  # NVRTC releases the GIL


class Kernel(NamedTuple):
    """One instance of a CUDA C++ template, compiled as a function with a C name."""

    source: str  # file name in this folder
    name: str  # exported name
    code: str  # CUDA code appended to the source: the exported function
    shared_bytes: int  # dynamic shared memory of a thread block, in bytes


def is_available(device: torch.device) -> bool:
    """Return whether the GPU has compute capability 9.0 and the package cuda-bindings is installed."""
    if device.type != "cuda" or not torch.cuda.is_available() or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return _has_bindings()


def has_compiler() -> bool:
    """Return whether cuda-bindings is installed and finds the compiler NVRTC."""
    if not _has_bindings():
        return False
    try:
        import_module("cuda.bindings.nvrtc").nvrtcVersion()
    except RuntimeError:  # NVRTC was not found; the message lists the paths that were searched
        return False
    return True


def compiled(kernel: Kernel) -> bytes:
    """Compile a CUDA C++ kernel to a cubin by NVRTC, which takes about a second and needs no GPU. Raises RuntimeError
    with the compiler's log if it fails."""
    nvrtc: Any = import_module("cuda.bindings.nvrtc")
    [program] = checked(nvrtc.nvrtcCreateProgram(_text(kernel).encode(), kernel.source.encode(), 0, [], []))
    options = [f"--gpu-architecture={ARCHITECTURE}".encode(), b"-std=c++17"]
    failed = int(nvrtc.nvrtcCompileProgram(program, len(options), options)[0])
    [size] = checked(nvrtc.nvrtcGetProgramLogSize(program))
    log = b" " * size
    checked(nvrtc.nvrtcGetProgramLog(program, log))
    if failed:
        raise RuntimeError(f"{kernel.source} does not compile for {ARCHITECTURE}: {log.decode().strip()}")
    [size] = checked(nvrtc.nvrtcGetCUBINSize(program))
    cubin = b" " * size
    checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    checked(nvrtc.nvrtcDestroyProgram(program))
    return cubin


def start_compiling(kernels: Iterable[Kernel]) -> None:
    """Start to compile kernels in parallel threads; ``prepare`` waits for them."""
    for kernel in kernels:
        _cubin(kernel)


def prepare(kernels: Iterable[Kernel], device: torch.device) -> None:
    """Compile kernels in parallel threads and load them on a device. Must not be called while a CUDA graph is
    captured."""
    kernels = list(dict.fromkeys(kernels))
    start_compiling(kernels)
    for kernel in kernels:
        load(kernel, device.index)


@cache
def load(kernel: Kernel, device: int) -> Any:
    """Return the CUDA driver's handle of a kernel on a device. The first call compiles and loads the kernel, and must
    not be made while a CUDA graph is captured."""
    driver: Any = import_module("cuda.bindings.driver")
    path = _cubin(kernel).result()
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # initialises CUDA
        [module] = checked(driver.cuModuleLoadData(path.read_bytes()))
        [function] = checked(driver.cuModuleGetFunction(module, kernel.name.encode()))
        shared = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked(driver.cuFuncSetAttribute(function, shared, kernel.shared_bytes))
    return function


def launch(
    kernel: Kernel,
    *,
    grid: tuple[int, int, int],
    threads: int,
    cluster: int,
    device: torch.device,
    arguments: Sequence[Any],
    pdl: bool = False,
) -> None:
    """Launch a kernel on the current stream. Raises RuntimeError if the CUDA driver refuses it.

    Args:
        cluster: number of consecutive thread blocks along y that form a cluster.
        arguments: integers, tensors, None for a null pointer, and structures of the driver.
        pdl: use programmatic dependent launch: the kernel may start before the previous one of the stream has ended,
            and must execute ``griddepcontrol.wait`` before it reads what the previous one writes.
    """
    driver: Any = import_module("cuda.bindings.driver")
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = kernel.shared_bytes
    config.hStream = torch.cuda.current_stream(device).cuda_stream
    kinds = driver.CUlaunchAttributeID
    shape, start = driver.CUlaunchAttribute(), driver.CUlaunchAttribute()
    shape.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    dimension = shape.value.clusterDim
    dimension.x, dimension.y, dimension.z = 1, cluster, 1
    start.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    start.value.programmaticStreamSerializationAllowed = int(pdl)
    config.attrs, config.numAttrs = [shape, start], 2
    values, types = zip(*map(_argument, arguments), strict=True)
    checked(driver.cuLaunchKernelEx(config, load(kernel, device.index), (values, types), 0))


def checked(result: Any) -> tuple[Any, ...]:
    """Return what a function of the CUDA bindings has returned after its status. Raises RuntimeError if the status is
    an error."""
    error, *values = result
    if int(error):
        raise RuntimeError(f"CUDA: {error!r}")
    return tuple(values)


@cache
def _cubin(kernel: Kernel) -> Future[Path]:
    """Return a future of the path of a kernel's cubin; the first call for a kernel starts to compile it in a thread."""
    return _COMPILING.submit(_compiled_file, kernel)


def _compiled_file(kernel: Kernel) -> Path:
    """Return the path of a kernel's cubin in Triton's cache folder; compile the kernel first if it is not there."""
    from triton.runtime.cache import get_cache_manager

    version = checked(import_module("cuda.bindings.nvrtc").nvrtcVersion())
    kept = get_cache_manager(hashlib.sha256(f"{_text(kernel)} {ARCHITECTURE} {version}".encode()).hexdigest())
    name = f"{kernel.name}.cubin"
    return Path(kept.get_file(name) or kept.put(compiled(kernel), name))


def _has_bindings() -> bool:
    return find_spec("cuda") is not None and find_spec("cuda.bindings") is not None


def _text(kernel: Kernel) -> str:
    return "\n".join([*((FOLDER / name).read_text() for name in (*COMMON, kernel.source)), kernel.code])


def _argument(value: Any) -> tuple[Any, Any]:
    """Convert a kernel argument to the value and the ctypes type that cuda-bindings expects."""
    if value is None or isinstance(value, Tensor):
        return (0 if value is None else value.data_ptr()), ctypes.c_void_p
    return value, ctypes.c_int if isinstance(value, int) else None
