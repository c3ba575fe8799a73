"""Modules of batched experts that train in low precision: the module, its parameters and names stay, its class changes.

**Experts of transformers** (`use_experts_implementation`) say of themselves which parameters they have (`has_gate`,
`has_bias`), which way round these lie (`is_transposed`), how they gate (`_apply_gate`) or activate (`act_fn`), and whether they
normalize results (`has_post_expert_norm`). They get a forward that sorts tokens by expert on the device (`experts_forward`);
`config._experts_implementation` then has no say. None of transformers is imported.

**Others**, as torchtitan's GroupedExperts, keep their own forward, and its products with experts are taken over while it runs
(`run_intercepted`): `torch._grouped_mm` and `torch.nn.functional.grouped_mm` of rows sorted by expert; and products of rows
with one expert's matrix or of a batch with all, where the matrix is the module's own parameter, a view of it, or such a one in
another dtype. Every other product with experts (einsum, baddbmm, a matrix on the left) raises RuntimeError before it runs, and
so does a forward in which some parameter of experts was in no product: nothing trains in high precision unseen. Dynamo does not
ask modes about grouped products, so the module stays out of compiled graphs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ao_lab.training.autograd import check_experts_traced
from ao_lab.training.grouped.autograd import grouped_linear
from ao_lab.training.layers import PADS, Settings, autocast, mark_run, restore_class
from ao_lab.transforms.layers import ConvertedModule, is_batch


class Sorted(NamedTuple):
    """What `sort_by_expert` found of S = T * k pairs of a token and an expert; no count is read by the host."""

    #: (S,) int64: the pair at each sorted place; pair i is choice i % k of token i // k.
    order: torch.Tensor
    #: (E,) int32: the place after each expert's pairs; places from the last on are of no expert.
    offsets: torch.Tensor
    #: (E,) int32: pairs of each expert.
    counts: torch.Tensor


def sort_by_expert(router_indices: torch.Tensor, experts: int) -> Sorted:
    """Pairs of tokens and experts, sorted by expert; those of one expert stay in the order of the tokens.

    router_indices: (T, k) integers. Numbers outside 0 to experts - 1 are of no expert and come last, as expert-parallel
    routers mark pairs of other ranks. Raises TypeError for indices that are no integers.
    """
    if router_indices.is_floating_point() or router_indices.is_complex():
        raise TypeError(
            f"router_indices are integers, got {router_indices.dtype}; give topk's indices, not its values"
        )
    chosen = router_indices.reshape(-1)
    chosen = torch.where((chosen < 0) | (chosen >= experts), experts, chosen)
    sorted_experts, order = torch.sort(chosen, stable=True)
    numbers = torch.arange(experts, device=chosen.device, dtype=chosen.dtype)
    offsets = torch.searchsorted(sorted_experts, numbers, right=True).to(torch.int32)
    return Sorted(order, offsets, torch.diff(offsets, prepend=offsets.new_zeros(1)))


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, choices: int) -> torch.Tensor:
        ctx.save_for_backward(order)
        ctx.choices = choices
        return x[order // choices]

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (order,) = ctx.saved_tensors
        rows = g[inverse(order)].reshape(-1, ctx.choices, g.shape[1])
        return rows.sum(1, dtype=torch.float32).to(g.dtype), None, None


def dispatch(x: torch.Tensor, order: torch.Tensor, choices: int) -> torch.Tensor:
    """(S, K): the token of each sorted pair, for x (T, K) and S = T * choices.

    Its gradient is the sum over each token's choices in float32, in their order: no atomic addition.
    """
    rows: torch.Tensor = _Dispatch.apply(x, order, choices)  # type: ignore[no-untyped-call]
    return rows


def combine(y: torch.Tensor, order: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """(T, N): the sum over each token's k pairs of its weight times its row of y, in float32, in y's dtype.

    y: (S, N) sorted by expert; order: of `sort_by_expert`; weights: (T, k). The sum's order is that of the choices: no atomic
    addition, the same bits in every run. A pair of no expert has a row of zeros in y.
    """
    tokens, choices = weights.shape
    rows = y[inverse(order)].reshape(tokens, choices, y.shape[1]).to(torch.float32)
    return (rows * weights.to(torch.float32).unsqueeze(-1)).sum(1).to(y.dtype)


def inverse(order: torch.Tensor) -> torch.Tensor:
    """The permutation that undoes another."""
    place = torch.empty_like(order)
    return place.scatter_(0, order, torch.arange(order.shape[0], device=order.device))


def follows_transformers(module: nn.Module) -> bool:
    """Whether a module says of itself what transformers' decorator lets it say."""
    said = all(
        isinstance(getattr(module, name, None), bool) for name in ("has_gate", "has_bias", "is_transposed")
    )
    if not said or not hasattr(module, "num_experts"):
        return False
    up = "gate_up_proj" if module.has_gate else "up_proj"
    gates = hasattr(module, "_apply_gate" if module.has_gate else "act_fn")
    return gates and {up, "down_proj"} <= {name for name, _ in module.named_parameters(recurse=False)}


def experts_forward(
    module: Any,
    settings: Settings,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """(T, K): for each token the weighted sum of its experts' results.

    hidden_states (T, K), top_k_index and top_k_weights (T, k). Numbers of no expert, as expert-parallel routers give to the
    tokens of others, add nothing.
    """
    check_experts_traced(module.down_proj)
    order, offsets, _ = sort_by_expert(top_k_index, module.num_experts)
    rows = dispatch(hidden_states, order, top_k_index.shape[-1])
    owners = torch.searchsorted(
        offsets, torch.arange(rows.shape[0], device=rows.device, dtype=torch.int32), right=True
    )
    up = "gate_up_proj" if module.has_gate else "up_proj"
    rows = _projected(module, up, rows, offsets, owners, settings)
    rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
    rows = _projected(module, "down_proj", rows, offsets, owners, settings)
    if getattr(module, "has_post_expert_norm", False):
        rows = module.post_expert_norm(rows)
    return combine(rows, order, top_k_weights).to(hidden_states.dtype)


def _projected(
    module: Any, name: str, x: torch.Tensor, offsets: torch.Tensor, owners: torch.Tensor, settings: Settings
) -> torch.Tensor:
    """One projection of each row by its expert, with its bias; zeros for rows of no expert."""
    w = getattr(module, name)
    w = w.transpose(1, 2) if module.is_transposed else w
    y = linear_by(settings, x, w, offsets, evaluated=not module.training)
    if module.has_bias:
        # A row of zeros for rows of no expert.
        bias = nn.functional.pad(getattr(module, f"{name}_bias"), (0, 0, 0, 1))
        y = y + bias[owners].to(y.dtype)
    return y


def linear_by(
    settings: Settings, x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, *, evaluated: bool = False
) -> torch.Tensor:
    """`grouped_linear` in the dtype of w or of autocast, with lengths filled up as the recipe asks: zeros add nothing."""
    check_experts_traced(w)
    x, w, _ = autocast(x.to(w.dtype), w, None)
    n, k = w.shape[1:]
    more_n, more_k = (-length % step for length, step in zip((n, k), settings.steps[1:], strict=True))
    if more_k:
        x = nn.functional.pad(x, (0, more_k))
    if more_n or more_k:
        w = nn.functional.pad(w, (0, more_k, 0, more_n))
    return grouped_linear(x, w, offsets, settings.recipe, settings.kernel, evaluated=evaluated)[:, :n]


#: What a forward that can be taken over calls one of, by name.
NAMES = {"grouped_mm", "_grouped_mm", "bmm", "linear", "matmul"}
GROUPED = (
    (torch._grouped_mm, nn.functional.grouped_mm)
    if hasattr(nn.functional, "grouped_mm")
    else (torch._grouped_mm,)
)
MATMULS = (
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.Tensor.mm,
    torch.Tensor.bmm,
)
#: Names of functions that multiply matrices.
MULTIPLIES = {
    "linear", "matmul", "mm", "bmm", "mv", "dot", "inner", "einsum", "tensordot", "addmm", "addmm_", "baddbmm", "baddbmm_",
    "addbmm", "addmv", "chain_matmul", "multi_dot", "linalg_multi_dot", "bilinear", "grouped_mm", "_grouped_mm", "_scaled_mm",
    "_scaled_grouped_mm", "__matmul__", "__rmatmul__",
}  # fmt: skip
WAY_OUT = "exclude it with filter_fn, or choose an implementation that calls grouped_mm"

#: x (T, K), w (E, N, K), offsets (E,) and the shape of the result.
Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, ...]]


class ExpertProducts(TorchFunctionMode):
    """Sends products with experts to `grouped_linear`, and notes of which parameters they were."""

    def __init__(self, module: nn.Module, settings: Settings) -> None:
        super().__init__()
        self.module, self.settings, self.evaluated = module, settings, not module.training
        #: Names of parameters with three axes by the memory of these, of views, and of copies in another dtype.
        self.own = {
            _memory(p): frozenset([name])
            for name, p in module.named_parameters(recurse=False)
            if p.dim() == 3
        }
        self.seen: set[str] = set()
        #: Copies whose memory `own` knows: while they are held nothing else gets it.
        self.held: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [*_tensors(args, kwargs)]
        owners = [names for t in given if (names := self._names(t))]
        if not owners and func not in GROUPED:
            return func(*args, **kwargs)
        product = self._product(func, args, kwargs)
        if product is not None:
            self.seen.update(*owners)
            x, w, offsets, shape = product
            y = linear_by(self.settings, x, w, offsets, evaluated=self.evaluated).reshape(shape)
            bias = _bias(func, args, kwargs)
            return y if bias is None else y + bias.to(y.dtype)
        if getattr(func, "__name__", "") in MULTIPLIES:
            self._refuse(func, frozenset().union(*owners))
        result = func(*args, **kwargs)
        return self._noted(result, given, owners) if len(owners) == len(given) else result

    def _noted(self, result: Any, given: list[torch.Tensor], owners: list[frozenset[str]]) -> Any:
        """The result of a function of experts alone; a cast, a copy, or matrices put together are theirs too."""
        if not isinstance(result, torch.Tensor) or result.numel() != sum(t.numel() for t in given):
            return result
        if (key := _memory(result)) not in self.own:
            self.own[key] = frozenset().union(*owners)
            self.held.append(result)
        return result

    def _refuse(self, func: Any, names: frozenset[str]) -> None:
        kind, name = type(self.module).__name__, getattr(func, "__name__", str(func))
        which = ", ".join(sorted(names)) or "its experts"
        raise RuntimeError(
            f"{kind} multiplies {which} by {name} in a way that a recipe does not support, and would do so in high "
            f"precision; {WAY_OUT}"
        )

    def check_all_seen(self) -> None:
        """RuntimeError where a parameter of experts was in no product that was taken over."""
        parameters = self.module.named_parameters(recurse=False)
        missing = [name for name, p in parameters if is_matrices(p) and name not in self.seen]
        if missing:
            raise RuntimeError(
                f"{type(self.module).__name__} called no matmul with its experts that a recipe supports, of "
                f"{', '.join(missing)}; {WAY_OUT}"
            )

    def _product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found | None:
        """A product with experts; None for anything else."""
        if func in GROUPED:
            return _grouped(*args, **kwargs)
        if func is nn.functional.linear:
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            a, b = given["input"], given["weight"]
            return _of_one(a, b) if self._names(b) and not self._names(a) else None
        if func not in MATMULS or len(args) + len(kwargs) != 2:
            return None
        a, b = args[0] if args else kwargs["input"], args[1] if len(args) > 1 else [*kwargs.values()][-1]
        if not self._names(b) or self._names(a) or b.dim() not in (2, 3):
            return None
        return _of_all(a, b) if b.dim() == 3 else _of_one(a, b.transpose(-2, -1))

    def _names(self, matrix: Any) -> frozenset[str]:
        """The parameters that a tensor is of; none for other tensors."""
        return self.own.get(_memory(matrix), frozenset()) if isinstance(matrix, torch.Tensor) else frozenset()


def is_matrices(parameter: torch.Tensor) -> bool:
    """Whether a parameter is of matrices, one for each expert: not of biases with an axis of one entry."""
    return is_batch(parameter) and 1 not in parameter.shape


def _memory(x: torch.Tensor) -> int:
    """What tells a tensor's memory from others, which its views share; of a DTensor that of this rank's part."""
    return int(getattr(x, "_local_tensor", x).untyped_storage()._cdata)


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that a function is given, those in its lists too."""
    for value in (*args, *kwargs.values()):
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(one, torch.Tensor):
                yield one


def _bias(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The bias of torch's linear layer."""
    if func is not nn.functional.linear:
        return None
    given: torch.Tensor | None = args[2] if len(args) > 2 else kwargs.get("bias")
    return given


def _grouped(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: Any = None,
    out_dtype: Any = None,
) -> Found | None:
    """Rows sorted by expert; not the other forms of torch's function."""
    if a.dim() != 2 or b.dim() != 3 or offs is None or bias is not None or out_dtype not in (None, a.dtype):
        return None
    return a, b.transpose(1, 2), offs, (a.shape[0], b.shape[2])


def _of_one(x: torch.Tensor, w: torch.Tensor) -> Found | None:
    """Rows (..., K) that are all of one expert."""
    if not x.dim() or w.dim() != 2:
        return None
    rows = x.reshape(-1, x.shape[-1])
    offsets = torch.full((1,), rows.shape[0], dtype=torch.int32, device=x.device)
    return rows, w[None], offsets, (*x.shape[:-1], w.shape[0])


def _of_all(a: torch.Tensor, b: torch.Tensor) -> Found | None:
    """As many rows for each expert."""
    if a.dim() != 3 or a.shape[0] != b.shape[0]:
        return None
    experts, rows, length = a.shape
    offsets = torch.arange(1, experts + 1, dtype=torch.int32, device=a.device) * rows
    return a.reshape(experts * rows, length), b.transpose(1, 2), offsets, (experts, rows, b.shape[2])


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
    reason="ao_lab: a module's matmuls with its experts are replaced while it runs; call torch.compile without "
    "fullgraph=True"
)
def run_intercepted(
    forward: Callable[..., Any],
    module: nn.Module,
    settings: Settings,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """forward(*args, **kwargs) with its products with experts by the recipe.

    Raises RuntimeError where rows went in and a parameter of experts was in no product to take over: it would train in high
    precision.
    """
    check_experts_traced(next(p for p in module.parameters(recurse=False) if p.dim() == 3))
    with ExpertProducts(module, settings) as products:
        result = forward(*args, **kwargs)
    if any(t.numel() for t in _tensors(args, kwargs)):
        products.check_all_seen()
    return result


class LowPrecisionExperts(ConvertedModule):
    """What a module of experts has beside its own class while it trains by a recipe."""

    low_precision: Settings
    #: The module's own class.
    plain: type[nn.Module]

    def unsupported_reason(self) -> str | None:
        """Why `quantize_` leaves the experts as they are."""
        name = self.low_precision.recipe.name
        return f"it trains with recipe {name!r}; ao_lab.convert_from_training_(model) makes it a {self.plain.__name__} again"

    def parameter_reason(self, name: str) -> str | None:
        """Why a parameter is as it is, for `explain`."""
        matrices = is_matrices(getattr(self, name))
        return f"trains by recipe {self.low_precision.recipe.name!r}" if matrices else None

    def training_record(self) -> dict[str, str]:
        """The recipe."""
        return {"recipe": self.low_precision.recipe_name}

    def extra_repr(self) -> str:
        """The module's own, and the recipe."""
        own = super().extra_repr()  # type: ignore[misc]
        return ", ".join(part for part in (own, f"recipe={self.low_precision.recipe.name}") if part)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles name the module's own class: this one is made while a program runs."""
        kind = next(one for one in KINDS if isinstance(self, one))
        return _made, (kind, self.plain), self.__dict__


class TransformersExperts(LowPrecisionExperts):
    """Experts of transformers."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states (T, K), the experts (T, k) and the weights (T, k) of each token's choices: (T, K)."""
        mark_run(self)
        return experts_forward(self, self.low_precision, hidden_states, top_k_index, top_k_weights)


class InterceptedExperts(LowPrecisionExperts):
    """Experts whose forward multiplies by torch's grouped products, or by one for each expert."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own. torch.compile leaves it out of its graphs."""
        mark_run(self)
        return run_intercepted(super().forward, self, self.low_precision, args, kwargs)  # type: ignore[misc]


KINDS = (TransformersExperts, InterceptedExperts)
CLASSES: dict[tuple[type, type], type[Any]] = {}


def class_of(kind: type[LowPrecisionExperts], plain: type[nn.Module]) -> type[Any]:
    """The class that a module of class `plain` gets, the same at every call."""
    if (kind, plain) not in CLASSES:
        fields = {"plain": plain, "__module__": plain.__module__}
        CLASSES[kind, plain] = type(f"LowPrecision{plain.__name__}", (kind, plain), fields)
    return CLASSES[kind, plain]


def _made(kind: type[LowPrecisionExperts], plain: type[nn.Module]) -> Any:
    return object.__new__(class_of(kind, plain))


def experts_reason(settings: Settings, module: nn.Module) -> str | None:
    """Why experts cannot train by a recipe; None where they can."""
    kind = type(module).__name__
    if isinstance(module, LowPrecisionExperts):
        name = module.low_precision.recipe.name
        return f"they train by recipe {name!r} already; ao_lab.convert_from_training_(model) first"
    if not follows_transformers(module) and not NAMES & called(type(module).forward):
        return f"the forward of {kind} uses none of {', '.join(sorted(NAMES))}, as far as its code shows"
    step = max(settings.steps[1:])
    for name, parameter in module.named_parameters(recurse=False):
        lengths = tuple(parameter.shape[1:]) if is_matrices(parameter) else ()
        if any(length % step for length in lengths) and not settings.pad:
            asked = f"no multiples of {step}, as recipe {settings.recipe.name!r} asks"
            return f"{name} has matrices of {lengths}, {asked}; {PADS}"
    return None


def called(function: Callable[..., Any], depth: int = 3) -> set[str]:
    """Names in a function's code, and in that of the functions of its module that it names."""
    function = inspect.unwrap(function)
    code, globals_ = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    if code is None or not depth:
        return set()
    names = _names(code)
    inner = [globals_[name] for name in names if callable(globals_.get(name))]
    return names.union(*(called(f, depth - 1) for f in inner if inspect.isfunction(inspect.unwrap(f))))


def _names(code: CodeType) -> set[str]:
    return {*code.co_names}.union(*(_names(part) for part in code.co_consts if isinstance(part, CodeType)))


def train_experts_by(module: nn.Module, settings: Settings) -> None:
    """Make a module of experts train by a recipe."""
    kind = TransformersExperts if follows_transformers(module) else InterceptedExperts
    module.__class__ = class_of(kind, type(module))
    module.low_precision = settings  # type: ignore[assignment]


def plain_experts_again(module: LowPrecisionExperts) -> None:
    """Undo `train_experts_by`."""
    restore_class(module, LowPrecisionExperts, module.plain)
