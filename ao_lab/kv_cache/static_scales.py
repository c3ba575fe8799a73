"""Static scales of keys and values: a record with the model, and tensors and a scheme in its files.

`ao_lab.calibration.cache_scales` finds them. A model has them by the names of its attention modules (`cache_scales(model)`).
Files have `NAME.k_scale` and `NAME.v_scale`, (1,) for all heads together or (heads, 1, 1), and config.json has the
`kv_cache_scheme` of compressed-tensors, by which vLLM and plain transformers store their caches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from reference.formats.formats import format_of

#: Where a model keeps its scales.
ATTRIBUTE = "ao_lab_cache_scales"
#: Elements of caches by compressed-tensors' type and number of bits; what has a scale by its strategy.
ELEMENTS: Mapping[Any, str] = {("float", 8): "float8_e4m3fn", ("int", 8): "int8"}
STRATEGIES: Mapping[Any, str] = {"tensor": "tensor", "attn_head": "head"}


@dataclass(frozen=True)
class CacheScales:
    """Of one attention module: what a cache divides keys and values by, float32 (heads,), or (1,) for all heads together.

    element: what the cache stores, a format's name. per: "head" or "tensor".
    """

    k: torch.Tensor
    v: torch.Tensor
    element: str
    per: str

    def __str__(self) -> str:
        ends = [f"{float(x.min()):.3g} to {float(x.max()):.3g}" for x in (self.k, self.v)]
        return f"scales of a {self.element} cache a {self.per}: keys {ends[0]}, values {ends[1]}"


def cache_scales(model: nn.Module) -> dict[str, CacheScales]:
    """The static scales of a model's keys and values by the names of its attention modules; {} where none were found."""
    return dict(getattr(model, ATTRIBUTE, {}))


def remember_scales(model: nn.Module, found: Mapping[str, CacheScales]) -> None:
    """Keep scales with a model."""
    object.__setattr__(model, ATTRIBUTE, {**getattr(model, ATTRIBUTE, {}), **found})


def cache_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What files hold: (1,) for a tensor, (heads, 1, 1) for heads, as compressed-tensors has them."""
    found = {}
    for name, one in cache_scales(model).items():
        for part in ("k", "v"):
            x = getattr(one, part)
            found[f"{name}.{part}_scale"] = x if one.per == "tensor" else x[:, None, None]
    return found


def cache_scheme_fields(model: nn.Module) -> dict[str, Any] | None:
    """`kv_cache_scheme` of compressed-tensors; None where a model has no scales, ValueError where they are of several kinds."""
    one = next(iter(cache_scales(model).values()), None)
    kinds = {(other.element, other.per) for other in cache_scales(model).values()}
    if len(kinds) > 1:
        raise ValueError(
            f"the scales of keys and values are of {len(kinds)} kinds, {sorted(kinds)}, and a folder says one of all: give the "
            f"same StaticKV in each call"
        )
    if one is None:
        return None
    fmt = format_of(one.element)
    return {
        "num_bits": fmt.bits, "type": fmt.kind, "strategy": next(s for s, per in STRATEGIES.items() if per == one.per),
        "symmetric": True, "dynamic": False, "observer": "static_minmax", "observer_kwargs": {},
    }  # fmt: skip


def cache_scheme_of(fields: Any) -> tuple[str, str] | None:
    """Element and `per` of a `kv_cache_scheme`; None for one that is dynamic, asymmetric or of another kind."""
    if not isinstance(fields, Mapping) or fields.get("dynamic") or fields.get("symmetric") is False:
        return None
    element = ELEMENTS.get((fields.get("type"), fields.get("num_bits")))
    per = STRATEGIES.get(fields.get("strategy"))
    return None if element is None or per is None else (element, per)


def read_cache_scales(tensors: Mapping[str, torch.Tensor], fields: Any) -> dict[str, CacheScales]:
    """Scales of a folder by the names of attention modules; {} for a `kv_cache_scheme` of another kind.

    tensors: those of names that end with k_scale and v_scale. fields: the folder's kv_cache_scheme.
    """
    scheme = cache_scheme_of(fields)
    if scheme is None:
        return {}
    paths = [name.removesuffix(".k_scale") for name in tensors if name.endswith(".k_scale")]
    pairs = {path: (tensors[f"{path}.k_scale"], tensors.get(f"{path}.v_scale")) for path in paths}
    return {
        path: CacheScales(k.float().reshape(-1), v.float().reshape(-1), *scheme)
        for path, (k, v) in pairs.items()
        if v is not None
    }


__all__ = ["CacheScales", "cache_scales"]
