"""`Recipe`: in which scheme each operand of the three matrix products of a linear layer is quantized.

With inputs x (M, K), a weight w (N, K) and the output's gradient g (M, N), each product is a @ b.T of two matrices whose last
axis is the one that the sum runs over, and along which blocks run:

    product       a          b          sum over
    output        x   (M, K) w   (N, K) K
    input_grad    g   (M, N) w.T (K, N) N
    weight_grad   g.T (N, M) x.T (K, M) M

So a training step quantizes every tensor twice, along two axes, unless its scheme's blocks are the same along both (one scale
for the tensor, square blocks).

`RECIPES` has them by name:

* ``tensorwise``: one scale per tensor; e4m3, the output's gradient e5m2 (torchao; Transformer Engine's current scaling).
* ``rowwise``: one power of two per row along the sum, e4m3 throughout (torchao's rowwise).
* ``rowwise_with_gw_hp``: the same, the weight gradient in the tensor's own dtype, the weight of the input's gradient with one
  power of two (torchao's).
* ``blockwise``: blocks of 128 for inputs and gradients, of 128 x 128 for weights, powers of two (DeepSeek-V3, arXiv 2412.19437,
  section 3.3, whose scales are powers of two for some layers alone; Transformer Engine's block scaling, for all).
* ``mxfp8``: blocks of 32 with e8m0 scales rounded up, e4m3 throughout (arXiv 2506.08027).
* ``mxfp6``: the same blocks, e2m3, and e3m2 for the output's gradient, which has the wider range (arXiv 2310.10537, section 5,
  trains with e3m2 throughout and scales rounded down).
* ``mxfp4``: e2m1 in blocks of 32; both operands of both gradients are rounded stochastically, with draws of their own, behind a
  randomized Hadamard transform over 32 elements (arXiv 2502.20586, which keeps the output in 16 bits and mixes 64 elements).
* ``nvfp4``: e2m1 in blocks of 16, weights 16 x 16, under a scale per tensor; the output's gradient is rounded stochastically,
  the weight gradient is taken behind a Hadamard transform over 16 elements (arXiv 2509.25149, section 4; Transformer Engine).
* ``bf16``: nothing quantized.

Scales follow the rules of the default schemes (`reference.schemes.schemes`) instead of those of each source:

* Zeros and small gradients. A source replaces a largest magnitude below 1e-12 (torchao) or 1e-4 (DeepGEMM) by that, or the
  scale of zeros by 1 (Transformer Engine); here scales go down to 2**-126, so that gradients times 1e-8 keep their precision.
* NaN and infinity make their block NaN, and no other.
* Powers of two are rounded up, so that nothing saturates. torchao rounds its encoding scale, the reciprocal, down: the same
  codes, but where its float32 logarithm errs just below a power of two.
* Stochastic rounding is unbiased only where the largest element does not saturate. arXiv 2502.20586 rounds e8m0 scales down,
  multiplies elements by 3/4 and the product by 16/9, which puts a block's largest element into [3, 6); with scales rounded up
  it lies in (3, 6] at once. In ``nvfp4`` the scale is rounded to nearest in e4m3, so that a block's largest element may stop
  at 6, as in its sources: up to 1/17 of it is lost, and up to 1/3 where the scale is subnormal.
* The signs of the Hadamard transform are constant, as Transformer Engine's are; torchao draws them once a layer.

To compare with a source's bits, put its schemes into a recipe by `dataclasses.replace`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from reference.arrays.namespace import and_nearest, choice, lookup
from reference.schemes.schemes import POWER_RULES, SCHEMES, Scheme

#: Every recipe by name, filled below.
RECIPES: dict[str, Recipe] = {}
PRODUCTS = ("output", "input_grad", "weight_grad")
PLACES = tuple(f"{product}.{side}" for product in PRODUCTS for side in "ab")
#: "fast": the tensor core's own accumulator over all of the sum. "precise": its partial sums over 128 elements are added in
#: float32 (DeepSeek-V3, arXiv 2412.19437, section 3.3.2; cuBLAS without `use_fast_accum`).
ACCUMULATIONS = ("fast", "precise")


@dataclass(frozen=True, kw_only=True)
class Operand:
    """How one operand of one product is quantized."""

    #: None: not at all, in the tensor's own dtype.
    scheme: Scheme | None = None
    #: Length of the blocks that a randomized Hadamard transform mixes before they are quantized; 0: none. Both operands of a
    #: product have the same one, since it cancels in their product alone.
    hadamard: int = 0
    #: "tensor": from the tensor itself. "output": from what the output's operand of the same tensor dequantizes to, so that
    #: only that one is kept until backward (w.T and x.T alone). With powers of two as scales the values are those of the
    #: tensor itself wherever both roundings keep the element's full precision; they differ among its subnormals alone.
    source: str = "tensor"

    def __post_init__(self) -> None:
        choice(self.source, ("tensor", "output"), "source")
        if self.hadamard < 0 or self.hadamard & (self.hadamard - 1):
            raise ValueError(f"hadamard is 0 or a power of two, got {self.hadamard!r}")

    @property
    def is_stochastic(self) -> bool:
        """Whether it takes random bits."""
        return self.scheme is not None and self.scheme.rounding == "stochastic"

    def serves_transposed(self, backward: Operand) -> bool:
        """Whether the codes and scales of this operand, transposed, are those of `backward`, an operand of the transposed
        matrix: one scale for the tensor or square blocks, the same scheme, nothing mixed or drawn."""
        if self.scheme is None or self.scheme != backward.scheme or self.is_stochastic:
            return False
        block = self.scheme.scale.block
        square = block == "tensor" or (isinstance(block, tuple) and block[0] == block[1])
        return square and not self.hadamard and not backward.hadamard


@dataclass(frozen=True, kw_only=True)
class Product:
    """Both operands of a product, and how its sums are accumulated."""

    a: Operand = Operand()
    b: Operand = Operand()
    accumulation: str = "precise"

    def __post_init__(self) -> None:
        choice(self.accumulation, ACCUMULATIONS, "accumulation")
        if self.a.hadamard != self.b.hadamard:
            raise ValueError(
                f"both operands of a product have one Hadamard transform, got {self.a.hadamard} and {self.b.hadamard}"
            )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """See the module text. Bias and its gradient are in high precision."""

    name: str
    output: Product = Product()
    input_grad: Product = Product()
    weight_grad: Product = Product()
    #: Where it comes from, and where it differs from that.
    note: str = ""

    def __post_init__(self) -> None:
        """ValueError for codes of the output that backward cannot start from."""
        object.__setattr__(self, "_stochastic", any(operand.is_stochastic for operand in self.operands))
        plain = all(op.scheme is None and not op.hadamard for op in self.operands)
        object.__setattr__(self, "_dense", plain)
        taken = {"input_grad.b": self.output.b, "weight_grad.b": self.output.a}
        for place, operand in zip(PLACES, self.operands, strict=True):
            if operand.source == "output" and place not in taken:
                raise ValueError(
                    f"{place} of {self.name}: source 'output' is for {' and '.join(taken)}; use 'tensor'"
                )
            first = taken.get(place)
            if first is not None and operand.source == "output" and (first.hadamard or first.is_stochastic):
                raise ValueError(
                    f"{place} of {self.name}: codes of the output that are mixed or rounded stochastically do not serve "
                    f"backward; use source 'tensor'"
                )
        object.__setattr__(self, "_key", f"{self.name}-{self._digest()}")

    def _digest(self) -> str:
        """Twelve hexadecimal digits of all that decides bits: the products, without name and note."""
        facts = [(op.scheme.key if op.scheme else "", op.hadamard, op.source) for op in self.operands]
        sums = [getattr(self, product).accumulation for product in PRODUCTS]
        return hashlib.sha256(repr((facts, sums)).encode()).hexdigest()[:12]

    @property
    def key(self) -> str:
        """The name and a digest of the products: a record that was changed under an old name has another key."""
        return self._key  # type: ignore[attr-defined, no-any-return]

    @property
    def is_dense(self) -> bool:
        """Whether no operand is quantized or mixed: the layer is a plain one."""
        return self._dense  # type: ignore[attr-defined, no-any-return]

    def __repr__(self) -> str:
        return f"Recipe({self.name})"

    @property
    def is_stochastic(self) -> bool:
        """Whether some operand is rounded stochastically, so that a step needs random bits."""
        return self._stochastic  # type: ignore[attr-defined, no-any-return]

    @property
    def operands(self) -> tuple[Operand, ...]:
        """x, w, g, w.T, g.T and x.T, in the order of the products."""
        return tuple(
            op
            for product in (self.output, self.input_grad, self.weight_grad)
            for op in (product.a, product.b)
        )


def recipe_of(recipe: str | Recipe) -> Recipe:
    """The recipe of a name; a record passes through. Unknown names raise ValueError with all names there are."""
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str) and recipe not in RECIPES:
        raise ValueError(
            f"unknown recipe {recipe!r}{and_nearest(recipe, RECIPES)}; there are {', '.join(RECIPES)}"
        )
    return lookup(recipe, RECIPES, "recipe")


def power_of_two(scheme: Scheme) -> Scheme:
    """The scheme with scales rounded up to powers of two, so that codes along one axis requantize along the other."""
    return replace(scheme, name=f"{scheme.name}_pow2", scale=replace(scheme.scale, rule="ratio_pow2"))


def stochastic(scheme: Scheme) -> Scheme:
    """The scheme with elements rounded stochastically."""
    return replace(scheme, name=f"{scheme.name}_stochastic", rounding="stochastic")


def recipe(
    name: str, x: Operand, w: Operand, g: Operand, w_t: Operand, g_t: Operand, x_t: Operand, note: str, *, output: str = "fast",
    gradients: str = "precise",
) -> Recipe:  # fmt: skip
    """The record of six operands, in the order of the products."""
    return Recipe(
        name=name,
        output=Product(a=x, b=w, accumulation=output),
        input_grad=Product(a=g, b=w_t, accumulation=gradients),
        weight_grad=Product(a=g_t, b=x_t, accumulation=gradients),
        note=note,
    )


def uniform(name: str, value: Operand, gradient: Operand, note: str, **accumulation: str) -> Recipe:
    """One operand for inputs and weights, one for the output's gradient."""
    return recipe(name, value, value, gradient, value, gradient, value, note, **accumulation)


def saving_codes(base: Recipe) -> Recipe:
    """The recipe that keeps the input's codes and scales from the output to the weight gradient, instead of the input.

    For scales that are powers of two (`Operand.source`; of normally distributed inputs less than a hundredth of a percent of
    the values change). Its name ends in "_codes". Other recipes come back as they are, and so do those whose weight gradient is
    in high precision, which would be lost.
    """
    forward, backward = base.output.a, base.weight_grad.b
    if forward.scheme is None or backward.scheme is None:
        return base
    if forward.scheme.scale.rule not in (*POWER_RULES, "ratio_pow2"):
        return base
    weight_grad = replace(base.weight_grad, b=replace(backward, source="output"))
    return replace(base, name=f"{base.name}_codes", weight_grad=weight_grad)


def _float8() -> list[Recipe]:
    tensor, tensor_grad = (Operand(scheme=SCHEMES[n]) for n in ("fp8_tensorwise", "fp8_tensorwise_e5m2"))
    row, whole, block, square = (
        Operand(scheme=power_of_two(SCHEMES[f"fp8_{n}"]))
        for n in ("rowwise", "tensorwise", "1x128", "128x128")
    )
    high = Operand()
    return [
        uniform("tensorwise", tensor, tensor_grad, "torchao tensorwise; TE Float8CurrentScaling"),
        uniform("rowwise", row, row, "torchao rowwise"),
        recipe("rowwise_with_gw_hp", row, row, row, whole, high, high, "torchao rowwise_with_gw_hp"),
        recipe(
            "blockwise", block, square, block, square, block, block, "DeepSeek-V3; TE Float8BlockScaling", output="precise"
        ),
    ]  # fmt: skip


def _microscaling() -> list[Recipe]:
    e4m3, e2m3, e3m2, e2m1 = (
        Operand(scheme=SCHEMES[f"{n}_rceil"]) for n in ("mxfp8_e4m3", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4")
    )
    drawn = Operand(scheme=stochastic(SCHEMES["mxfp4_rceil"]), hadamard=32)
    return [
        uniform("mxfp8", e4m3, e4m3, "arXiv 2506.08027"),
        uniform("mxfp6", e2m3, e3m2, "arXiv 2310.10537, section 5, with e2m3 for inputs and weights"),
        recipe("mxfp4", e2m1, e2m1, drawn, drawn, drawn, drawn, "arXiv 2502.20586, its output in MXFP4 too"),
    ]


def _nvfp4() -> Recipe:
    base = SCHEMES["nvfp4"]
    x = Operand(scheme=base)
    square = Operand(scheme=replace(base, name="nvfp4_16x16", scale=replace(base.scale, block=(16, 16))))
    g = Operand(scheme=stochastic(base))
    return recipe(
        "nvfp4", x, square, g, square, replace(g, hadamard=16), replace(x, hadamard=16), "arXiv 2509.25149, section 4"
    )  # fmt: skip


RECIPES.update(
    (record.name, record)
    for record in (Recipe(name="bf16", note="nothing quantized"), *_float8(), *_microscaling(), _nvfp4())
)
