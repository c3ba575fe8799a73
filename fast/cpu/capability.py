"""What this CPU multiplies quickly, as torch will use it: one probe for everything that has to choose.

`ATEN_CPU_CAPABILITY` and `ONEDNN_MAX_CPU_ISA`, by which users take instructions away from torch, count: the answer is what
torch and oneDNN were left, not what the processor has.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import lru_cache

import torch

#: oneDNN's names of instruction sets on x86 that have no VNNI.
WITHOUT_VNNI = ("SSE41", "AVX", "AVX2", "AVX512_CORE")


@dataclass(frozen=True, kw_only=True)
class CpuCapability:
    """instructions: the widest vectors that torch uses, in its own words ("AVX2", "AVX512", "DEFAULT", ...).

    bfloat16, float16: whether oneDNN multiplies matrices of that dtype; where it does not, torch's own loops do, of large
    matrices many times slower than float32. int8: whether dot products of bytes have an instruction (VNNI); where oneDNN
    does without it, it adds pairs of products in 16 bits, which saturate. amx: whether there are matrix tiles.
    """

    instructions: str
    bfloat16: bool
    float16: bool
    int8: bool
    amx: bool

    def __str__(self) -> str:
        flags = {"bfloat16": self.bfloat16, "float16": self.float16, "int8": self.int8}
        have = [name for name, there in flags.items() if there]
        lack = [name for name, there in flags.items() if not there]
        parts = [f"{self.instructions}, {'with' if self.amx else 'no'} AMX"]
        parts += [f"instructions for matmuls in {', '.join(have)}"] if have else []
        parts += [f"not for {', '.join(lack)}"] if lack else []
        return "; ".join(parts)


@lru_cache(maxsize=1)
def cpu_capability() -> CpuCapability:
    """The capability of this process; torch reads the environment once, when it starts, and so does this."""
    instructions = torch.backends.cpu.get_cpu_capability()
    wide = "512" in instructions or platform.machine() not in ("x86_64", "AMD64")
    return CpuCapability(
        instructions=instructions,
        bfloat16=_has("_is_mkldnn_bf16_supported"),
        float16=_has("_is_mkldnn_fp16_supported"),
        int8=wide and _reports("_is_vnni_supported") and not _without_vnni(),
        amx=wide and _has("_is_mkldnn_bf16_supported") and _reports("_is_amx_tile_supported"),
    )


def _has(question: str) -> bool:
    """What oneDNN says; False in builds of torch without it."""
    return torch.backends.mkldnn.is_available() and bool(getattr(torch.ops.mkldnn, question)())


def _without_vnni() -> bool:
    """Whether oneDNN was told to do without VNNI; torch reports what the processor has."""
    wanted = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
    return wanted.upper() in WITHOUT_VNNI


def _reports(question: str) -> bool:
    """What torch says of the processor; False where this version of torch does not ask."""
    return bool(getattr(torch.cpu, question, lambda: False)())


__all__ = ["CpuCapability", "cpu_capability"]
