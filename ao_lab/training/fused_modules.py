"""RMSNorm, SwiGLU and rotary embedding as one kernel each way: module, parameters, hooks and names stay, its class changes.

A fused class is made of the module's own, so `isinstance` holds, and a state_dict is what it was. The arithmetic is that of
`fast.rms_norm`, `fast.swiglu` and `fast.layers.attention`, with the gradients of `fast.layers`. A norm is rounded to
the dtype once, after the weight, as torch's own is; modules of transformers that round before it too differ in the last
place. Rotary embedding keeps torch's bits.

Whether a module computes RMSNorm, or down(silu(gate(x)) * up(x)), is seen by its parts, and by what its forward makes of an
example. A class's name says little: Gemma's RMSNorm multiplies by 1 + weight, and its feed-forward has another activation. The
class's own forward runs on a shallow copy of the module with small parameters on the CPU, without hooks; the module is not
touched.

Attention of transformers calls a function of its module, `apply_rotary_pos_emb(q, k, cos, sin)`; `apply_rotary(x, cos, sin)` is
that of `experiments.models.llama`. The forward of a fused class is the same code with globals in which that name is ours; the
module's own globals are not touched. What other names meant when the model was fused they mean from then on. Functions around
the forward (a decorator that renames arguments) are copied, with the forward's copy in its place. Models differ in which
elements are pairs, so the module's function is tried on an example, and ours has to give the same bits.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook as global_hooks

import fast
from ao_lab.training import dequantized
from ao_lab.training.autograd import (
    as_matrix,
    gradient_operands,
    is_transformed,
    tuned_recipe,
    weight_columns_of,
)
from ao_lab.training.casts import of_record, own_memory, quantize_one, weight_rows
from ao_lab.training.dequantized import gradient_values, operand_values, weight_columns_values
from ao_lab.training.layers import LowPrecisionLinear, autocast_dtype, mark_run
from ao_lab.training.products import product
from ao_lab.training.reuse import forget_copies
from ao_lab.transforms.layers import is_linear
from fast.dispatch import PLAIN
from fast.layers.attention import rotary
from fast.layers.column_sums import column_sums
from fast.layers.swiglu import swiglu_vjp
from fast.ops import once_differentiable
from reference.arrays.namespace import choice
from reference.training.recipe import Recipe


class Fused:
    """What a fused module has beside its own class."""

    #: The module's own class.
    plain: type[nn.Module]
    #: Names of the attributes that the fused forward reads.
    fused_names: tuple[str, ...]

    def extra_repr(self) -> str:
        """The module's own, and that it is fused."""
        own = super().extra_repr()  # type: ignore[misc]
        return ", ".join(part for part in (own, "fused") if part)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles name the module's own class: this one is made while a program runs."""
        kind = next(one for one in KINDS if isinstance(self, one))
        return _made, (kind, self.plain), self.__dict__


class FusedRMSNorm(Fused):
    """RMSNorm over the last axis. Inputs in another dtype than the weight, and weights that are sharded, take the module's own
    forward."""

    weight: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        """x (..., K) in its dtype."""
        weight = self.weight
        if x.dtype != weight.dtype or hasattr(weight, "device_mesh") or hasattr(x, "device_mesh"):
            own: Tensor = super().forward(x)  # type: ignore[misc]
            return own
        y, _ = fast.rms_norm(x, own_memory(weight), eps=getattr(self, self.fused_names[0]))
        return y


class FusedSwiGLU(Fused):
    """down(silu(gate(x)) * up(x)). Results of gate in float32 take torch's operations, as does what is sharded; a layer that
    trains by a recipe on a GPU is one step with silu (`swiglu_linear`)."""

    def forward(self, x: Tensor) -> Tensor:
        """x (..., K) to the same shape."""
        gate, up, down = (getattr(self, name) for name in self.fused_names)
        return swiglu_linear(gate(x), up(x), down)


class FusedAttention(Fused):
    """Attention; its forward is made by `fused_forward`."""


KINDS = (FusedRMSNorm, FusedSwiGLU, FusedAttention)
#: What can be fused, by the names that `convert_for_training_` takes.
FUSIONS: dict[str, type[Fused]] = dict(zip(("norm", "swiglu", "rotary"), KINDS, strict=True))
#: Those that were seen to be faster on a GPU.
MEASURED = ("norm", "swiglu", "rotary")
CLASSES: dict[tuple[type, type], type[Any]] = {}


def class_of(kind: type[Fused], plain: type[nn.Module]) -> type[Any]:
    """The class that a module of class `plain` gets, the same at every call."""
    if (kind, plain) not in CLASSES:
        fields: dict[str, Any] = {"plain": plain, "__module__": plain.__module__}
        if kind is FusedAttention:
            fields["forward"] = fused_forward(plain)
        CLASSES[kind, plain] = type(f"Fused{plain.__name__}", (kind, plain), fields)
    return CLASSES[kind, plain]


def _made(kind: type[Fused], plain: type[nn.Module]) -> Any:
    return object.__new__(class_of(kind, plain))


def fusions(fuse: bool | Iterable[str]) -> tuple[str, ...]:
    """The names in FUSIONS that `fuse` asks for: True for MEASURED. ValueError for another name."""
    if isinstance(fuse, bool):
        return MEASURED if fuse else ()
    chosen = (fuse,) if isinstance(fuse, str) else tuple(fuse)
    for name in chosen:
        choice(name, tuple(FUSIONS), "fuse")
    return chosen


def fuse_layers_(
    model: nn.Module, chosen: Iterable[str] = tuple(FUSIONS)
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Fuse layers of the `chosen` kinds in place, all of a model's: their names, and those left with the reason."""
    wanted = tuple(FUSIONS[name] for name in chosen)
    fused: list[str] = []
    left: dict[str, str] = {}
    swaps: dict[int, tuple[nn.Module, type[Fused]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        candidate = kind_of(module)
        if candidate is None or candidate[0] not in wanted:
            continue
        kind, reason = candidate
        if reason is None:
            fused.append(name)
            swaps[id(module)] = module, kind
        else:
            left[name] = reason
    for module, kind in swaps.values():
        names = triple_of(module) or (epsilon_of(module) or "",)
        module.__class__ = class_of(kind, type(module))
        module.fused_names = names  # type: ignore[assignment]
    return tuple(fused), left


def kind_of(module: nn.Module) -> tuple[type[Fused], str | None] | None:
    """The fused class for a module, and why it cannot have it; None for a module that is none of them."""
    kind: type[Fused]
    if is_norm_like(module):
        kind, reason = FusedRMSNorm, norm_reason
    elif triple_of(module) is not None:
        kind, reason = FusedSwiGLU, swiglu_reason
    elif rotary_name(type(module)) is not None:
        kind, reason = FusedAttention, rotary_reason
    else:
        return None
    return kind, "it is fused already" if isinstance(module, Fused) else reason(module)


def unfuse_layers_(model: nn.Module) -> tuple[str, ...]:
    """Undo `fuse_layers_`; the modules' names."""
    fused = {n: m for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, Fused)}
    for module in {id(module): module for module in fused.values()}.values():
        module.__class__ = module.plain  # type: ignore[assignment]
        del module.fused_names
    return tuple(fused)


#: Names of the three linear layers of a SwiGLU: gate, up and down.
TRIPLES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
#: Names of what is added to the mean square.
EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
#: Relative difference of float32 sums in another order, and of an exponential; another formula differs by far more.
CLOSE = 1e-4


def epsilon_of(module: nn.Module) -> str | None:
    """The attribute that holds a norm's epsilon; None where there is none."""
    return next((name for name in EPSILONS if isinstance(getattr(module, name, None), float)), None)


def triple_of(module: nn.Module) -> tuple[str, str, str] | None:
    """The names of gate, up and down; None where a module has no three such linear layers."""
    children = dict(module.named_children())
    return next(
        (names for names in TRIPLES if all(name in children and is_linear(children[name]) for name in names)),
        None,
    )


def is_norm_like(module: nn.Module) -> bool:
    """Whether a module has one vector called weight, and nothing else that it could multiply by."""
    parameters = dict(module.named_parameters(recurse=False))
    lone = set(parameters) == {"weight"} and not module._modules and not module._buffers
    return lone and parameters["weight"].dim() == 1 and any(hasattr(module, name) for name in EPSILONS)


def norm_reason(module: nn.Module) -> str | None:
    """Why the fused kernel cannot replace a norm; None where it can."""
    name = epsilon_of(module)
    if name is None:
        return "its epsilon is not a number; torch chooses one by the dtype"
    length = int(module.get_parameter("weight").shape[0])
    x, weight = _example(3, length).float(), 1 + _example(length).float() / 4
    clone = _clone(module)
    clone.__dict__["_parameters"] = {"weight": nn.Parameter(weight)}
    wide, epsilon = x.double(), getattr(module, name)
    wanted = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight.double()
    return _forward_reason(module, clone, x, wanted)


def swiglu_reason(module: nn.Module) -> str | None:
    """Why the fused kernel cannot replace a feed-forward's activation; None where it can."""
    names = triple_of(module)
    assert names is not None
    clone = _clone(module)
    weights = [_example(6, 4).float(), _example(6, 4).float() / 2, _example(4, 6).float()]
    clone.__dict__["_modules"] = {**module._modules, **dict(zip(names, map(_linear, weights), strict=True))}
    x = 3 * _example(5, 4).float()
    gate, up = (functional.linear(x.double(), w.double()) for w in weights[:2])
    wanted = functional.linear(functional.silu(gate) * up, weights[2].double())
    return _forward_reason(module, clone, x, wanted)


def _forward_reason(module: nn.Module, clone: nn.Module, x: Tensor, wanted: Tensor) -> str | None:
    kind = type(module)
    if "forward" in vars(module):
        return "its forward was replaced on the module itself"
    if len(inspect.signature(kind.forward).parameters) != 2:
        return f"the forward of {kind.__name__} takes more than one tensor"
    output = _outcome(kind.forward, clone, x)
    if isinstance(output, str):
        return f"the forward of {kind.__name__} raised on an example: {output}"
    same = output.shape == wanted.shape and torch.allclose(output.double(), wanted, rtol=CLOSE, atol=CLOSE)
    return None if same else f"the forward of {kind.__name__} computes otherwise"


def _outcome(forward: Callable[..., Tensor], clone: nn.Module, x: Tensor) -> Tensor | str:
    """What a forward makes of an example, or what it raised."""
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return forward(clone, x)
    except Exception as error:  # noqa: BLE001  whatever another project's module raises, it stays as it is
        return f"{type(error).__name__}: {error}"


def _clone(module: nn.Module) -> nn.Module:
    """A shallow copy."""
    clone: nn.Module = object.__new__(type(module))
    clone.__dict__.update(vars(module))
    return clone


def _linear(weight: Tensor) -> nn.Linear:
    outputs, inputs = weight.shape
    linear = nn.Linear(inputs, outputs, bias=False, device="meta")
    linear.weight = nn.Parameter(weight)
    return linear


def _example(*shape: int) -> Tensor:
    """Numbers between -1 and 1 in float64, the same every time, without the generators of torch."""
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(1, count + 1, dtype=torch.float64, device="cpu") * 1.7).reshape(shape)


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
    chains = (_wrapped(held, depth - 1) for held in map(_content, cells) if isinstance(held, FunctionType))
    return next(([function, *inside] for inside in chains if inside), [])


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
    q, k = _example(2, 3, 5, width).bfloat16(), _example(2, 1, 5, width).bfloat16()
    angle = (
        torch.arange(5, dtype=torch.float32, device="cpu")
        .outer(_example(width // 2).bfloat16().float() + 1)
        .repeat(1, 2)
    )
    cosine, sine = angle.cos().bfloat16()[None], angle.sin().bfloat16()[None]
    inputs = (q, k) if NAMES[name] else (q,)
    try:
        with torch.no_grad():
            outputs = own(*inputs, cosine, sine) if NAMES[name] else (own(*inputs, cosine[0], sine[0]),)
            same = all(torch.equal(a, rotary(x, cosine, sine)) for a, x in zip(outputs, inputs, strict=True))
    except Exception as error:  # noqa: BLE001  whatever another project's function raises, it stays
        return f"{name} raised on an example: {type(error).__name__}: {error}"
    return None if same else f"{name} of {kind.__name__} turns other pairs, or rounds otherwise"


def fused_forward(kind: type[nn.Module]) -> FunctionType:
    """The forward of a class with its rotary function exchanged."""
    *around, forward = _wrapped(kind.forward)  # type: ignore[arg-type]
    name = _turns(forward) or ""
    rotary_function = _both(forward.__globals__[name]) if NAMES[name] else _one(forward.__globals__[name])
    # Without the module's name, by which torch.compile would look the function up in the module.
    names = {key: value for key, value in forward.__globals__.items() if key != "__name__"} | {
        name: rotary_function
    }
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

    A compiler fuses the module's own operations with what is before and after them, which gains more (times:
    reports/LOG.md).
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


Grad = torch.Tensor | None
#: Calls that a module makes beside its forward.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class SwiGLULinear(torch.autograd.Function):
    """SwiGLU and the linear layer behind it as one step: the layer's input is quantized as it is made, and not kept.

    y = P(silu(gate) * up, w) + bias for gate and up (..., K), with P the products of a recipe. Kept are gate, up and the
    weight, which SwiGLU and the layer keep anyway; in place of the layer's input (a byte an element as codes, two where the
    weight gradient's operands are dense) backward makes silu(gate) * up again, once, for the weight gradient. Operands,
    outputs and gradients are those of `fast.swiglu` followed by `ao_lab.training.autograd.training_linear`, bit for bit: of
    `TrainingLinear`, or by_values (MX blocks on GPUs that scale none) of `DequantizedLinear`, all in one 16-bit dtype.
    """

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, w: Tensor, bias: Tensor | None, recipe: Recipe, by_values: bool
    ) -> Tensor:
        """The output (..., N)."""
        ctx.save_for_backward(gate, up, w)
        ctx.recipe, ctx.by_values = recipe, by_values
        output = recipe.output
        if by_values:
            x = operand_values(_hidden(gate, up), output.a, 1, "x")
            y = functional.linear(x, operand_values(w.contiguous(), output.b, 1, "w"), bias)
        else:
            scheme = dequantized.scheme_of(output.a)
            rows = of_record(fast.swiglu_quantize(as_matrix(gate), as_matrix(up), scheme), scheme)
            y = product("output", rows, weight_rows(w, output.b), output, gate.dtype, bias)
        # No view, and under a tracer a tensor of its own: see `TrainingLinear`.
        separate: Tensor = torch.ops.aten._unsafe_view(y, (*gate.shape[:-1], w.shape[0]))
        return separate

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Grad, ...]:
        """Gradients of gate, up, w and bias. The weight's comes first: its operands are gone when gate's and up's are made."""
        forget_copies()
        gate, up, w = ctx.saved_tensors
        wants_w, wants_bias = ctx.needs_input_grad[2:4]
        gradients = _value_gradients if ctx.by_values else _code_gradients
        g = as_matrix(g)
        dx, dw = gradients(g.contiguous() if ctx.by_values else g, gate, up, w, ctx.recipe, wants_w)
        d_gate, d_up = swiglu_vjp(dx.view(gate.shape), gate, up)
        return d_gate, d_up, dw, column_sums(g) if wants_bias else None, None, None


def _hidden(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up as a matrix (M, K)."""
    return as_matrix(fast.swiglu(gate, up))


def _code_gradients(
    g: Tensor, gate: Tensor, up: Tensor, w: Tensor, recipe: Recipe, wants_w: bool
) -> tuple[Tensor, Grad]:
    """Gradients of silu(gate) * up and of w by products of codes."""
    # Both halves take a gradient, so rows are made.
    rows: Any
    rows, columns = gradient_operands(g, recipe, True, wants_w, None)
    dw = None
    if columns is not None:
        x = quantize_one(_hidden(gate, up).t(), recipe.weight_grad.b)
        dw = product("weight_grad", columns, x, recipe.weight_grad, w.dtype)
        del x
    del columns
    return product("input_grad", rows, weight_columns_of(w, recipe), recipe.input_grad, gate.dtype), dw


def _value_gradients(
    g: Tensor, gate: Tensor, up: Tensor, w: Tensor, recipe: Recipe, wants_w: bool
) -> tuple[Tensor, Grad]:
    """The same by products of values."""
    rows: Any
    rows, columns = gradient_values(g, recipe, wants_w)
    dw = None
    if columns is not None:
        dw = columns.t() @ operand_values(_hidden(gate, up), recipe.weight_grad.b, 0, "x.T")
    del columns
    return rows @ weight_columns_values(w.contiguous(), recipe), dw


def swiglu_linear(gate: Tensor, up: Tensor, down: Any) -> torch.Tensor:
    """down(silu(gate) * up), down being a module; as one step where that serves, else by its two parts."""
    y: Tensor
    if gate.dtype not in dequantized.HALVES or hasattr(gate, "device_mesh"):
        y = down(functional.silu(gate) * up)
        return y
    recipe = served_recipe(gate, up, down)
    if recipe is None:
        y = down(fast.swiglu(gate, up))
        return y
    mark_run(down)
    by_values = dequantized.serves(gate, down.weight, down.bias, recipe, "auto")
    y = SwiGLULinear.apply(gate, up, down.weight, down.bias, recipe, by_values)  # type: ignore[no-untyped-call]
    return y


def served_recipe(gate: Tensor, up: Tensor, down: nn.Module) -> Recipe | None:
    """The recipe of a layer that one step serves: in training, called as its class is, without hooks and without a forward of
    its own (as accelerate gives modules), quantized as `is_served` says; None for others."""
    if type(down) is not LowPrecisionLinear or is_called_otherwise(down):
        return None
    if not torch.compiler.is_compiling() and is_transformed():
        return None
    settings, w = down.low_precision, down.weight
    trained = torch.is_grad_enabled() and gate.requires_grad and up.requires_grad
    plain = type(w) in PLAIN and up.shape == gate.shape and {t.dtype for t in (up, w)} == {gate.dtype}
    if settings.kernel != "auto" or not trained or not plain or autocast_dtype(gate) is not None:
        return None
    of_m, of_n, of_k = settings.steps
    n, k = w.shape
    if gate.shape[-1] != k or (gate.numel() // max(k, 1)) % of_m or n % of_n or k % of_k:
        return None
    recipe = tuned_recipe(settings.recipe, gate, w)
    return recipe if is_served(recipe) else None


def is_called_otherwise(module: nn.Module) -> bool:
    """Whether a call of a module is more than its class's forward: a forward of its own, or hooks, of all modules too."""
    hooked = any(getattr(module, name) for name in HOOKS) or bool(global_hooks())  # type: ignore[no-untyped-call]
    return "forward" in vars(module) or hooked


def is_served(recipe: Recipe) -> bool:
    """Whether every operand is taken from the tensor itself as it is: quantized, in the weight gradient alone dense, too."""
    plain = all(not (one.hadamard or one.is_stochastic) and one.source == "tensor" for one in recipe.operands)
    codes = [one.scheme is not None for one in recipe.operands]
    return plain and (all(codes) or (all(codes[:4]) and not any(codes[4:])))
