"""Programs that `torch._inductor.aoti_compile_and_package` compiled ahead of time, with operators of ours in them."""

from __future__ import annotations

import importlib

from fast import ops

#: Modules of ao_lab that register operators, or say where they are (`fast.ops.LATE`).
MODULES = (
    "ao_lab.compile.joined_linears",
    "ao_lab.gemm.select",
    "ao_lab.qat.layers",
    "ao_lab.qat.linear",
    "ao_lab.qat.lora",
    "ao_lab.sparsity.training.layers",
    "ao_lab.sparsity.training.products",
    "ao_lab.training.grouped.autograd",
    "ao_lab.training.grouped.products",
)


def register_operators() -> None:
    """Register all operators `ao_lab::...` with torch, for programs that C++ loads.

    Operators are registered when they are first used (`torch.ops.ao_lab.NAME`, a matmul, `torch.export.load`), so that an
    import takes little time. C++ asks torch's own table alone: call this once, before `torch._inductor.aoti_load_package` of a
    package that holds quantized layers in a process that has not run such layers. It imports the modules of all operators;
    calling it again does nothing. Nothing is compiled, and no GPU is needed.
    """
    for name in MODULES:
        importlib.import_module(name)
    ops.register_operators()


__all__ = ["register_operators"]
