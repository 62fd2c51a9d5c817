"""Compile every Triton kernel ahead of time, without a GPU, and report what each takes of the machine.

    python scripts/compile_kernels.py [OPERATION ...] [sm=80,90] [dtype=bf16,fp32] [head=128] [json=PATH]

Needs Triton (`pip install triton` of the release that torch wants) and compiles what the host code would
launch at the geometry of Llama-3.1-8B (32 query heads, 8 KV heads; `head` is their size), as in decoding
unless the case says otherwise. Operations are folders of `kernels/kvexp_kernels`; default: all. A Markdown
table is printed with, for each kernel: registers of a thread, bytes of shared memory of a block, bytes of
stack (for spilled registers), tensor-core instructions, and seconds to compile. The exit code is 1 where a
kernel spills, needs more shared memory than there is, or multiplies tiles without tensor cores.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from kernel_cases import Case, cases

from kvexp.errors import UserError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LARGEST_BLOCK = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}  # bytes of shared memory, by sm
TENSOR_CORES = re.compile(r"\b(?:HMMA|HGMMA|IMMA|QGMMA)\b")


@dataclass(frozen=True)
class Compiled:
    """What one kernel takes on one architecture."""

    operation: str
    case: str
    kernel: str
    dtype: str
    sm: int
    registers: int
    shared: int
    stack: int
    tensor_core_instructions: int
    multiplies_tiles: bool
    seconds: float

    @property
    def good(self) -> bool:
        """Whether it fits, nothing spills, and tiles are multiplied on tensor cores."""
        fits = self.shared <= LARGEST_BLOCK.get(self.sm, LARGEST_BLOCK[90]) and self.stack == 0
        return fits and (self.tensor_core_instructions > 0 or not self.multiplies_tiles)


class Target:
    """Stands where Triton expects a driver: names an architecture, and has no device."""

    def __init__(self, sm: int) -> None:
        self.sm = sm

    def get_current_target(self) -> Any:
        """The architecture that is compiled for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.sm, 32)

    def get_current_device(self) -> int:
        """Triton keeps what it compiled by device: here the architecture."""
        return self.sm

    def get_current_stream(self, device: int) -> int:
        """No stream."""
        return 0


@contextmanager
def compiling(sm: int) -> Iterator[list[tuple[str, Any, float]]]:
    """Compile for an architecture instead of launching; yields (kernel, compiled, seconds) as they come."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    found: list[tuple[str, Any, float]] = []
    launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        start = time.perf_counter()
        compiled = launch(self, *args, grid=grid, warmup=True, **options)
        found.append((self.fn.__name__, compiled, time.perf_counter() - start))
        return compiled

    driver.set_active(Target(sm))
    JITFunction.run = run
    try:
        yield found
    finally:
        JITFunction.run = launch


def measured(compiled: Any) -> dict[str, Any]:
    """Read registers, shared memory, stack and tensor-core instructions out of a binary."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run(
                [tools / name, *flags, file.name], check=True, capture_output=True, text=True
            ).stdout
            for name, flags in (("cuobjdump", ["--dump-resource-usage"]), ("nvdisasm", []))
        )
    used = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return {
        "registers": used["REG"],
        "stack": used["STACK"] + used["LOCAL"],
        "shared": compiled.metadata.shared,
        "tensor_core_instructions": len(TENSOR_CORES.findall(code)),
        "multiplies_tiles": "tt.dot" in compiled.asm["ttir"],
    }


def report(
    every: dict[str, dict[str, Case]], operations: Sequence[str], sms: Sequence[int], dtypes: Sequence[str]
) -> Iterator[Compiled]:
    """Compile the cases of operations; a kernel that several cases share comes once."""
    seen = set()
    for operation in operations:
        for (case, call), name, sm in (
            (c, n, s) for c in every[operation].items() for n in dtypes for s in sms
        ):
            with compiling(sm) as found:
                call(DTYPES[name])
            for kernel, compiled, seconds in found:
                if (sm, compiled.hash) not in seen:
                    seen.add((sm, compiled.hash))
                    yield Compiled(
                        operation, case, kernel, name, sm, seconds=round(seconds, 2), **measured(compiled)
                    )


def _cases(head: int) -> dict[str, dict[str, Case]]:
    try:
        return cases(head)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise UserError("Triton is not installed: use `pip install -c constraints.txt triton`") from None


def main(arguments: Sequence[str]) -> int:
    """Print a table; 1 where a kernel is not as it should be."""
    os.environ.pop("TRITON_INTERPRET", None)  # else kernels would be interpreted, and none compiled
    given = dict(word.split("=", 1) for word in arguments if "=" in word)
    every = _cases(int(given.get("head", "128")))
    operations = [word for word in arguments if "=" not in word] or list(every)
    dtypes = given.get("dtype", "bf16,fp32").split(",")
    for words, choices in ((operations, every), (dtypes, DTYPES)):
        if unknown := sorted(set(words) - set(choices)):
            raise UserError(f"{', '.join(unknown)} is not known here: use {', '.join(choices)}")
    sms = [int(sm) for sm in given.get("sm", "80,90").split(",")]
    rows = []
    print("| operation | case | kernel | dtype | sm | registers | shared B | stack B | mma | compile s |")
    print("|---|---|---|---|--:|--:|--:|--:|--:|--:|")
    for row in report(every, operations, sms, dtypes):
        rows.append(row)
        mma = row.tensor_core_instructions if row.multiplies_tiles else "–"
        print(
            f"| {row.operation} | {row.case} | `{row.kernel}` | {row.dtype} | {row.sm} | {row.registers} "
            f"| {row.shared} | {row.stack} | {mma} | {row.seconds:.1f} |{'' if row.good else ' ✗'}",
            flush=True,
        )
    if "json" in given:
        Path(given["json"]).write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"compile_kernels: {error}")
