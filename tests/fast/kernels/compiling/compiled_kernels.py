"""Kernels compiled for Hopper without a GPU, and what their machine code says."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from reference import SCHEMES
from reference.formats.storage import storage_dtype

POINTERS = {
    "bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "uint8": "*u8", "int8": "*i8", "uint16": "*u16"
}  # fmt: skip
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)")
# Issue slots of a warp's instruction where it is not one: these units take 16 lanes a clock, not 32.
HALF_RATE = ("FMNMX", "FSEL", "FSETP", "ISETP", "IADD3", "IMNMX", "VIMNMX", "LEA", "LOP3", "PRMT", "SEL", "SHF", "HMNMX2",
             "IMAD", "F2FP", "VIADD", "PLOP3", "VIMNMX3")  # fmt: skip
SLOTS = {"SHFL": 4, "MUFU": 1} | dict.fromkeys(HALF_RATE, 2)


@dataclass(frozen=True)
class Machine:
    """What a compiled kernel does: instructions by name, registers, bytes of local memory, and its PTX."""

    instructions: Counter[str]
    registers: int
    local: int
    ptx: str
    sass: str

    def slots(self) -> int:
        """Issue slots of one pass through the whole code."""
        return sum(count * SLOTS.get(name.split(".")[0], 1) for name, count in self.instructions.items())

    def widths(self, name: str) -> set[str]:
        """Widths of the loads or stores (LDG, STG) that the code has."""
        found = [instruction for instruction in self.instructions if instruction.startswith(name)]
        return {(re.findall(r"\.(128|64|U8|U16)\b", text) or ["32"])[0] for text in found}


def compiled(kernel: Any, arguments: dict[str, Any], warps: int) -> Machine:
    """A Triton kernel for sm_90. arguments: a dtype's name for an aligned pointer, a number, None or a constant."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from fast.launch.launcher import UNFUSED

    signature, constants, attributes = {}, {}, {}
    annotated = {p.name for p in kernel.params if p.is_constexpr}
    for index, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if name not in annotated and isinstance(value, str):
            signature[name] = POINTERS[value]
        elif name not in annotated and isinstance(value, float):
            signature[name] = "fp32"
        elif name not in annotated and isinstance(value, int) and value != 1:
            signature[name] = "i32"
        else:
            signature[name], constants[(index,)] = "constexpr", value
        if signature[name].startswith("*") or (signature[name] == "i32" and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    made = compile(
        ASTSource(kernel, signature, constants, attributes), target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps, **UNFUSED},
    )  # fmt: skip
    sass, usage = (_dumped(made.asm["cubin"], flag) for flag in ("--dump-sass", "--dump-resource-usage"))
    numbers = {key: int(value) for key, value in re.findall(r"(REG|LOCAL|STACK):(\d+)", usage)}
    local = numbers["LOCAL"] + numbers["STACK"]
    return Machine(Counter(INSTRUCTION.findall(sass)), numbers["REG"], local, made.asm["ptx"], sass)


def output_arguments(name: str | None, dtype: str) -> dict[str, Any]:
    """What a kernel that makes a tensor takes for its outputs: a scheme's codes and scales, or the tensor itself."""
    from fast.kernels.scheme.constants import block_op, constants_of

    common = {"DTYPE": dtype, "HAS_PTX": True}
    if name is None:
        return {"y": dtype, "codes": None, "scale": None, "zero": None, "SCHEME": None, "OP": None, **common}
    scheme = SCHEMES[name]
    zero = None if scheme.zero is None else storage_dtype(scheme.zero.storage)
    scale, do = storage_dtype(scheme.scale.storage), block_op(codes=True, scales=True)
    return {
        "y": None,
        "codes": "uint8",
        "scale": scale,
        "zero": zero,
        "SCHEME": constants_of(scheme, dtype),
        "OP": do,
        **common,
    }


def _dumped(cubin: bytes, flag: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(tool), flag, file.name], capture_output=True, text=True, check=True).stdout
