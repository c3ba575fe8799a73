"""A call of every public function of `fast`, on tensors made for some rows and a device, for `tests.support.situations`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import fast
from reference import SCHEMES, Quantized

K = 64
#: Rows of a matrix with more than 2**31 elements.
MANY = 2**31 // K + 64
STORED = ("codes", "scale", "outer", "zero")
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Example:
    """A call. make: its tensors for some rows on a device. gradients: the operands that it has a gradient for."""

    make: Callable[[int, str], Tensors]
    call: Callable[[Any, Tensors], Any]
    gradients: tuple[str, ...] = ()
    rows: int = 8
    #: Whether a GPU gives the bits of a CPU; sums of floats are made in another order there.
    exact: bool = True


def normals(
    rows: int, device: str, seed: int = 0, dtype: torch.dtype = torch.float32, length: int = K
) -> torch.Tensor:
    """Reproducible values; nothing where there is no memory."""
    if device == "meta":
        return torch.empty(rows, length, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, length, generator=generator).to(dtype).to(device)


def codes(rows: int, device: str) -> torch.Tensor:
    """uint8 codes of 4 bits."""
    if device == "meta":
        return torch.empty(rows, K, dtype=torch.uint8, device=device)
    return (torch.arange(rows * K, dtype=torch.int32) % 16).to(torch.uint8).view(rows, K).to(device)


def weight(name: str, device: str, seed: int = 3, rows: int = 32) -> Tensors:
    """The parts of a stored weight."""
    q = fast.quantize(normals(rows, device, seed), name, packed=SCHEMES[name].format.bits < 8)
    return {part: t for part in STORED if (t := getattr(q, part)) is not None}


def stored(name: str, tensors: Tensors, rows: int = 32, end: str = "") -> Quantized:
    """A weight of its parts."""
    parts = [tensors.get(part + end) for part in STORED]
    scheme = SCHEMES[name]
    return Quantized(*parts, (rows, K), 1, scheme, scheme.format.bits < 8)


def two_weights(name: str, device: str) -> Tensors:
    """The parts of two."""
    second = {f"{part}2": t for part, t in weight(name, device, 4).items()}
    return {**weight(name, device), **second}


def words(rows: int, device: str) -> torch.Tensor:
    """Random bits."""
    if device == "meta":
        return torch.empty(rows, K, dtype=torch.uint32, device=device)
    return (torch.arange(rows * K, dtype=torch.int32) * 747796405).view(torch.uint32).view(rows, K).to(device)


def numbers(count: int, device: str, step: int, limit: int) -> torch.Tensor:
    """Integers from 0, each `step` more than the one before, below a limit."""
    if device == "meta":
        return torch.empty(count, dtype=torch.int64, device=device)
    return (torch.arange(count) * step % limit).to(device)


def rows_of(t: torch.Tensor) -> int:
    """Rows of a matrix, of nested tensors those of each."""
    return 8 if getattr(t, "is_nested", False) else t.shape[0]


def row_scales(rows: int, device: str) -> torch.Tensor:
    """A scale for each row."""
    return torch.full((rows, 1), 0.03125, device=device)


def bf16(rows: int, device: str, seed: int = 0) -> torch.Tensor:
    """`normals` in bfloat16."""
    return normals(rows, device, seed, torch.bfloat16)


DRAWN = replace(SCHEMES["mxfp8_e4m3"], name="drawn", rounding="stochastic")
ASYMMETRIC, INT4, INT8 = "int8_rowwise_asymmetric", "int4_g32", "int8_rowwise"
EXAMPLES: dict[str, Example] = {
    "choose_scales": Example(lambda n, d: {"x": normals(n, d)}, lambda f, t: f.choose_scales(t["x"], "mxfp8_e4m3")),
    "quantize": Example(lambda n, d: {"x": normals(n, d)}, lambda f, t: f.quantize(t["x"], "nvfp4", packed=True)),
    "quantize, given": Example(
        lambda n, d: {"x": normals(n, d), "scale": row_scales(n, d)},
        lambda f, t: f.quantize(t["x"], "fp8_rowwise", scales=t["scale"]),
    ),
    "quantize, drawn": Example(
        lambda n, d: {"x": bf16(n, d), "random_bits": words(n, d)},
        lambda f, t: f.quantize(t["x"], DRAWN, random_bits=t["random_bits"]),
    ),
    "dequantize": Example(
        lambda n, d: {"codes": codes(n, d), "scale": row_scales(n, d)},
        lambda f, t: f.dequantize(
            Quantized(t["codes"], t["scale"], None, None, (rows_of(t["codes"]), K), 1, SCHEMES["fp8_rowwise"])
        ),
    ),
    "fake_quantize": Example(
        lambda n, d: {"x": normals(n, d)}, lambda f, t: f.fake_quantize(t["x"], "mxfp8_e4m3"), ("x",)
    ),
    "fake_quantize, given": Example(
        lambda n, d: {"x": normals(n, d), "scale": row_scales(n, d)},
        lambda f, t: f.fake_quantize(t["x"], "int8_rowwise", scales=t["scale"]),
        ("x", "scale"),
    ),
    "fake_quantize_vjp": Example(
        lambda n, d: {"g": normals(n, d, 1), "x": normals(n, d), "scale": row_scales(n, d)},
        lambda f, t: f.fake_quantize_vjp(t["g"], t["x"], "int8_rowwise", scales=t["scale"]),
    ),
    "quantize_both": Example(
        lambda n, d: {"x": bf16(n, d)}, lambda f, t: f.quantize_both(t["x"], "mxfp8_e4m3"), rows=64
    ),
    "quantize_both, given": Example(
        lambda n, d: {"x": bf16(n, d), "scale": row_scales(1, d).view(()), "scale2": 2 * row_scales(1, d).view(())},
        lambda f, t: f.quantize_both(t["x"], "fp8_tensorwise", scales=[t["scale"], t["scale2"]], packed=True), rows=64,
    ),
    "encode": Example(lambda n, d: {"x": normals(n, d)}, lambda f, t: f.encode(t["x"], "float6_e3m2fn")),
    "encode, drawn": Example(
        lambda n, d: {"x": normals(n, d), "random_bits": words(n, d)},
        lambda f, t: f.encode(t["x"], "bfloat16", rounding="stochastic", random_bits=t["random_bits"]),
    ),
    "decode": Example(lambda n, d: {"codes": codes(n, d)}, lambda f, t: f.decode(t["codes"], "float8_e4m3fn")),
    "pack": Example(lambda n, d: {"codes": codes(n, d)}, lambda f, t: f.pack(t["codes"], "int4")),
    "unpack": Example(
        lambda n, d: {"packed": codes(n, d)},
        lambda f, t: f.unpack(t["packed"], "int4", (rows_of(t["packed"]), 2 * K - 1)),
    ),
    "rms_norm": Example(
        lambda n, d: {"x": normals(n, d), "weight": normals(1, d, 1)[0], "residual": normals(n, d, 2)},
        lambda f, t: f.rms_norm(t["x"], t["weight"], residual=t["residual"]),
        ("x", "weight", "residual"),
    ),
    "rms_norm_quantize": Example(
        lambda n, d: {"x": bf16(n, d), "weight": bf16(1, d, 1)[0]},
        lambda f, t: f.rms_norm_quantize(t["x"], t["weight"], "mxfp8_e4m3"),
    ),
    "layer_norm_quantize": Example(
        lambda n, d: {"x": bf16(n, d), "weight": bf16(1, d, 1)[0], "bias": bf16(1, d, 2)[0]},
        lambda f, t: f.layer_norm_quantize(t["x"], t["weight"], "mxfp8_e4m3", bias=t["bias"]),
    ),
    "swiglu": Example(
        lambda n, d: {"gate": bf16(n, d), "up": bf16(n, d, 1)}, lambda f, t: f.swiglu(t["gate"], t["up"]), ("gate", "up")
    ),
    "swiglu_quantize": Example(
        lambda n, d: {"gate": bf16(n, d), "up": bf16(n, d, 1)},
        lambda f, t: f.swiglu_quantize(t["gate"], t["up"], "nvfp4"),
    ),
    "linear": Example(
        lambda n, d: {"x": bf16(n, d), **weight(INT4, d), "bias": normals(1, d, 5, length=32)[0]},
        lambda f, t: f.linear(t["x"], stored(INT4, t), t["bias"]),
        ("x", "bias"),
        rows=1,
        exact=False,
    ),
    "linear_pair": Example(
        lambda n, d: {"x": bf16(n, d), **two_weights(INT8, d)},
        lambda f, t: f.linear_pair(t["x"], stored(INT8, t), stored(INT8, t, end="2")),
        ("x",),
        rows=1,
        exact=False,
    ),
    "linear_swiglu": Example(
        lambda n, d: {"x": bf16(n, d), **two_weights(INT4, d)},
        lambda f, t: f.linear_swiglu(t["x"], stored(INT4, t), stored(INT4, t, end="2")),
        ("x",),
        rows=1,
        exact=False,
    ),
    "linear_of_codes": Example(
        lambda n, d: {
            "x": codes(1, d), "x_scale": row_scales(1, d), **weight(INT8, d, rows=n), "bias": normals(1, d, 5, length=n)[0]
        },
        lambda f, t: f.linear_of_codes(
            Quantized(t["x"], t["x_scale"], None, None, (1, K), 1, SCHEMES[INT8]),
            stored(INT8, t, t["codes"].shape[0]), t["bias"], dtype=torch.bfloat16,
        ),
        ("bias",),
        rows=32,
    ),
    "embedding_bag": Example(
        lambda n, d: {**weight(INT8, d), "ids": numbers(3 * n, d, 7, 32), "offsets": numbers(n, d, 3, 3 * n)},
        lambda f, t: f.embedding_bag(stored(INT8, t), t["ids"], t["offsets"]),
        exact=False,
    ),
    "linear_block_norm": Example(
        lambda n, d: {
            "x": codes(n, d), "x_scale": row_scales(n, d), "w": codes(256, d), "w_scale": row_scales(256, d),
            "weight": normals(1, d, 5, length=256)[0],
        },
        lambda f, t: f.linear_block_norm(
            *(
                Quantized(t[one], t[f"{one}_scale"], None, None, (rows_of(t[one]), K), 1, SCHEMES["fp8_rowwise"])
                for one in "xw"
            ),
            t["weight"],
        ),
        exact=False,
    ),
    "matmul": Example(
        lambda n, d: {"a": normals(n, d), "b": normals(8, d, 1).T}, lambda f, t: f.matmul(t["a"], t["b"])
    ),
    "matmul_error_bound": Example(
        lambda n, d: {"a": normals(n, d), "b": normals(8, d, 1).T},
        lambda f, t: f.matmul_error_bound(t["a"], t["b"], accumulation="blocked", block=16),
    ),
    "prune": Example(
        lambda n, d: {"w": normals(n, d), "scores": normals(n, d, 1)}, lambda f, t: f.prune(t["w"], scores=t["scores"])
    ),
    "compress": Example(
        lambda n, d: {"w": normals(n, d), "mask": fast.prune(normals(n, d, 1))}, lambda f, t: f.compress(t["w"], t["mask"])
    ),
    "quantize_compressed": Example(
        lambda n, d: {"w": normals(n, d), "scale": fast.choose_scales(normals(n, d), "fp8_rowwise").scale},
        lambda f, t: f.quantize_compressed(t["w"], "fp8_rowwise", t["scale"]),
    ),
    "prune_transposable": Example(
        lambda n, d: {"w": normals(n, d), "scores": normals(n, d, 1)},
        lambda f, t: f.prune_transposable(t["w"], scores=t["scores"]),
    ),
    "compress_transposable": Example(
        lambda n, d: {"w": normals(n, d)}, lambda f, t: f.compress_transposable(t["w"])
    ),
    "compress, pruned here": Example(lambda n, d: {"w": normals(n, d)}, lambda f, t: f.compress(t["w"], "2:4")),
    "compress, sparse already": Example(
        lambda n, d: {"w": normals(n, d) * fast.prune(normals(n, d))}, lambda f, t: f.compress(t["w"])
    ),
    "linear_sparse_int4": Example(
        lambda n, d: {
            "x": bf16(n, d), "codes": codes(16, d)[:, : K // 4].contiguous(),
            "metadata": torch.full((16, K // 8), 0xE4, dtype=torch.uint8, device=d), "scale": row_scales(16, d),
            "bias": bf16(1, d)[0, :16],
        },
        lambda f, t: f.linear_sparse_int4(t["x"], t["codes"], t["metadata"], t["scale"], t["bias"]),
        gradients=("x", "bias"), exact=False,
    ),
    "linear_sparse_int4, zero points": Example(
        lambda n, d: {
            "x": bf16(n, d), "codes": codes(16, d)[:, : K // 4].contiguous(),
            "metadata": torch.full((16, K // 8), 0xE4, dtype=torch.uint8, device=d), "scale": row_scales(16, d),
            "zero": torch.full_like(row_scales(16, d), -3, dtype=torch.int8),
        },
        lambda f, t: f.linear_sparse_int4(t["x"], t["codes"], t["metadata"], t["scale"], None, t["zero"]),
        gradients=("x",), exact=False,
    ),
    "decompress": Example(
        lambda n, d: {"values": normals(n, d)[:, ::2], "metadata": torch.full((n, K // 8), 0x44, dtype=torch.uint8, device=d)},
        lambda f, t: f.decompress(t["values"], t["metadata"]),
    ),
    "linear_sparse": Example(
        lambda n, d: {
            "x": bf16(n, d), "values": bf16(32, d, 1)[:, ::2],
            "metadata": torch.full((32, K // 8), 0x8D, dtype=torch.uint8, device=d),
            "bias": normals(1, d, 5, length=32)[0], "scale": row_scales(32, d),
        },
        lambda f, t: f.linear_sparse(t["x"], t["values"], t["metadata"], t["bias"], scale=t["scale"]),
        exact=False,
    ),
    "arrange_sparse_metadata": Example(
        lambda n, d: {"metadata": torch.full((n, K), 0x4E, dtype=torch.uint8, device=d)},
        lambda f, t: f.arrange_sparse_metadata(t["metadata"], torch.int8),
    ),
}  # fmt: skip

__all__ = ["EXAMPLES", "MANY", "Example", "Tensors"]
