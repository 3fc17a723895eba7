"""Compile the kernels of ``grouped_nvfp4`` for a Hopper GPU, on any machine, and count what decides their speed:
python -m tests.hopper.compiled_nvfp4

The main loop is the one with HGMMA, the instruction that multiplies. ``issued`` is the number of a thread's
instructions in it per weight, and ``alu`` the number of those that are integer operations, which an SM starts at half
the rate of others. An H200 reads 4.8e12 bytes a second, which are 8.5e12 weights; each of its 132 SMs issues 128
instructions of threads per cycle, 33e12 a second at 1.98 GHz. So reading takes longer than computing below 3.9
instructions and 2 integer operations per weight, if enough thread blocks run at the same time.
"""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qerl_pl.hopper import grouped_nvfp4
from qerl_pl.hopper.grouped_nvfp4 import Tile
from tests.bench.harness import emit, parser_with

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {"y": "bf16", "x": "bf16", "factors0": "fp32", "factors1": "fp32", "shares": "fp32"}
POINTERS |= {"words0": "i32", "words1": "i32", "scales0": "u8", "scales1": "u8"}
POINTERS |= {"experts": "i32", "counts": "i32", "rows": "i32"}
ALU = {"LOP3", "SHF", "PRMT", "IADD3", "VIADD", "ISETP", "SEL", "PLOP3", "LEA"}
"""Integer operations; multiplications are not among them, because other units compute them."""


def compiled(kernel: Any, constants: dict[str, Any], *, ids: str = "i32", **options: Any) -> Any:
    """Compile a kernel of ``grouped_nvfp4`` for the case that addresses and sizes, except the number of rows, are
    multiples of 16, as those of the models that are measured are. ``ids`` is the dtype of the experts' ids."""
    signature, names, pointers = {}, kernel.arg_names, POINTERS | {"ids": ids}
    for name in names:
        signature[name] = "constexpr" if name in constants else f"*{pointers[name]}" if name in pointers else "i32"
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = [index for index, name in enumerate(names) if name not in {*constants, "num_rows", "num_experts"}]
    attributes = {(index,): [["tt.divisibility", 16]] for index in aligned}
    source = ASTSource(kernel, signature, constexprs=values, attrs=attributes)
    return triton.compile(source, target=TARGET, options=options)


def compiled_product(tile: Tile, slices: int, *, weighted: bool) -> Any:
    """Compile the kernel that multiplies."""
    constants = {"SLICES": slices, "CHOSEN": 1 if weighted else 8, "WEIGHTED": weighted, "WHOLE": True}
    constants |= {"BLOCK_T": tile.rows, "BLOCK_N": tile.outputs, "BLOCK_K": tile.inputs, "ASM": True, "PDL": True}
    options: dict[str, Any] = {"num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": tile.registers}
    return compiled(grouped_nvfp4._multiply_kernel, constants, **options)


def counts(kernel: Any, tile: Tile) -> dict[str, Any]:
    """Count, for the compiled kernel that multiplies by NVFP4 weights, the registers of a thread, the bytes of its
    stack and of a thread block's shared memory, the accesses to the stack in its main loop, and the loop's instructions
    and integer operations per weight."""
    folder = Path(triton.__path__[0], "backends", "nvidia", "bin")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        usage, code = (
            subprocess.run([folder / tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    loop = main_loop(code)
    weights = tile.outputs * tile.inputs / (32 * tile.warps)
    found = dict(re.findall(r"(REG|STACK):(\d+)", usage))
    alu = sum(name.split(".")[0] in ALU for name in loop)
    sizes = {"registers": int(found["REG"]), "stack_bytes": int(found["STACK"]), "shared_bytes": kernel.metadata.shared}
    spills = sum(name.startswith(("LDL", "STL")) for name in loop)
    return {**sizes, "spills": spills, "issued": len(loop) / weights, "alu": alu / weights}


def main_loop(code: str) -> list[str]:
    """Return the instructions of the smallest loop that has HGMMA instructions, by name, from disassembled code."""
    names, labels, loops = [], {}, []
    for line in code.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(names)
        if instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ +)?([A-Z][\w.]*)(.*);", line):
            names.append(instruction[1])
            target = re.search(r"\((\.L_\w+)\)", instruction[2])
            if instruction[1] == "BRA" and target and target[1] in labels:
                loops.append(names[labels[target[1]] :])
    return min((loop for loop in loops if any(name.startswith("HGMMA") for name in loop)), key=len)


def main(argv: list[str] | None = None) -> None:
    """Print the results."""
    args = parser_with(__doc__, tokens=[1, 128, 256, 512]).parse_args(argv)
    for ids in ("i32", "i64"):
        compiled(grouped_nvfp4._find_kernel, {"PER_ROW": True, "BLOCK": 1024, "PDL": True}, ids=ids, num_warps=8)
    for tokens in args.tokens:
        tile = grouped_nvfp4.choose_tile(8 * tokens, 128)
        for part, slices in (("gate and up", 2), ("down", 1)):
            found = counts(compiled_product(tile, slices, weighted=part == "down"), tile)
            emit("grouped-nvfp4/compiled", {"part": part, "tokens": tokens, **tile._asdict()}, "bfloat16", **found)


if __name__ == "__main__":
    main()
