"""Changes of torch that quantized weights need, and its functions that are answered for them in another way.

Changes are made once, as soon as the module is there that they change (`make_changes`); nothing is imported for them, so that
`import ao_lab` stays quick, and who has neither DTensors nor compiled programs pays nothing.

* A DTensor answers torch.compile's cache of programs with its own shape, dtype and placements alone (torch 2.13; pytorch issue
  188390 is the same for devices). Two models of equal shapes in two schemes would share a program: so its hash gets that of a
  QuantizedTensor inside it.
* A compiled program has plain tensors as inputs, and torch takes every subclass apart before each call. torch 2.13 writes code
  for that. Before, a function walks over the inputs and asks each subclass for sizes and strides through `__torch_function__`,
  whether or not the program has sizes that are left open (times: reports/LOG.md). In its place weights whose sizes are known
  give their parts by name; all else goes torch's way.
* Programs of TorchScript run where they were made. What writes them, and `torch.onnx.export(dynamo=False)`, copies tensors from
  memory behind them: torch 2.13 copies from address 0, and the process ends by a segmentation fault. These calls are refused.
* What is asked of a weight's memory, which it has none of itself: an address is that of the codes (torch's 0, the same for all
  weights, makes libraries take two weights for one), and who asks for a storage or an array learns what to call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any, NoReturn

import torch

from ao_lab.tensor import weight_guards

Tensor = torch.Tensor
Unwrap = Callable[..., list[Any]]
DTENSOR, HASH = "torch.distributed.tensor", "_stable_hash_for_caching"
AUTOGRAD = "torch._functorch._aot_autograd"
#: The module whose function of this name takes inputs apart, and the one of versions that write code for it.
WRAPPERS, UNWRAP = f"{AUTOGRAD}.runtime_wrappers", "runtime_unwrap_tensor_subclasses"
WRITES_CODE = f"{AUTOGRAD}.subclass_codegen"
PLAIN = (Tensor, torch.nn.Parameter, int)
#: Classes of TorchScript modules (the one of traced modules has copies of the other's methods), and methods that write one.
SCRIPTS = ("RecursiveScriptModule", "ScriptModule", "TopLevelTracedModule")
WRITES = ("save", "save_to_buffer", "_save_for_lite_interpreter", "_save_to_buffer_for_lite_interpreter")


def make_changes(kind: type) -> None:
    """Make those of PENDING whose modules have been imported, for the class of quantized weights."""
    for name in [name for name in PENDING if name in sys.modules]:
        PENDING.pop(name)(kind)


def hash_local_tensors(kind: type) -> None:
    """Let DTensors of quantized weights (`kind`) answer with their weights' hash too; once, however often it is called."""
    from torch.distributed.tensor import DTensor

    plain = getattr(DTensor, HASH, None)
    if plain is None or hasattr(plain, "of_the_wrapper"):  # torch 2.11 hashes by __reduce_ex__, which has all
        return

    def whole(tensor: Any) -> str:
        local, text = tensor._local_tensor, str(plain(tensor))
        return text + getattr(local, HASH)() if isinstance(local, kind) else text

    whole.of_the_wrapper = plain  # type: ignore[attr-defined]
    setattr(DTensor, HASH, whole)


def unwrap_by_names(kind: type) -> None:
    """Let torch take tensors of `kind` and its subclasses apart by the names that they give; after `WRAPPERS` is imported."""
    wrappers: Any = sys.modules[WRAPPERS]
    if hasattr(wrappers, UNWRAP) and find_spec(WRITES_CODE) is None:
        setattr(wrappers, UNWRAP, unwrapping(getattr(wrappers, UNWRAP), kind))


def unwrapping(plain: Unwrap, kind: type) -> Unwrap:
    """torch's function `plain`, but for tensors of `kind` whose sizes a program knows and whose parts are plain tensors."""

    def unwrap(
        wrapped_args: list[Any], *, append_symints: bool, subclass_metas: Sequence[Any] | None = None
    ) -> list[Any]:
        options = {"append_symints": append_symints}
        if subclass_metas is None:
            return plain(wrapped_args, **options, subclass_metas=None)
        result: list[Any] = []
        for at, arg in enumerate(wrapped_args):
            if type(arg) in PLAIN:
                result.append(arg)
                continue
            meta = subclass_metas[at]
            parts = known_parts(arg, meta) if isinstance(arg, kind) else None
            result += plain([arg], **options, subclass_metas=[meta]) if parts is None else parts
        return result

    return unwrap


def known_parts(tensor: Any, meta: Any) -> list[torch.Tensor] | None:
    """The tensors inside, in the order of their names; None where torch has to look: at open sizes (None in `meta`), and at
    parts that have parts themselves."""
    if None in meta.outer_size or None in meta.outer_stride:
        return None
    held = tensor.__dict__
    names, _ = held.get("_flattened") or tensor.__tensor_flatten__()
    parts = [held[name] for name in names]
    for part in parts:  # a loop: faster than all(...) of two or three
        if type(part) is not Tensor:
            return None
    return parts


def refuse_files(kind: type) -> None:
    """Let TorchScript modules with weights of `kind` (and its subclasses) be written by no method."""
    found: Any = (getattr(torch.jit, name, None) for name in SCRIPTS)
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
            "torch.onnx.export(dynamo=False) reads weights as contiguous memory, and a QuantizedTensor "
            f"({tensor.scheme.name}) has none: give the layer nn.Parameter(weight.dequantize()) first"
        )


def address(weight: Any) -> int:
    """Where the codes lie: two weights of one address are one weight, 0 for one on the meta device."""
    pointer: int = weight.codes.data_ptr()
    return pointer


def refuse_storage(weight: Any, *_: Any, **__: Any) -> NoReturn:
    """ValueError: libraries that write a tensor's storage cannot write one of several parts."""
    raise ValueError(
        f"{weight!r} is several tensors, without one storage that safetensors or accelerate could write. Save the model by "
        f"ao_lab.save_pretrained(model, folder), or model.save_pretrained(folder) of transformers; models in training and "
        f"state dicts by torch.save, or accelerate's save_state and save_model with safe_serialization=False"
    )


def refuse_array(weight: Any, *_: Any, **__: Any) -> NoReturn:
    """TypeError: an array of the codes would not be the values."""
    raise TypeError(
        f"{weight!r} is no NumPy array, and is not offloaded to disk as one: dequantize() gives its values, "
        f"accelerate.cpu_offload keeps quantized weights in host memory"
    )


def reshaped(weight: Any, *args: Any, **kwargs: Any) -> Any:
    """A view where the parts can be viewed so, as `view` has it, else a dense copy: `reshape` may copy."""
    try:
        return Tensor.reshape(weight, *args, **kwargs)
    except ValueError:
        return Tensor.reshape(weight.dequantize(), *args, **kwargs)


#: Functions of torch that are answered here, by the function, where a weight is the first argument.
ANSWERS: dict[Any, Callable[..., Any]] = {
    Tensor.data_ptr: address,
    # What cannot use `untyped_storage()`, which tracers look at, asks for this one next.
    Tensor.storage: refuse_storage,
    Tensor.reshape: reshaped,
    torch.reshape: reshaped,
    Tensor.numpy: refuse_array,
    Tensor.__array__: refuse_array,
}

#: By the module that it changes: what makes a change, given the class of quantized weights. Those that are still to be made.
PENDING: dict[str, Callable[[type], None]] = {
    DTENSOR: hash_local_tensors,
    WRAPPERS: unwrap_by_names,
    weight_guards.MODULE: weight_guards.guard_by_form,
}

__all__ = [
    "ANSWERS",
    "PENDING",
    "hash_local_tensors",
    "known_parts",
    "make_changes",
    "refuse_array",
    "refuse_files",
    "refuse_onnx",
    "tensors_of",
    "unwrapping",
]
