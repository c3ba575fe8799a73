"""TorchScript and quantized weights: programs run where they were made, and neither files nor ONNX are written of them.

`torch.jit.trace` and `torch.jit.script` record a layer as one operator of its weight, which computes it when the program runs.
What writes programs copies tensors from memory behind them. A quantized weight has none: torch 2.13 copies from address 0, and
the process ends by a segmentation fault, so these calls are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

#: Classes of TorchScript modules; the one of traced modules has copies of the other's methods.
CLASSES = ("RecursiveScriptModule", "ScriptModule", "TopLevelTracedModule")
#: Methods of TorchScript modules that write one.
WRITES = ("save", "save_to_buffer", "_save_for_lite_interpreter", "_save_to_buffer_for_lite_interpreter")


def refuse_files(kind: type) -> None:
    """Let TorchScript modules with weights of `kind` (and its subclasses) be written by no method."""
    found: Any = (getattr(torch.jit, name, None) for name in CLASSES)
    for modules in filter(None, found):
        for name in filter(vars(modules).__contains__, WRITES):
            if not hasattr(vars(modules)[name], "of_dense_weights"):
                setattr(modules, name, writing(vars(modules)[name], kind))


def writing(plain: Callable[..., Any], kind: type) -> Callable[..., Any]:
    """A method that writes a module, or ValueError where that holds a weight of `kind`."""

    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = next((name for name, tensor in tensors_of(self) if isinstance(tensor, kind)), None)
        if name is not None:
            raise ValueError(
                f"{name} is a QuantizedTensor, of which TorchScript's files hold nothing; nothing was written. Write "
                f"torch.export.save(torch.export.export(model, args), path), or the model by ao_lab.save_pretrained"
            )
        return plain(self, *args, **kwargs)

    write.of_dense_weights = plain  # type: ignore[attr-defined]
    return write


def tensors_of(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of a TorchScript module by name, and the constants that freezing makes of them."""
    yield from module.named_parameters()
    yield from module.named_buffers()
    graph = getattr(module, "inlined_graph", None)
    for node in () if graph is None else graph.findAllNodes("prim::Constant"):
        if node.hasAttribute("value") and node.kindOf("value") == "t":
            yield "a constant of the program", node.t("value")


def refuse_onnx(tensor: Any) -> None:
    """ValueError where `torch.onnx.export(dynamo=False)` traces a call with a quantized weight."""
    onnx: Any = sys.modules.get("torch.onnx")
    if onnx is not None and onnx.is_in_onnx_export():
        raise ValueError(
            f"torch.onnx.export(dynamo=False) reads weights as plain memory, and a QuantizedTensor ({tensor.scheme.name}) has "
            f"none: give the layer nn.Parameter(weight.dequantize()) first"
        )


__all__ = ["refuse_files", "refuse_onnx", "tensors_of"]
