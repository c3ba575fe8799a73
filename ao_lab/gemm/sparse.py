"""Where kernels of weights in 2:4 storage enter `ao_lab.gemm.select.PRODUCTS`: a module of each, imported by
`ao_lab.tensor.sparse`.

Each is one `Kernel`, which refuses dense weights (`w.meta.layout != "2:4"`), so that those are chosen among the others as
before.
"""

from __future__ import annotations

from ao_lab.gemm.select import PRODUCTS, Kernel


def enter(name: str, kernel: Kernel, *, before: str | None = None) -> None:
    """Add a kernel: behind all others, where `ao_lab.tune` alone chooses it, or `before` one, to be the default in its place.

    A name that is there already stays. KeyError where `before` names no kernel.
    """
    if name in PRODUCTS:
        return
    names = list(PRODUCTS)
    place = len(names) if before is None else names.index(before) if before in PRODUCTS else -1
    if place < 0:
        raise KeyError(f"no kernel is called {before!r}; there are {', '.join(names)}")
    later = {one: PRODUCTS.pop(one) for one in names[place:]}
    PRODUCTS[name] = kernel
    PRODUCTS.update(later)


__all__ = ["enter"]
