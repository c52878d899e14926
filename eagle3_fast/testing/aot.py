"""What a Triton kernel becomes on a card that is not here: ahead-of-time compilation for sm_90 and sm_120, and the figures that decide.

Registers, shared memory and the machine code of a kernel depend on its signature and the target alone, so they can be checked on
any Linux machine with triton. Usage, for a kernel `fn(x, out, size, stride_x, BLOCK: tl.constexpr)`:

    figures = compile_kernel(fn, {"x": "*bf16", "out": "*fp32", "size": "i32", "stride_x": "i64"}, {"BLOCK": 1024}, arch=120, num_warps=8)
    assert_fits(figures, "fn at BLOCK 1024")
    assert figures.wide_load_share >= 0.9 and figures.ctas_per_sm >= 2

Every argument is either in `types` (Triton's names: "*bf16", "*fp32", "i32", "i64", "fp32", ...) or in `constants` (constexpr, and
arguments passed as None). Needs triton without TRITON_INTERPRET: an interpreted kernel has no machine code. Importing this module
needs no triton.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

SHARED_LIMIT = {90: 232_448, 120: 101_376}
"""Bytes of shared memory that one block may ask for, by architecture (CUDA C programming guide, table of compute capabilities)."""
SHARED_PER_SM = {90: 233_472, 120: 102_400}
SHARED_RESERVED = 1024  # bytes that the system takes of every block
THREADS_PER_SM = {90: 2048, 120: 1536}
REGISTERS_PER_SM = 65_536
WARP = 32
MATRIX_OPCODES = ("HMMA", "HGMMA", "IMMA", "QMMA")

Instruction: TypeAlias = tuple[int, str, "int | None"]
"""Address, opcode and, of a branch, the address it goes to."""


@dataclass(frozen=True)
class Compiled:
    """Figures of one kernel compiled for one architecture.

    "In loops" is judged by the machine code: between a branch backwards and its target. Loops that matter are those with matrix
    instructions or, in a kernel that has none, all of them; a spill outside them is paid once and harmless.
    """

    arch: int
    registers: int  # of a thread
    shared: int  # bytes of a block
    stack: int  # bytes of a thread
    local_in_loops: int  # local-memory accesses (spills, indexed arrays) in loops that matter
    mma: int  # mma.sync instructions in the PTX
    wgmma: int  # wgmma.mma_async instructions in the PTX
    wide_load_share: float  # of the global loads in the innermost of these loops, those of 128 bits; 1 where there are none
    bulk_loads: int  # TMA loads, which are in no other count
    ctas_per_sm: int  # resident blocks


def compile_kernel(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    arch: int,
    num_warps: int,
    num_stages: int = 1,
    divisible: Collection[str] | None = None,
) -> Compiled:
    """Compile a `triton.jit` function for `arch` (90 or 120) and read its figures.

    divisible: arguments that are multiples of 16, as the launcher would find; without them nothing is loaded 128 bits at a time.
    By default every pointer, and every integer with "stride" in its name. Floating-point contraction is on, as at launch.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if divisible is None:
        divisible = [name for name, kind in types.items() if kind.startswith("*") or "stride" in name]
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else types[name] for name in names},
        constexprs=dict(constants),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in divisible},
    )
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    built = triton.compile(source, target=GPUTarget("cuda", arch, WARP), options=options)
    return _figures(built, arch, num_warps)


def assert_fits(figures: Compiled, what: str) -> None:
    """Within the architecture's shared memory, and nothing in local memory where it would be paid again and again."""
    limit = SHARED_LIMIT[figures.arch]
    assert figures.shared <= limit, f"{what} on sm_{figures.arch}: {figures.shared} bytes of shared memory, limit {limit}"
    assert figures.local_in_loops == 0, (
        f"{what} on sm_{figures.arch}: {figures.local_in_loops} local-memory accesses in loops: {figures}"
    )
    assert figures.ctas_per_sm >= 1, f"{what} on sm_{figures.arch}: no block fits a multiprocessor: {figures}"


def _figures(built: Any, arch: int, num_warps: int) -> Compiled:
    usage, code = _disassemble(built.asm["cubin"])
    resources = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert resources, f"cuobjdump names no registers:\n{usage}"
    registers, stack = (int(value) for value in resources.groups())
    instructions, shared = list(_instructions(code)), int(built.metadata.shared)
    loops = _loops(instructions)
    innermost = [
        (first, last) for first, last in loops if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in loops)
    ]
    loads = [opcode for opcode in _inside(innermost, instructions) if opcode.startswith(("LDG.", "LDGSTS."))]
    wide = [opcode for opcode in loads if "128" in opcode.split(".")]
    threads = num_warps * WARP
    return Compiled(
        arch=arch,
        registers=registers,
        shared=shared,
        stack=stack,
        local_in_loops=sum(opcode.startswith(("LDL", "STL")) for opcode in _inside(loops, instructions)),
        mma=built.asm["ptx"].count("mma.sync"),
        wgmma=built.asm["ptx"].count("wgmma.mma_async"),
        wide_load_share=len(wide) / len(loads) if loads else 1.0,
        bulk_loads=sum(opcode.startswith("UTMALDG") for _, opcode, _ in instructions),
        ctas_per_sm=min(
            REGISTERS_PER_SM // (-(-registers // 8) * 8 * threads),  # registers are given out in eights
            SHARED_PER_SM[arch] // (shared + SHARED_RESERVED),
            THREADS_PER_SM[arch] // threads,
        ),
    )


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """Resource usage and machine code, by the `cuobjdump` that triton carries."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage, code = (
            subprocess.run([knobs.nvidia.cuobjdump.path, flag, str(path)], capture_output=True, text=True, check=True).stdout
            for flag in ("--dump-resource-usage", "-sass")
        )
    return usage, code


def _instructions(code: str) -> Iterator[Instruction]:
    """Every instruction of a `cuobjdump -sass` listing."""
    for address, text in re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", code, re.MULTILINE):
        opcode, _, operands = re.sub(r"^@!?\w+\s+", "", text).partition(" ")
        target = re.search(r"0x([0-9a-f]+)\s*$", operands) if opcode.split(".")[0] == "BRA" else None
        yield int(address, 16), opcode, int(target[1], 16) if target else None


def _loops(instructions: list[Instruction]) -> list[tuple[int, int]]:
    """First and last address of each loop that matters (see `Compiled`): from the target of a branch backwards up to the branch."""
    loops = [(target, address) for address, _, target in instructions if target is not None and target < address]
    matrix = [address for address, opcode, _ in instructions if opcode.startswith(MATRIX_OPCODES)]
    return [(first, last) for first, last in loops if not matrix or any(first <= address <= last for address in matrix)]


def _inside(loops: list[tuple[int, int]], instructions: list[Instruction]) -> list[str]:
    """Opcodes that lie in at least one of the loops, each instruction once."""
    return [opcode for address, opcode, _ in instructions if any(first <= address <= last for first, last in loops)]
