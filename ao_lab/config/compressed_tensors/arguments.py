"""QuantizationArgs of compressed-tensors for the scheme of a weight or of an input."""

from __future__ import annotations

from typing import Any

from reference import Scheme

#: Storage of scales as compressed-tensors names it; float32 is its default.
SCALE_DTYPES = {"float8_e8m0fnu": "torch.uint8", "float8_e4m3fn": "torch.float8_e4m3fn"}


def weight_arguments(scheme: Scheme) -> dict[str, Any]:
    """QuantizationArgs of a weight."""
    return {**_arguments(scheme, "channel"), "dynamic": False}


def input_arguments(scheme: Scheme, static: bool) -> dict[str, Any]:
    """QuantizationArgs of an input; ValueError for a scheme that compressed-tensors' readers do not compute."""
    scale = scheme.scale
    if scheme.outer is not None or isinstance(scale.block, tuple) or scale.flat_size:
        raise ValueError(f"compressed-tensors does not quantize inputs in {scheme.name} as they come")
    return {**_arguments(scheme, "token"), "dynamic": not static}


def _arguments(scheme: Scheme, row: str) -> dict[str, Any]:
    block, fmt = scheme.scale.block, scheme.format
    if fmt.kind not in ("int", "float") or fmt.fraction_bits:
        raise ValueError(f"compressed-tensors has no elements {fmt.name}")
    if fmt.kind == "float" and fmt.name not in ("float8_e4m3fn", "float6_e2m3fn", "float4_e2m1fn"):
        raise ValueError(f"compressed-tensors has no elements {fmt.name}")
    strategy = {"-1": row, "tensor": "tensor"}.get(
        str(block), "block" if isinstance(block, tuple) else "group"
    )
    result: dict[str, Any] = {
        "num_bits": fmt.bits,
        "type": fmt.kind,
        "symmetric": scheme.zero is None,
        "strategy": "tensor_group" if scheme.outer is not None else strategy,
        "group_size": block if strategy == "group" else None,
        "block_structure": list(block) if isinstance(block, tuple) else None,
    }
    storage = SCALE_DTYPES.get(scheme.scale.storage)
    return result if storage is None else {**result, "scale_dtype": storage, "zp_dtype": storage}


__all__ = ["input_arguments", "weight_arguments"]
