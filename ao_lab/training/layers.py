"""nn.Linear that trains in low precision: the module, its parameters, hooks and names stay, only its class changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import lcm
from typing import Any, ClassVar

import torch
from torch import nn

from ao_lab.tensor.metadata import DTYPES
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.training.autograd import (
    Split,
    check_traced,
    functional_linear,
    is_transformed,
    prepare,
    training_linear,
)
from ao_lab.transforms.layers import ConvertedModule
from fast.dispatch import PLAIN
from fast.ops import constant_result
from reference.training.linear import multiple_of
from reference.training.recipe import RECIPES, Operand, Recipe


@dataclass(frozen=True)
class Settings:
    """How a layer trains. pad: lengths that blocks do not divide are padded with zeros. kernel: of the three
    products, a name of `ao_lab.training.products.PRODUCTS`; "auto" is what was tuned, or the default."""

    recipe: Recipe
    pad: bool = False
    kernel: str = "auto"
    #: What M, N and K are multiples of.
    steps: tuple[int, int, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", steps(self.recipe))
        prepare(self.recipe)

    @property
    def recipe_name(self) -> str:
        """The recipe's name; with a digest of its products where `RECIPES` has no such record."""
        return self.recipe.name if RECIPES.get(self.recipe.name) == self.recipe else self.recipe.key


class LowPrecisionLinear(ConvertedModule, nn.Linear):
    """nn.Linear whose three products run as a recipe says; `ao_lab.convert_for_training_` makes it of an nn.Linear in place.

    state_dict, parameters and hooks are those of nn.Linear, so checkpoints load both ways. Inputs in another dtype than the
    weight raise as nn.Linear's do; under autocast both are cast to its dtype first.
    """

    low_precision: Settings
    #: What the module was before.
    plain: ClassVar[type[nn.Linear]] = nn.Linear

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """x @ weight.T + bias."""
        mark_run(self)
        x, weight = self.operands(input)
        return low_precision_linear(x, weight, self.bias, self.low_precision, evaluated=not self.training)

    def operands(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the recipe's products are of: the inputs and the weight."""
        return input, self.weight

    def restore_weight(self) -> None:
        """Make the weight what nn.Linear has, before the module becomes one; here it is that already."""

    def unsupported_reason(self) -> str | None:
        """Why `quantize_` leaves the layer as it is; None: it takes its weight as any other."""
        name = self.low_precision.recipe.name
        return f"it trains with recipe {name!r}; ao_lab.convert_from_training_(model) makes it an nn.Linear again"

    def parameter_reason(self, name: str) -> str | None:
        """Why a parameter is as it is, for `explain`."""
        return f"trains by recipe {self.low_precision.recipe.name!r}" if name == "weight" else None

    def training_record(self) -> dict[str, str]:
        """The recipe, beside what the layer trains with otherwise."""
        return {**super().training_record(), "recipe": self.low_precision.recipe_name}

    def extra_repr(self) -> str:
        """torch's own, and the recipe."""
        return f"{super().extra_repr()}, recipe={self.low_precision.recipe.name}"


def low_precision_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    settings: Settings,
    split: Split | None = None,
    *,
    evaluated: bool = False,
) -> torch.Tensor:
    """x (..., K) times w.T (K, N) plus bias (N) by a recipe, padded where its blocks ask for that. split: see `Split`.

    evaluated: see `training_linear`. Without rows of w, or elements in them, nothing is quantized: zeros, or the bias.
    """
    eager = not torch.compiler.is_compiling()
    functional = eager and is_transformed()
    if functional:
        check_traced(w)  # only torch.func is left
    if type(w) not in PLAIN and hasattr(w, "device_mesh"):
        raise TypeError(
            "LowPrecisionLinear: the weight is a DTensor; split layers by ao_lab.LowPrecisionColwiseParallel or "
            "LowPrecisionRowwiseParallel, shard them by fully_shard, and call the module that was sharded"
        )
    if autocast_dtype(x) is not None:
        x, w, bias = autocast(x, w, bias)
    if x.dtype != w.dtype and x.dtype != autocast_dtype(w):
        raise TypeError(
            f"LowPrecisionLinear: inputs are {x.dtype} and the weight is {w.dtype}; cast one, or use torch.autocast"
        )
    n, k = w.shape
    if not x.dim() or x.shape[-1] != k:
        raise ValueError(
            f"LowPrecisionLinear: the last axis of inputs has {k} elements, and inputs are at least 1D; got shape "
            f"{tuple(x.shape)}"
        )
    if not n or not k:
        return nn.functional.linear(x, w, bias)
    of_m, of_n, of_k = settings.steps
    m = x.numel() // k
    partial = m % of_m if eager else not divides(of_m, m)
    if not (partial or n % of_n or k % of_k):
        return _unpadded_linear(x, w, bias, settings, split, evaluated, functional)
    # Zeros up to what blocks divide change no amax, and add nothing to a product or a gradient.
    more_m, more_n, more_k = (-length % step for length, step in zip((m, n, k), settings.steps, strict=True))
    rows = nn.functional.pad(x.reshape(m, k), (0, more_k, 0, more_m))
    if more_n or more_k:
        w = padded(w, more_n, more_k)
        bias = None if bias is None else nn.functional.pad(bias, (0, more_n))
    y = _unpadded_linear(rows, w, bias, settings, split, evaluated, functional)[:m, :n].contiguous()
    # As nn.Linear's output this is no view: FSDP2 hangs a hook on it, which a write to a view would lose.
    result: torch.Tensor = torch.ops.aten._unsafe_view(y, (*x.shape[:-1], n))
    return result


def _unpadded_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    settings: Settings,
    split: Split | None,
    evaluated: bool,
    functional: bool,
) -> torch.Tensor:
    """The same of lengths that blocks divide; under transforms by functions that these know."""
    recipe, kernel = settings.recipe, settings.kernel
    if functional and split is None:
        return functional_linear(x, w, bias, recipe, kernel)
    return training_linear(x, w, bias, recipe, kernel, split, evaluated=evaluated)


def autocast(*tensors: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Tensors in the dtype of the autocast context, as nn.Linear's are; themselves outside of one.

    A weight that came as codes stays: it has been rounded already.
    """
    dtype = autocast_dtype(next(t for t in tensors if t is not None))
    if dtype is not None:
        tensors = tuple(t if t is None or not is_cast(t) else t.to(dtype) for t in tensors)
    return tensors  # type: ignore[return-value]


def is_cast(t: torch.Tensor) -> bool:
    """Whether autocast casts a tensor, as torch's own layers have it: not float64."""
    return t.is_floating_point() and t.dtype != torch.float64 and not isinstance(t, QuantizedTensor)


def autocast_dtype(t: torch.Tensor) -> torch.dtype | None:
    """The dtype of the autocast context for a tensor's device; None outside of one, and where a device has none (meta)."""
    kind = t.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def padded(w: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """A weight with rows and columns of zeros behind its own; of codes one axis after the other."""
    if not isinstance(w, QuantizedTensor):
        return nn.functional.pad(w, (0, columns, 0, rows))
    for pad in ((0, 0, 0, rows), (0, columns)):
        w = nn.functional.pad(w, pad) if any(pad) else w
    return w


#: In a module's __dict__ once its forward ran outside of a compiled program.
RAN = "forward_ran"
#: Whether a tracer has followed a layer, of which no module keeps a trace.
_traced: list[bool] = []


def mark_run(module: object) -> None:
    """Note that a module's forward ran, for `never_ran`."""
    if torch.compiler.is_compiling():
        _note_traced()
    elif RAN not in module.__dict__:
        module.__dict__[RAN] = True


@constant_result
def _note_traced() -> bool:
    if not _traced:
        _traced.append(True)
    return True


def never_ran(modules: Mapping[str, object]) -> tuple[str, ...]:
    """Names of modules whose forward never ran while that of another did; none where compiled programs ran some unseen."""
    ran = {name for name, module in modules.items() if RAN in module.__dict__}
    return tuple(name for name in modules if name not in ran) if ran and not _traced else ()


#: By the class of a layer: what says as which class it trains by a recipe, or why it does not.
CLASSES: dict[type[nn.Module], Callable[[Any], type[LowPrecisionLinear] | str]] = {
    nn.Linear: lambda module: LowPrecisionLinear
}


def class_of(module: nn.Module) -> type[LowPrecisionLinear] | str:
    """The class as which a layer trains by a recipe, or why there is none."""
    known = CLASSES.get(type(module))
    if isinstance(module, LowPrecisionLinear):
        name = module.low_precision.recipe.name
        return f"it trains with recipe {name!r} already; ao_lab.convert_from_training_(model) first"
    if known is None:
        return f"recipes train nn.Linear itself; a {type(module).__name__} may compute otherwise"
    return known(module)


def train_by(module: nn.Linear, settings: Settings) -> None:
    """Make a linear layer that `class_of` knows train by a recipe."""
    kind = class_of(module)
    if isinstance(kind, str):
        raise TypeError(kind)
    module.__class__ = kind
    module.low_precision = settings  # type: ignore[assignment]


def plain_again(module: LowPrecisionLinear) -> None:
    """Undo `train_by`."""
    module.restore_weight()
    restore_class(module, LowPrecisionLinear, module.plain)


def restore_class(module: Any, converted: type, plain: type[nn.Module]) -> None:
    """Give a converted module the class `plain`, and let go of what conversion added.

    A class that another library made of the converted one since (a parametrization, fully_shard) is made of `plain` instead, so
    that what it adds stays.
    """
    module.__class__ = _rebased(type(module), converted, plain)
    del module.low_precision
    module.__dict__.pop(RAN, None)


def _rebased(current: type, converted: type, plain: type[nn.Module]) -> type:
    """The class `found` with `plain` in the place of the class that conversion gave."""
    if _is_given(current):
        return plain
    given = next(kind for kind in current.__mro__ if _is_given(kind))
    bases = tuple(
        _rebased(base, converted, plain) if issubclass(base, converted) else base
        for base in current.__bases__
    )
    added = {name: value for name, value in vars(current).items() if name not in ("__dict__", "__weakref__")}
    return type(current.__name__.replace(given.__name__, plain.__name__), bases, added)


def _is_given(kind: type) -> bool:
    """Whether conversion gave modules a class, which names the plain one or is one of this package."""
    return "plain" in vars(kind) or kind.__module__.partition(".")[0] == "ao_lab"


#: What `torch._scaled_mm` asks of every length of 8-bit float products.
STEP = 16


def steps(recipe: Recipe) -> tuple[int, int, int]:
    """What M, N and K are multiples of: what the recipe asks, and whole blocks, though those at the end may be partial."""
    whole = lcm(STEP, *(_length(operand) for operand in recipe.operands))
    m, n, k = (multiple_of(recipe, dim, multiple=whole) for dim in "MNK")
    return m, n, k


def _length(operand: Operand) -> int:
    """Elements of a block along the sum; 1 where it takes any number."""
    block = None if operand.scheme is None else operand.scheme.scale.block
    inner = block[1] if isinstance(block, tuple) else block
    return inner if isinstance(inner, int) and inner > 0 else 1


#: The way out for lengths that blocks do not divide.
PADS = "pad=True pads it with zeros"


def unsupported_reason(recipe: Recipe, module: nn.Linear, pad: bool = False) -> str | None:
    """Why a linear layer of these lengths and this dtype cannot train by a recipe; None where it can."""
    if (dtype := getattr(module.weight, "dtype", None)) is not None and dtype not in DTYPES:
        return f"its weight is {dtype}, and recipes take float32, bfloat16, float16 and float64"
    _, n, k = steps(recipe)
    for name, length, step in (
        ("in_features", module.in_features, k),
        ("out_features", module.out_features, n),
    ):
        if length % step and not pad:
            return f"{name} = {length} is no multiple of {step}, as recipe {recipe.name!r} asks; {PADS}"
    return None


def divides(step: int, length: Any) -> bool:
    """Whether, under a tracer, a length is a multiple of a step; False where it is open, so that one program serves all."""
    from torch.fx.experimental.symbolic_shapes import (
        statically_known_true,
    )  # not imported where nothing is traced

    return statically_known_true(length % step == 0)


def padded_to_multiples(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """A matrix with zeros up to multiples of two numbers; itself where there is nothing to add.

    Zeros change no amax, and add nothing to a product or a gradient.
    """
    below, right = -x.shape[0] % rows, -x.shape[1] % columns
    return nn.functional.pad(x, (0, right, 0, below)) if below or right else x
