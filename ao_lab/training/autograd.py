"""The linear layer of a recipe in autograd: its three products on quantized operands.

What is kept for backward is the inputs' quantized copy for the weight gradient, a byte an element or less, and the weight
itself, which is quantized again: a copy of it would double what its shards take under FSDP2. A weight that FSDP2 gathered as
codes is kept as these, whose memory FSDP2 frees and fills again.

Under torch.func (grad, vjp, jacrev, vmap) what is kept are the layer's own inputs, as a transform keeps nothing else;
operands are quantized again. They are those of `TrainingLinear`, bit for bit. vmap runs one example after the other: amaxes
and scales are those of the example alone, whatever the batch. Each example has random bits of its own where a recipe rounds
stochastically, unless vmap is told randomness="same". Second gradients and tangents are not defined.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn, Protocol

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad

from ao_lab.gemm.choices import SUBSETS, tuned
from ao_lab.training import reuse
from ao_lab.training.casts import (
    STREAMS,
    FindScales,
    Matrix,
    joined,
    parts,
    quantize_one,
    quantize_two,
    weight_columns,
    weight_rows,
)
from ao_lab.training.dequantized import DRAWS, dequantized_linear, serves
from ao_lab.training.products import is_captured, product
from ao_lab.training.reuse import Step, complete
from ao_lab.training.reuse import find as prepared_step
from fast.dispatch import PLAIN
from fast.layers.column_sums import column_sums
from fast.ops import once_differentiable
from reference.training.recipe import PRODUCTS, Operand, Product, Recipe

Grad = torch.Tensor | None
#: Gradients of what is no tensor.
NOTHING = (None,) * 5


class Split(Protocol):
    """How a layer's matrices lie on several ranks (tensor parallelism), each of which computes its part of a product."""

    def find_scales(self, which: str, operand: Operand) -> FindScales:
        """What finds the scales of an operand ("x", "w", "g", "w.T", "g.T", "x.T"); None where this rank's part has its own."""


class TrainingLinear(torch.autograd.Function):
    """y = x @ w.T + bias for x (..., K)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        recipe: Recipe,
        kernel: str = "auto",
        split: Split | None = None,
        kept: bool = True,
        evaluated: bool = False,
    ) -> torch.Tensor:
        """The output; x's copy for the weight gradient is made where that is wanted. One seed serves forward and backward.

        kept: whether a graph is recorded, of which an autograd function knows nothing. evaluated: see `training_linear`.
        """
        output, wants = recipe.output, ctx.needs_input_grad
        seed = new_seed(recipe) if is_drawn(recipe, wants, kept, evaluated) else None
        rows, columns = _input_operands(x, recipe, kept and wants[1], seed, split)
        tensors, ctx.settings = parts(columns) if columns is not None else ([], None)
        ctx.save_for_backward(w, *tensors)
        ctx.recipe, ctx.shape, ctx.dtype, ctx.seed = recipe, x.shape, x.dtype, seed
        ctx.kernel, ctx.split = kernel, split
        weight = weight_rows(w, output.b, _found(split, "w", output.b), seed)
        y = product("output", rows, weight, output, x.dtype, bias, kernel)
        # As nn.Linear's output this is no view: FSDP2 hangs a hook on it, which a write to a view would lose. Under a
        # tracer it is a tensor of its own: Dynamo of torch 2.11 sends no gradient to one that an operation gave back as it was.
        same = x.dim() == 2 and not torch.compiler.is_compiling()
        return y if same else torch.ops.aten._unsafe_view(y, (*x.shape[:-1], w.shape[0]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> tuple[Grad | None, ...]:
        """Gradients of x, w and bias, which have none of their own: codes stand between."""
        reuse.forget_copies()
        w, *tensors = ctx.saved_tensors
        recipe, kernel = ctx.recipe, ctx.kernel
        wants_x, wants_w, wants_bias = ctx.needs_input_grad[:3]
        g = as_matrix(g)
        rows, columns = gradient_operands(g, recipe, wants_x, wants_w, ctx.seed, ctx.split)
        dx = dw = None
        if rows is not None:
            weight = weight_columns_of(w, recipe, ctx.split, ctx.seed)
            dx = product("input_grad", rows, weight, recipe.input_grad, ctx.dtype, kernel=kernel)
            dx = dx if len(ctx.shape) == 2 else dx.view(ctx.shape)
        if columns is not None:
            x = joined(tensors, ctx.settings)
            dw = product("weight_grad", columns, x, recipe.weight_grad, w.dtype, kernel=kernel)
        if not torch.compiler.is_compiling():
            complete()
        return dx, dw, column_sums(g) if wants_bias else None, *NOTHING


def is_drawn(recipe: Recipe, wants: tuple[bool, ...], kept: bool, evaluated: bool) -> bool:
    """Whether a forward draws a seed: the output needs one, or a gradient of x or w.

    wants: which inputs require gradients; kept, evaluated: see `TrainingLinear.forward`.
    """
    if recipe.output.a.is_stochastic or recipe.output.b.is_stochastic:
        return True
    return (wants[0] or wants[1]) and (kept or not evaluated)


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """x (..., K) as (M, K)."""
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _input_operands(
    x: torch.Tensor, recipe: Recipe, columns: bool, seed: int | None, split: Split | None
) -> tuple[Matrix, Matrix | None]:
    """x along K for the output, and x.T along M for the weight's gradient where that is wanted.

    Linear layers one after the other with the same input share both, see `shared`.
    """
    a, b = recipe.output.a, recipe.weight_grad.b
    if split is None and columns and reuse.is_shareable(x, a, b):
        own, tensors, settings = reuse.shared_copies(x, (a, b), lambda: _two_copies(x, a, b))
        return own, joined(list(tensors), settings)
    matrix, streams = as_matrix(x), (STREAMS["x"], STREAMS["x.T"])
    own, other = _found(split, "x", a), _found(split, "x.T", b)
    if columns:
        return quantize_two(matrix, a, b, seed, streams, (own, other))
    return quantize_one(matrix, a, seed, streams[0], own), None


def _two_copies(x: torch.Tensor, a: Operand, b: Operand) -> reuse.Copies:
    rows, columns = quantize_two(as_matrix(x), a, b)
    tensors, settings = parts(columns)
    return rows, tuple(tensors), settings


def gradient_operands(
    g: torch.Tensor, recipe: Recipe, rows: bool, columns: bool, seed: int | None, split: Split | None = None
) -> tuple[Matrix | None, Matrix | None]:
    """g along N for the inputs' gradient, and g.T along M for the weight's: those that are wanted."""
    a, b = recipe.input_grad.a, recipe.weight_grad.a
    find_scales = _found(split, "g", a), _found(split, "g.T", b)
    if rows and columns:
        return quantize_two(g, a, b, seed, (STREAMS["g"], STREAMS["g.T"]), find_scales)
    if rows:
        return quantize_one(g, a, seed, STREAMS["g"], find_scales[0]), None
    return None, quantize_one(g.t(), b, seed, STREAMS["g.T"], find_scales[1]) if columns else None


def weight_columns_of(
    w: torch.Tensor, recipe: Recipe, split: Split | None = None, seed: int | None = None
) -> Matrix:
    """w.T along N."""
    rows, columns = recipe.output.b, recipe.input_grad.b
    find_scales = _found(split, "w", rows), _found(split, "w.T", columns)
    return weight_columns(w, rows, columns, find_scales, seed)


def _found(split: Split | None, which: str, operand: Operand) -> FindScales:
    return None if split is None else split.find_scales(which, operand)


def new_seed(recipe: Recipe) -> int | None:
    """A seed for one step's random bits, of torch's generator of the CPU; None where nothing is drawn.

    Neither torch's default device nor a mode (fake tensors) has a say: a number of the host is asked for.
    """
    if not recipe.is_stochastic:
        return None
    with torch._C._DisableTorchDispatch():
        return int(torch.randint(2**63 - 1, (), device="cpu").item())


def training_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: Recipe,
    kernel: str = "auto",
    split: Split | None = None,
    *,
    tuned: bool = True,
    evaluated: bool = False,
) -> torch.Tensor:
    """x (..., K) times w.T (K, N) plus bias (N), in autograd; shapes and bits as in `reference.training_linear`.

    kernel: of the products, see `ao_lab.training.products`. tuned: whether products that `ao_lab.tune` found not worth their
    casts are dense, all three being torch's own layer; a kernel that is named has all of the recipe. split: x, w and the output
    are parts of matrices that lie on several ranks; scales are those of the whole ones, and the recipe is never cut. evaluated:
    without gradients no random number is drawn that the output does not need; in training one is, as recomputation
    (`torch.utils.checkpoint`, reentrant) runs a layer without gradients first and counts on the generator to go on.
    """
    if tuned and kernel == "auto" and split is None and type(w) in PLAIN:
        recipe = tuned_recipe(recipe, x, w)
    if recipe.is_dense and kernel == "auto" and split is None and type(w) in PLAIN:
        return torch.nn.functional.linear(x, w, bias)
    step = None if split is not None else prepared_step(x, w, bias, recipe, kernel)
    if step is not None:
        repeated: torch.Tensor = PreparedLinear.apply(x, w, bias, step)  # type: ignore[no-untyped-call]
        return repeated
    if split is None and serves(x, w, bias, recipe, kernel):
        made = dequantized_linear(as_matrix(x), w, bias, recipe, new_seed, evaluated)
        # No view, as in `TrainingLinear`.
        return made if x.dim() == 2 else torch.ops.aten._unsafe_view(made, (*x.shape[:-1], w.shape[0]))
    kept = torch.is_grad_enabled()
    if recipe.is_stochastic and torch.compiler.is_compiling():
        # A seed is a number of the host: a tracer leaves a step that draws to eager.
        return _untraced(x, w, bias, recipe, kernel, split, kept, evaluated)  # type: ignore[no-any-return]
    y: torch.Tensor = TrainingLinear.apply(x, w, bias, recipe, kernel, split, kept, evaluated)  # type: ignore[no-untyped-call]
    return y


@torch.compiler.disable(reason=DRAWS)  # type: ignore[no-untyped-call, untyped-decorator]
def _untraced(*given: Any) -> torch.Tensor:
    y: torch.Tensor = TrainingLinear.apply(*given)  # type: ignore[no-untyped-call]
    return y


class PreparedLinear(torch.autograd.Function):
    """The same by a step that was prepared: operands, products and what is kept are those of `TrainingLinear`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, step: Step
    ) -> torch.Tensor:
        """The output; x's copy for the weight gradient is kept."""
        if is_captured(x):
            rows, scale, *kept = step.inputs(x)
        else:
            (rows, scale), kept, _ = reuse.shared_copies(x, step.shared, lambda: _copies(step, x))
        codes, weight_scale = step.weight_rows(w)
        ctx.save_for_backward(w, *kept)
        ctx.step, ctx.shape = step, x.shape
        y = step.output(rows, scale, codes, weight_scale, bias)
        # As nn.Linear's output this is no view: FSDP2 hangs a hook on it, which a write to a view would lose.
        return y if x.dim() == 2 else torch.ops.aten._unsafe_view(y, (*x.shape[:-1], w.shape[0]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> tuple[Grad, Grad, Grad, None]:
        """Gradients of x, w and bias."""
        if torch.compiler.is_compiling():  # compiled autograd: launches past Triton are not for tracers
            gradients: tuple[Grad, Grad, Grad, None] = _prepared_untraced(ctx, g)
            return gradients
        return _gradients(ctx, g)


def _gradients(ctx: Any, g: torch.Tensor) -> tuple[Grad, Grad, Grad, None]:
    reuse.forget_copies()
    step, shape = ctx.step, ctx.shape
    w, x_codes, x_scale = ctx.saved_tensors
    wants_x, wants_w, wants_bias, _ = ctx.needs_input_grad
    operands = step.gradients(g)
    if operands is None:
        raise NotImplementedError(
            "a training step takes output gradients that lie in memory, and not in batches (is_grads_batched)"
        )
    rows, scale, columns, column_scale = operands
    dx = dw = None
    if wants_x:
        codes, weight_scale = step.weight_columns(w)
        dx = step.input_grad(rows, scale, codes, weight_scale, None)
        dx = dx if len(shape) == 2 else dx.view(shape)
    if wants_w:
        dw = step.weight_grad(columns, column_scale, x_codes, x_scale, None)
    return dx, dw, column_sums(g) if wants_bias else None, None


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
    reason="ao_lab: a step that repeats launches its kernels outside of the compiler; compile backward without fullgraph=True"
)
def _prepared_untraced(ctx: Any, g: torch.Tensor) -> tuple[Grad, Grad, Grad, None]:
    return _gradients(ctx, g)


def _copies(step: Step, x: torch.Tensor) -> reuse.Copies:
    rows, scale, columns, column_scale = step.inputs(x)
    return (rows, scale), (columns, column_scale), step


#: Recipes cut to each subset, by the recipe's key. Made when a layer is converted: a tracer then finds them.
_cut: dict[str, dict[str, Recipe]] = {}


def prepare(recipe: Recipe) -> dict[str, Recipe]:
    """The recipe cut to each subset."""
    if recipe.key not in _cut:
        _cut[recipe.key] = {choice: _restricted(recipe, choice) for choice in SUBSETS}
    return _cut[recipe.key]


def _restricted(recipe: Recipe, choice: str) -> Recipe:
    low = choice.split("+")
    dense: dict[str, Any] = {name: Product() for name in PRODUCTS if name not in low}
    return replace(recipe, **dense) if dense else recipe


def tuned_recipe(recipe: Recipe, x: torch.Tensor, w: torch.Tensor) -> Recipe:
    """What `ao_lab.tune` left of a recipe for a layer, w (N, K), or experts, w (E, N, K), and a number of rows.

    The recipe where it was never tuned.
    """
    k, n = x.shape[-1], w.shape[-2]
    m = x.shape[0] if x.dim() == 2 else x.numel() // max(k, 1)
    experts = w.shape[0] if w.dim() == 3 else 0
    choice = tuned("training", recipe.key, "", (m, n, k), x.dtype, x.device, "", experts)
    return recipe if choice is None else prepare(recipe)[choice]


_transforms = torch._C._functorch.peek_interpreter_stack
_traces = torch._C._get_tracing_state
FORWARD = "forward-mode gradients (torch.autograd.forward_ad)"
ONCE = (
    "first gradients by torch.func.grad, vjp and jacrev, and vmap of them, are defined; "
    "ao_lab.convert_from_training_(model) makes the layers dense again"
)


def is_functional() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp, jacrev) may have wrapped tensors."""
    return _transforms() is not None


def is_transformed() -> bool:
    """Whether torch.func, torch.jit.trace or forward-mode gradients listen; to be asked outside of compiled programs."""
    return is_functional() or _traces() is not None or forward_ad._current_level >= 0


def check_traced(w: torch.Tensor) -> None:
    """For a layer of weight w (N, K): ValueError under torch.jit.trace, and NotImplementedError, as of torch's own functions,
    under forward-mode gradients."""
    n, k = _untraced_shape(w)
    layer = f"LowPrecisionLinear(in_features={k}, out_features={n})"
    _refuse_trace(layer)
    if not is_functional():
        refuse(layer, FORWARD)


def check_experts_traced(w: torch.Tensor) -> None:
    """For experts of weights w (E, N, K): the same, and NotImplementedError under transforms of torch.func too."""
    if torch.compiler.is_compiling() or not is_transformed():
        return
    experts, n, k = _untraced_shape(w)
    layer = f"{experts} experts of ({n}, {k})"
    _refuse_trace(layer)
    refuse(layer, "transforms of torch.func" if is_functional() else FORWARD)


def _untraced_shape(w: torch.Tensor) -> tuple[int, ...]:
    """The shape in numbers: inside torch.jit.trace lengths are tensors."""
    state, set_state = _traces(), torch._C._set_tracing_state  # type: ignore[attr-defined]
    set_state(None)
    try:
        return tuple(w.shape)
    finally:
        set_state(state)


def _refuse_trace(layer: str) -> None:
    if _traces() is not None:
        raise ValueError(
            f"{layer}: torch.jit.trace keeps no quantization of values that it has not seen, so a layer that trains by a "
            f"recipe is not traced; call ao_lab.convert_from_training_(model) first, or use torch.export"
        )


def refuse(layer: str, transform: str) -> NoReturn:
    """NotImplementedError that names a layer and a transform."""
    raise NotImplementedError(
        f"{layer} trains with a recipe, which does not support {transform}; of linear layers {ONCE}"
    )


#: Added to the seed from one example of vmap to the next.
NEXT = 0x9E3779B97F4A7C15
SEEDS = 2**63 - 1


class FunctionalLinear(torch.autograd.Function):
    """y = x @ w.T + bias for x (..., K), by a recipe under a seed."""

    @staticmethod
    def forward(
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        recipe: Recipe,
        kernel: str,
        seed: int | None,
    ) -> torch.Tensor:
        """The output."""
        output = recipe.output
        rows = quantize_one(as_matrix(x), output.a, seed, STREAMS["x"])
        y = product("output", rows, weight_rows(w, output.b, None, seed), output, x.dtype, bias, kernel)
        return y.reshape(*x.shape[:-1], w.shape[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Keep what forward was given."""
        x, w, bias, ctx.recipe, ctx.kernel, ctx.seed = inputs
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
        """Gradients of x, w and bias."""
        x, w = ctx.saved_tensors
        dx, dw, db = FunctionalGradients.apply(g, x, w, ctx.recipe, ctx.kernel, ctx.seed)  # type: ignore[no-untyped-call]
        return dx, dw, db if ctx.has_bias else None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        """One example after the other."""
        outputs = [FunctionalLinear.apply(*one) for one in _examples(info, in_dims, inputs)]  # type: ignore[no-untyped-call]
        return torch.stack(outputs), 0

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """There is none: NotImplementedError."""
        refuse("LowPrecisionLinear", "tangents (torch.func.jvp, jacfwd, hessian)")


class FunctionalGradients(torch.autograd.Function):
    """Gradients of x, w and bias for g (..., N), x (..., K) and w (N, K)."""

    @staticmethod
    def forward(
        g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, recipe: Recipe, kernel: str, seed: int | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All three; g and x have the same leading axes."""
        matrix, g = as_matrix(x), as_matrix(g)
        rows, columns = gradient_operands(g, recipe, True, True, seed)
        weight = weight_columns_of(w, recipe, None, seed)
        dx = product("input_grad", rows, weight, recipe.input_grad, x.dtype, kernel=kernel)  # type: ignore[arg-type]
        streams = STREAMS["x"], STREAMS["x.T"]
        _, kept = quantize_two(matrix, recipe.output.a, recipe.weight_grad.b, seed, streams)
        dw = product("weight_grad", columns, kept, recipe.weight_grad, w.dtype, kernel=kernel)  # type: ignore[arg-type]
        return dx.reshape(x.shape), dw, column_sums(g)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing is kept: there are no second gradients."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """There is none: NotImplementedError."""
        refuse("LowPrecisionLinear", "gradients of gradients")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        """One example after the other."""
        gradients = [FunctionalGradients.apply(*one) for one in _examples(info, in_dims, inputs)]  # type: ignore[no-untyped-call]
        return tuple(torch.stack(each) for each in zip(*gradients, strict=True)), (0, 0, 0)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """There is none: NotImplementedError."""
        refuse("LowPrecisionLinear", "tangents of gradients (torch.func.hessian)")


def _examples(info: Any, in_dims: tuple[int | None, ...], inputs: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The inputs of each example; the last one is the seed, which each has of its own."""
    examples = []
    for at in range(info.batch_size):
        one = [
            value if dim is None else value.select(dim, at)
            for value, dim in zip(inputs[:-1], in_dims[:-1], strict=True)
        ]
        seed, other = inputs[-1], 0 if info.randomness == "same" else at * NEXT
        examples.append((*one, None if seed is None else (seed + other) % SEEDS))
    if not examples:
        raise ValueError("vmap over no example: a layer that trains by a recipe needs one")
    return examples


def functional_linear(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, recipe: Recipe, kernel: str = "auto"
) -> torch.Tensor:
    """`ao_lab.training.autograd.training_linear` inside a transform of torch.func."""
    if kernel == "auto":
        recipe = tuned_recipe(recipe, x, w)
    if recipe.is_dense and kernel == "auto":
        return torch.nn.functional.linear(x, w, bias)
    with (
        temporarily_clear_interpreter_stack()
    ):  # a seed is a number of the host, which vmap would make one for each example
        seed = new_seed(recipe)
    y: torch.Tensor = FunctionalLinear.apply(x, w, bias, recipe, kernel, seed)  # type: ignore[no-untyped-call]
    return y
