"""Methods of quantization with data, as records: what `quantize_(..., methods=...)` takes.

A configuration says what a weight becomes (its scheme), methods say how its scales and codes are found. They are applied in
the order of `ORDER`, whatever the order in which they are given: changes of the weights before, then scales, then codes for
these scales. Every method works in every scheme that its mathematics allows; `ao_lab.calibration.layers` asks that before
anything changes. The mathematics is in `reference.calibration`, and in `fast.calibration` for tensors on GPUs.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from reference import Scheme
from reference.arrays.namespace import choice, lookup, nearest_names, told_nearest

#: In which GPTQ goes through the columns: as they are stored, by falling mean square of their inputs, or groups of a scale so
#: and columns inside them so.
ORDERS = ("stored", "activation", "groups")
#: GPTQ's damping by the error on held-out tokens.
HELD_OUT = "held out"


@dataclass(frozen=True)
class Method:
    """What all methods have."""

    #: Whether it reads inputs of layers, and whether sums of x x^T of them.
    calibrates: ClassVar[bool] = True
    needs_hessian: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """Its name in reports and on the command line."""
        return type(self).__name__.lower()

    @property
    def text(self) -> str:
        """What `named_method` makes this record of: its name, and the options that are not the default's."""
        values = {one.name: (getattr(self, one.name), one.default) for one in fields(self)}
        given = [f"{one}={_written(value)}" for one, (value, default) in values.items() if value != default]
        return " ".join([self.name, *given])

    @property
    def call(self) -> str:
        """What makes this record in Python, by the options that are not the default's."""
        values = {one.name: (getattr(self, one.name), one.default) for one in fields(self)}
        given = [f"{one}={value!r}" for one, (value, default) in values.items() if value != default]
        return f"{type(self).__name__}({', '.join(given)})"


@dataclass(frozen=True)
class Rotate(Method):
    """Rotates blocks of activations and weights by a Hadamard matrix, which spreads outliers (arXiv 2404.00456, 2509.23202).

    kind "block": activations are rotated in the layer before each matmul (`Recipe.rotation`), nothing else in the model
    changes; folders have layout "ao_lab". A weight is rotated if that lowers its output error with the methods that follow.
    size: length of the rotated blocks, a power of two. Default: the block that shares a scale, if that is a power of two, else
    up to 128.

    kind "offline": the whole residual stream is rotated and the rotation merged into weights (`ao_lab.calibration.offline`): no
    cost at run time, and compressed-tensors folders can store it. The first calibration batch proves in float64 that the
    model's function is unchanged. size: channels per block of the rotation, any divisor with a Hadamard matrix. Default: all
    channels. heads: also rotate values, each head's channels by themselves, together with the output projection
    (`ao_lab.calibration.heads`).

    kind "heads": only values and output projections, merged into weights and proved in the same way. Norm weights are not
    folded and tied heads stay tied, so it also supports models whose residual stream cannot be rotated.
    """

    kind: str = "block"
    size: int | None = None
    heads: bool = True

    def __post_init__(self) -> None:
        choice(self.kind, ("block", "offline", "heads"), "Rotate: kind")
        size = self.size
        if self.kind == "heads" and (size is not None or not self.heads):
            raise ValueError(
                f"Rotate: kind 'heads' rotates by a head's width; leave size and heads out, got {self!r}"
            )
        if self.offline and size is not None and (type(size) is not int or size < 2):
            raise ValueError(f"Rotate: size is an integer of 2 or more, or None; got {size!r}")
        if not self.offline and size is not None and (type(size) is not int or size < 2 or size & (size - 1)):
            raise ValueError(f"Rotate: size is a power of two, 2 or more, or None; got {size!r}")

    @property
    def offline(self) -> bool:
        """Whether rotations are merged into weights."""
        return self.kind != "block"

    needs_hessian: ClassVar[bool] = False

    @property
    def calibrates(self) -> bool:  # type: ignore[override]
        """Whether a batch proves it."""
        return self.offline

    def length(self, scheme: Scheme, columns: int) -> int | None:
        """Inputs of a block for a weight of so many columns; None where that does not divide them."""
        block = scheme.scale.block
        shared = block if isinstance(block, int) and block > 1 and not block & (block - 1) else None
        most = min(columns & -columns, 128)
        length = self.size or shared or most
        return None if length < 2 or columns % length else length


@dataclass(frozen=True)
class Smooth(Method):
    """Scales channels between layers to balance the ranges of activations and weights (Xiao et al., SmoothQuant, arXiv
    2211.10438).

    alpha: 0 to 1, the share of the activation range that moves into the weights. For schemes that quantize activations. Pairs
    of layers are found by experiment (`ao_lab.calibration.equivalence`); a pair that would make a weight worse than rounding is
    left.
    """

    alpha: float = 0.5

    def __post_init__(self) -> None:
        if isinstance(self.alpha, bool) or not 0 <= self.alpha <= 1:
            raise ValueError(f"Smooth: alpha is 0 to 1, got {self.alpha!r}; 0.5 is usual")


@dataclass(frozen=True)
class AWQ(Method):
    """Scales channels between layers so that those with large activations are rounded more finely (Lin et al., AWQ, arXiv
    2306.00978).

    ratios: how many powers of the mean magnitude of activations are tried; the one with the smallest output error of the layers
    that read them wins. Pairs of layers are found as for `Smooth`.
    """

    ratios: int = 20

    def __post_init__(self) -> None:
        if type(self.ratios) is not int or self.ratios < 1:
            raise ValueError(f"AWQ: ratios is an integer of at least 1, got {self.ratios!r}; 20 is usual")


@dataclass(frozen=True)
class Clip(Method):
    """Searches, for each block, the scale with the smallest weight error among those that the scheme can store.

    weights: "inputs" weighs the error of a column with the mean square of its activations (the diagonal of the Hessian); "none"
    weighs all columns equally, and needs no data. norm: the power of an element's error that is summed. Default: 2, or 3 if
    GPTQ follows, which compensates small errors but not the large ones of clipped weights. Scales are those of
    `reference.calibration.search_scales`. ValueError for a norm that is not a positive number.
    """

    weights: str = "inputs"
    norm: float | None = None

    def __post_init__(self) -> None:
        choice(self.weights, ("inputs", "none"), "Clip: weights")
        if self.norm is not None and (isinstance(self.norm, bool) or not 0 < self.norm < float("inf")):
            raise ValueError(
                f"Clip: norm is a positive number or None, 2 for squared errors; got {self.norm!r}"
            )

    @property
    def calibrates(self) -> bool:  # type: ignore[override]
        """Whether it weighs by inputs."""
        return self.weights == "inputs"

    @property
    def needs_hessian(self) -> bool:  # type: ignore[override]
        """Whether it weighs by inputs."""
        return self.calibrates


@dataclass(frozen=True)
class HQQ(Method):
    """Optimizes zero points, or scales of schemes without zero points, by half-quadratic splitting of |error|^p, without data
    (Badri, Shaji, 2023).

    For schemes with floating-point zero points, and for those without zero points (`reference.calibration.hqq`). It tolerates
    outliers, so its mean squared error may be larger than that of rounding; then rounding is kept.
    """

    calibrates: ClassVar[bool] = False
    needs_hessian: ClassVar[bool] = False
    steps: int = 20
    p: float = 0.7
    beta: float = 10.0


@dataclass(frozen=True)
class GPTQ(Method):
    """Rounds column by column, each compensating the errors of those before (Frantar et al., arXiv 2210.17323).

    Scales are those that an earlier method found, else those of `Clip()`; with plain amax scales the result is worse than
    rounding on text other than the calibration data. order: "activation" (columns with large activations first), "stored" or
    "groups"; the assignment of scales does not change. damping: added to the Hessian's diagonal, as a fraction of its mean;
    "held out" tries several and keeps the one with the smallest error on held-out tokens, 0.01 if there are none.
    """

    order: str = "activation"
    damping: float | str = HELD_OUT

    def __post_init__(self) -> None:
        choice(self.order, ORDERS, "GPTQ: order")
        number = isinstance(self.damping, (int, float)) and not isinstance(self.damping, bool)
        if self.damping != HELD_OUT and not (number and 0 <= float(self.damping) <= 1):
            raise ValueError(
                f"GPTQ: damping is {HELD_OUT!r} or a share of the Hessian's mean diagonal, 0 to 1; got {self.damping!r}"
            )


@dataclass(frozen=True)
class AutoRound(Method):
    """Rounding and ranges of a block's weights, learned by signed gradient descent on the block's output (arXiv 2309.05516).

    Starts from the result of the methods before it. steps: of signed gradient descent, with rates from 1 / steps down to 0.
    sequences: approximate number per step (whole batches). seed: of the order of batches. Needs memory for the block inputs of
    the original model as well as for those of the quantized one. Calls repeat bit for bit on one kind of device with the same
    versions, where the gradients of the model's operations do: torch's attention runs by kernels for which that holds.
    """

    needs_hessian: ClassVar[bool] = False
    steps: int = 200
    sequences: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "sequences"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"AutoRound: {name} is an integer of at least 1, got {value!r}")


@dataclass(frozen=True)
class LowRank(Method):
    """Adds a product of two thin matrices to a quantized weight, W ~ Q + L R, the best one for the layer's outputs.

    The error W - Q that the methods before it leave is approximated by a matrix of rank `rank`, weighted by the second moments
    of the layer's inputs (LQER, Zhang et al., arXiv 2402.02446; the closed form with all second moments: QERA, Zhang et al.,
    arXiv 2410.06040; without them: LoRC of ZeroQuant-V2, Yao et al., arXiv 2303.08302). rank: 1 or more; 32 adds
    about a bit to each weight of a layer of 1024 by 1024, a quarter of one of 4096 by 4096. dtype: of L (N, rank) and R
    (rank, K), "bfloat16" or "float16". They multiply the inputs as these come, not quantized ones (`LowRankLinear`), and do not
    train. A layer that is no nn.Linear of its own weight, or whose factors would be as large as its dense weight, gets none;
    the report says so. Layout "ao_lab" holds them. The mathematics: `reference.calibration.low_rank_residual`.
    """

    rank: int = 32
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise ValueError(f"LowRank: rank is an integer of at least 1, got {self.rank!r}; 32 is usual")
        choice(self.dtype, ("bfloat16", "float16"), "LowRank: dtype")


@dataclass(frozen=True)
class BiasCorrection(Method):
    """Corrects the bias for the change of the mean output by quantization; layers without a bias are unchanged."""

    needs_hessian: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """Its name."""
        return "bias"


@dataclass(frozen=True)
class StaticKV(Method):
    """Static scales of keys and values for an 8-bit KV cache, observed at the attention call with the block's quantized
    weights.

    per: "head" or "tensor". element: what the cache stores, "float8_e4m3fn" or "int8". Weights are not changed; the scales stay
    with the model and are saved with it (`ao_lab.kv_cache.static_scales`).
    """

    needs_hessian: ClassVar[bool] = False
    per: str = "head"
    element: str = "float8_e4m3fn"

    def __post_init__(self) -> None:
        choice(self.per, ("head", "tensor"), "StaticKV: per")
        choice(self.element, ("float8_e4m3fn", "int8"), "StaticKV: element")

    @property
    def name(self) -> str:
        """Its name."""
        return "kv"


#: In the order in which they are applied.
ORDER: tuple[type[Method], ...] = (
    Rotate, Smooth, AWQ, Clip, HQQ, GPTQ, AutoRound, LowRank, BiasCorrection, StaticKV,
)  # fmt: skip
#: By their names on the command line.
METHODS: dict[str, type[Method]] = {kind().name: kind for kind in ORDER}
#: Methods that do the same, of which a weight can have one.
EXCLUSIVE: tuple[tuple[type[Method], ...], ...] = ((Smooth, AWQ), (Clip, HQQ), (AutoRound, BiasCorrection))
#: What does not go together, and why.
INCOMPATIBLE: dict[tuple[type[Method], type[Method]], str] = {
    (
        AutoRound,
        LowRank,
    ): "AutoRound learns the weights of a block after those of each layer have got their residuals; give "
    "LowRank with GPTQ",
}


def ordered(methods: Any) -> tuple[Method, ...]:
    """Methods in the order of their application: records, their classes, names, or names with options: "gptq damping=0.01".

    TypeError or ValueError for anything else, for two of a class, and for two that exclude each other.
    """
    if isinstance(methods, (str, Method, type)) or not isinstance(methods, Iterable):
        raise TypeError(f"methods is a tuple such as (Clip(), GPTQ()), got {methods!r:.60}")
    records = [_record(method) for method in methods]
    kinds = [type(record) for record in records]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise ValueError(f"methods has {kind.__name__} twice; give each method once")
    for group in EXCLUSIVE:
        both = [kind.__name__ for kind in group if kind in kinds]
        if len(both) > 1:
            raise ValueError(f"methods: {' and '.join(both)} do the same in different ways; give one of them")
    for pair, why in INCOMPATIBLE.items():
        if all(kind in kinds for kind in pair):
            raise ValueError(
                f"methods: {' and '.join(kind.__name__ for kind in pair)} do not go together: {why}"
            )
    return tuple(sorted(records, key=lambda record: ORDER.index(type(record))))


def _record(method: Any) -> Method:
    """A method's record; of its class, or of its name, the default one."""
    if isinstance(method, str):
        return named_method(method)
    if isinstance(method, type) and issubclass(method, Method):
        method = method()
    if type(method) not in ORDER:
        raise TypeError(
            f"methods holds records such as {', '.join(f'{kind.__name__}()' for kind in ORDER)}, got {method!r:.60}"
        )
    return method  # type: ignore[no-any-return]


def named_method(text: str) -> Method:
    """The record of "NAME" or of "NAME option=value ...": "gptq damping=0.01". Values are JSON where they are that, else text.

    ValueError for a name or an option that there is not, with those that there are, and for a value that the method refuses.
    """
    try:
        name, *given = shlex.split(text) or [text]
    except ValueError as error:
        raise ValueError(f"method {text!r}: write NAME, or 'NAME option=value ...' ({error})") from error
    kind = lookup(name, METHODS, "method")
    options = {}
    for one in given:
        key, equals, value = one.partition("=")
        _check_option(name, kind, key, equals)
        options[key] = _value(value)
    try:
        return kind(**options)
    except TypeError as error:
        raise ValueError(f"method {text!r}: {error}") from error


def _check_option(name: str, kind: type[Method], key: str, equals: str) -> None:
    """ValueError, with a method's options and their defaults, for one that it lacks or that has no value."""
    there = {one.name: one.default for one in fields(kind)}
    if key in there and equals:
        return
    if not there:
        raise ValueError(f"method {name} takes no options, got {key}{equals}; leave it out")
    defaults = ", ".join(f"{one}={json.dumps(default)}" for one, default in there.items())
    near = nearest_names(key, there)
    wrong = f"has no option {key}" if equals else f"is followed by option=value, got {key}"
    raise ValueError(
        f"method {name} {wrong}{told_nearest(near)}; it has {defaults}: "
        f"'{name} {near[0] if near else next(iter(there))}=...'"
    )


def _written(value: Any) -> str:
    """A value as a shell's word has it: text without quotes, unless it would be read as something else."""
    plain = isinstance(value, str) and _value(value) == value
    return shlex.quote(value if plain else json.dumps(value))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def of_kind(methods: Iterable[Method], kind: type[Method]) -> Any:
    """The method of a class; None where it is not among them."""
    return next((method for method in methods if isinstance(method, kind)), None)


__all__ = [
    "AWQ",
    "GPTQ",
    "HQQ",
    "AutoRound",
    "BiasCorrection",
    "Clip",
    "LowRank",
    "Rotate",
    "Smooth",
    "StaticKV",
    "named_method",
    "ordered",
]
