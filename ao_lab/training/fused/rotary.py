"""Attention whose rotary embedding is one kernel each way: its class's own forward, with one name bound to another function.

Attention of transformers calls a function of its module, `apply_rotary_pos_emb(q, k, cos, sin)`; `apply_rotary(x, cos, sin)` is
that of `experiments.models.llama`. The forward of a fused class is the same code with globals in which that name is ours; the
module's own globals are not touched. What other names meant when the model was fused they mean from then on. Functions around
the forward (a decorator that renames arguments) are copied, with the forward's copy in its place. Models differ in which
elements are pairs, so the module's function is tried on an example, and ours has to give the same bits.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from fast.layers.rotary import rotary

#: Names of functions that turn queries and keys, and whether they take both.
NAMES = {"apply_rotary_pos_emb": True, "apply_rotary": False}


def rotary_name(kind: type[nn.Module]) -> str | None:
    """The name of the function that a class's forward turns heads by, also where functions are around it; None for no such."""
    forward = kind.forward
    if not isinstance(forward, FunctionType):
        return None
    inside = (_wrapped(forward) or [inspect.unwrap(forward)])[-1]
    return _turns(inside) if isinstance(inside, FunctionType) else None


def _turns(function: FunctionType) -> str | None:
    """The name by which a function's own code turns heads."""
    named = _names(function.__code__)
    return next((name for name in NAMES if name in named), None)


def _wrapped(function: FunctionType, depth: int = 4) -> list[FunctionType]:
    """A function that turns heads, behind those that hold it in their closures, outermost first; empty where there is none."""
    if _turns(function):
        return [function]
    cells = function.__closure__ or () if depth else ()
    found = (_wrapped(held, depth - 1) for held in map(_content, cells) if isinstance(held, FunctionType))
    return next(([function, *inside] for inside in found if inside), [])


def _content(cell: CellType) -> Any:
    """What a cell holds; None of one that is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _names(code: CodeType) -> set[str]:
    """Names in a function's code, and in that of generators within it."""
    return {*code.co_names}.union(*(_names(part) for part in code.co_consts if isinstance(part, CodeType)))


def rotary_reason(module: nn.Module) -> str | None:
    """Why a module's rotary embedding cannot be the kernel; None where it can."""
    kind = type(module)
    if "forward" in vars(module):
        return "its forward was replaced on the module itself"
    functions = _wrapped(kind.forward)  # type: ignore[arg-type]
    if not functions:
        return f"the forward of {kind.__name__} is wrapped by something that cannot be copied"
    name = rotary_name(kind) or ""
    own = functions[-1].__globals__.get(name)
    if own is None:
        return f"{name} is no function of its module"
    width = 8
    q, k = _example(2, 3, 5, width), _example(2, 1, 5, width)
    angle = (
        torch.arange(5, dtype=torch.float32, device="cpu")
        .outer(_example(width // 2).float() + 1)
        .repeat(1, 2)
    )
    cosine, sine = angle.cos().bfloat16()[None], angle.sin().bfloat16()[None]
    inputs = (q, k) if NAMES[name] else (q,)
    try:
        with torch.no_grad():
            made = own(*inputs, cosine, sine) if NAMES[name] else (own(*inputs, cosine[0], sine[0]),)
            same = all(torch.equal(a, rotary(x, cosine, sine)) for a, x in zip(made, inputs, strict=True))
    except Exception as error:  # noqa: BLE001  whatever another project's function raises, it stays
        return f"{name} raised on an example: {type(error).__name__}: {error}"
    return None if same else f"{name} of {kind.__name__} turns other pairs, or rounds otherwise"


def fused_forward(kind: type[nn.Module]) -> FunctionType:
    """The forward of a class with its rotary function exchanged."""
    *around, forward = _wrapped(kind.forward)  # type: ignore[arg-type]
    name = _turns(forward) or ""
    made = _both(forward.__globals__[name]) if NAMES[name] else _one(forward.__globals__[name])
    # Without the module's name, by which torch.compile would look the function up in the module.
    names = {key: value for key, value in forward.__globals__.items() if key != "__name__"} | {name: made}
    result = _copied(forward, names, forward.__closure__)
    for outer, inner in reversed(list(itertools.pairwise([*around, forward]))):
        cells = tuple(
            CellType(result) if _content(cell) is inner else cell for cell in outer.__closure__ or ()
        )
        result = _copied(outer, outer.__globals__, cells, result)
    result.__module__ = kind.__module__
    return result


def _copied(
    function: FunctionType, names: dict[str, Any], cells: Any, inside: FunctionType | None = None
) -> FunctionType:
    """A function with other globals and cells; `inside`: what it wraps, if it says so."""
    copied = FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    copied.__dict__.update(function.__dict__)
    if inside is not None and hasattr(function, "__wrapped__"):
        copied.__dict__["__wrapped__"] = inside
    copied.__kwdefaults__, copied.__doc__ = function.__kwdefaults__, function.__doc__
    copied.__annotations__, copied.__qualname__ = function.__annotations__, function.__qualname__
    return copied


def _both(own: Callable[..., Any]) -> Callable[..., Any]:
    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any) -> Any:
        """Queries and keys turned; by the module's own function where it is asked for more, or tensors are of another kind."""
        if more or named or not (_fits(q, cos, sin) and _fits(k, cos, sin)):
            return own(q, k, cos, sin, *more, **named)
        return rotary(q, cos, sin), rotary(k, cos, sin)

    return apply_rotary_pos_emb


def _one(own: Callable[..., Any]) -> Callable[..., Any]:
    def apply_rotary(x: Tensor, cosine: Tensor, sine: Tensor) -> Any:
        """Heads turned; by the module's own function where tensors are of another kind."""
        return rotary(x, cosine, sine) if _fits(x, cosine, sine) else own(x, cosine, sine)

    return apply_rotary


def _fits(x: Tensor, cosine: Tensor, sine: Tensor) -> bool:
    """Whether the kernel takes these: one dtype, constant tables of all positions and of the whole head, nothing sharded.

    A compiler fuses the module's own operations with what is before and after them, which gains more (two layers of Llama-3-8B
    on an H200: 59.8 ms a step, with the kernel in between 62.1).
    """
    if torch.compiler.is_compiling():
        return False
    batch, width = x.shape[0], x.shape[-1]
    tables = all(
        t.dtype == x.dtype and not t.requires_grad and t.shape[-1] == width and t.shape[-2] == x.shape[-2]
        and (t.dim() == 2 or (t.dim() == 3 and t.shape[0] in (1, batch)))
        for t in (cosine, sine)
    )  # fmt: skip
    return tables and x.dim() == 4 and width % 2 == 0 and not hasattr(x, "device_mesh")


def _example(*shape: int) -> Tensor:
    count = torch.Size(shape).numel()
    return (
        torch.sin(torch.arange(1, count + 1, dtype=torch.float64, device="cpu") * 1.7)
        .reshape(shape)
        .bfloat16()
    )
