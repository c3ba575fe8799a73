"""The rungs: which levers are on. A configuration is a record; its name is the method of its rows.

Levers, in the order of the ladder: attention (the library's fused one in place of "eager"), compilation with a cache of fixed
length, CUDA graphs, weights in 8 or 4 bits, keys and values by a recipe of `ao_lab.KVCache` with its attention, and
self-speculation. Each rung of `LADDER` adds to the one before; `ALONE` has one lever on the first rung, `LEFT_OUT` all of the
largest set without speculation but one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, kw_only=True)
class Levers:
    """What is on. weights: "", "int8", "int4" or "fp8" (inputs too); cache: "" or a recipe of `ao_lab.KVCache`."""

    attention: bool = False
    compiled: bool = False
    graphs: bool = False
    weights: str = ""
    cache: str = ""
    speculation: bool = False

    @property
    def fixed(self) -> bool:
        """Whether the cache has a fixed length, which all but the first two rungs need."""
        return bool(self.compiled or self.graphs or self.cache)

    @property
    def name(self) -> str:
        """The method of its rows."""
        words = [
            f"attention over {'' if self.cache == 'bfloat16' else self.cache + ' '}cache" if self.cache
            else "fused attention" if self.attention else "eager",
            "compiled" * self.compiled,
            "graphs" * self.graphs,
            self.weights,
            "self-speculation" * self.speculation,
        ]  # fmt: skip
        return ", ".join(filter(None, words))

    @property
    def plain(self) -> Levers:
        """The same weights by fused attention, eagerly: what outputs are compared with."""
        return Levers(attention=True, weights=self.weights)

    @property
    def on(self) -> tuple[str, ...]:
        """Names of the levers that are on."""
        return tuple(one.name for one in fields(self) if getattr(self, one.name))


EAGER = Levers()
GRAPHS = Levers(attention=True, compiled=True, graphs=True)
INT4 = replace(GRAPHS, weights="int4")
FULL = replace(INT4, cache="fp8")
LADDER = (
    EAGER,
    Levers(attention=True),
    replace(GRAPHS, graphs=False),
    GRAPHS,
    replace(GRAPHS, weights="int8"),
    INT4,
    replace(INT4, cache="bfloat16"),
    FULL,
    replace(FULL, speculation=True),
)
ALONE = {
    "attention": Levers(attention=True),
    "compiled": Levers(compiled=True),
    "graphs": Levers(graphs=True),
    "int8": Levers(weights="int8"),
    "int4": Levers(weights="int4"),
    "cache, bfloat16": Levers(cache="bfloat16", attention=True),
    "cache, fp8": Levers(cache="fp8", attention=True),
    "self-speculation": Levers(speculation=True, cache="bfloat16", attention=True),
}
LEFT_OUT = {
    "compiled": replace(FULL, compiled=False),
    "graphs": replace(FULL, graphs=False),
    "weights": replace(FULL, weights=""),
    "cache": replace(FULL, cache=""),
}


def configurations(weights: tuple[str, str] = ("int8", "int4")) -> list[Levers]:
    """All of them once, with a model's own weights in 8 and in 4 bits, those with the same weights together."""
    every = [of_model(one, weights) for one in (*LADDER, *ALONE.values(), *LEFT_OUT.values())]
    order = ("", *weights)
    return sorted(dict.fromkeys(every), key=lambda one: order.index(one.weights))


def ladder(weights: tuple[str, str] = ("int8", "int4")) -> list[Levers]:
    """The rungs of a model."""
    return [of_model(one, weights) for one in LADDER]


def of_model(levers: Levers, weights: tuple[str, str]) -> Levers:
    """The configuration with a model's own weights in 8 and in 4 bits."""
    own = {"": "", "int8": weights[0], "int4": weights[1]}
    return replace(levers, weights=own.get(levers.weights, levers.weights))
