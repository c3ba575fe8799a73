"""`Recipe`: in which scheme each operand of the three matrix products of a linear layer is quantized.

With inputs x (M, K), a weight w (N, K) and the output's gradient g (M, N), each product is a @ b.T of two matrices whose last
axis is the one that the sum runs over, and along which blocks run:

    product       a          b          sum over
    output        x   (M, K) w   (N, K) K
    input_grad    g   (M, N) w.T (K, N) N
    weight_grad   g.T (N, M) x.T (K, M) M

So a training step quantizes every tensor twice, along two axes, unless its scheme's blocks are the same along both (one scale
for the tensor, square blocks).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from reference.arrays.errors import choice, lookup
from reference.schemes.schemes import Scheme

#: Every recipe by name. `reference.training.recipes` fills it.
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
        raise ValueError(f"unknown recipe {recipe!r}; there are {', '.join(RECIPES)}")
    return lookup(recipe, RECIPES, "recipe")
