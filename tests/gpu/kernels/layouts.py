"""Axes, odd and empty shapes, long rows, tensors that are views of others, and tiled scales.

Several GPUs in one process: every call on each of them, while another one is current; nothing where there is one GPU.

Wrong inputs: the same class and the same words from `fast` as from `reference`.

Every public function in the unusual situations of `tests.support.situations`, on the GPU: its one stated answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from reference import SCHEMES, Quantized, Scales, quantize
from tests.gpu.harness.inputs import DTYPES, REPRESENTATIVE, Array, normals
from tests.gpu.harness.pool import Job
from tests.gpu.harness.run import Failure, Run, Settings, host, outcome
from tests.support.situations import EXAMPLES, SITUATIONS, walk

Call = tuple[str, str, tuple[Any, ...], dict[str, Any]]
#: What `fast` takes as first argument is a tensor, and nothing else.
FOREIGN = (np.ones((64, 64), np.float32), [1.0, 2.0], 3.0, None, "x")
TAKES = {
    "quantize": ("mxfp4",),
    "choose_scales": ("mxfp4",),
    "fake_quantize": ("mxfp4",),
    "encode": ("float8_e4m3fn",),
    "decode": ("float8_e4m3fn",),
    "pack": ("int4",),
    "unpack": ("int4", (64, 64)),
    "quantize_both": ("mxfp4",),
}


def error_jobs(settings: Settings) -> list[Job]:
    """Family "errors"."""
    return [
        Job("errors", "", "quantize", error_case),
        Job("errors", "foreign arrays", "quantize", foreign_case),
    ]


def error_case(run: Run) -> None:
    """Each call fails on both sides alike; a call that succeeds on either side is a difference."""
    for function, label, args, keywords in (*quantizer_calls(), *code_calls(), *fused_calls()):
        if not hasattr(run.fast, function):
            continue
        expected = run.expect(function, *args, **keywords)
        if not isinstance(expected, Failure):
            run.record(function, label, 1, 1, [f"{label}: the reference accepts this; the test is wrong"])
            continue
        run.same(function, label, *args, expected=expected, **keywords)


def foreign_case(run: Run) -> None:
    """TypeError that names the way out."""
    for function, rest in TAKES.items():
        if not hasattr(run.fast, function):
            continue
        for value in FOREIGN:
            run.calls += 1
            got = run.guarded(lambda f=function, v=value, r=rest: getattr(run.fast, f)(v, *r))
            text = got.text if isinstance(got, Failure) else ""
            good = isinstance(got, Failure) and got.kind == "TypeError" and "takes torch tensors, got" in text
            detail = [] if good else [f"{type(value).__name__} to {function}: got {str(got)[:300]}"]
            run.record(function, f"given a {type(value).__name__}", 1, int(not good), detail)


def quantizer_calls() -> Iterator[Call]:
    """Functions that take a tensor and a scheme."""
    x = normals((64, 96))
    for function in ("quantize", "choose_scales", "fake_quantize"):
        for dtype in ("int32", "int8", "uint8", "bool", "complex64", "int64"):
            yield function, f"{dtype} input", (np.ones((64, 96), dtype), "mxfp4"), {}
        for scheme in ("mxfp5", "", "MXFP4", 7, None):
            yield function, f"scheme {scheme!r}", (x, scheme), {}
        for axis in (2, -3, 1.0, True, "0", None):
            yield function, f"axis {axis!r}", (x, "mxfp4"), {"axis": axis}
        for shape, scheme in (((64, 33), "mxfp4"), ((7,), "nvfp4"), ((32,), "fp8_128x128"), ((), "mxfp4"),
                              ((3, 32), "torchao.nf4"), ((64, 72), "te.nvfp4_16x16"), ((4, 100), "int4_g32")):  # fmt: skip
            yield function, f"{scheme} of {shape}", (np.ones(shape, np.float32), scheme), {}
    yield from scale_calls(x)
    for scheme, shape, axis in (
        ("fp8_rowwise", (64, 96), -1),
        ("mxfp4", (64, 96), 0),
        ("mxfp4", (2, 64, 96), -1),
    ):
        yield "quantize", f"{scheme} {shape} tiled", (normals(shape), scheme), {"tiled": True, "axis": axis}
    stochastic = replace(SCHEMES["mxfp4"], name="s", rounding="stochastic")
    yield "quantize", "stochastic without words", (x, stochastic), {}
    yield "fake_quantize", "stochastic", (x, stochastic), {}
    yield "fake_quantize_vjp", "stochastic", (x, x, stochastic), {}
    yield "quantize", "words not needed", (x, "mxfp4"), {"random_bits": np.zeros((64, 96), np.uint32)}
    yield "quantize", "words of another dtype", (x, stochastic), {"random_bits": np.zeros((64, 96), np.int32)}
    yield "fake_quantize_vjp", "g of another shape", (x[:2], x, "mxfp4"), {}
    yield "fake_quantize_vjp", "g of another dtype", (x.astype(np.float16), x, "mxfp4"), {}


def scale_calls(x: Any) -> Iterator[Call]:
    """Scales that do not fit their record."""
    byte, single = np.zeros((64, 3), np.uint8), np.ones((64, 6), np.float32)
    wrong: tuple[tuple[str, str, Any], ...] = (
        ("mxfp4", "float scale", np.ones((64, 3), np.float32)),
        ("mxfp4", "shape", np.zeros((64, 4), np.uint8)),
        ("mxfp4", "outer", Scales(byte, np.array(1, np.float32))),
        ("mxfp4", "zero", Scales(byte, None, byte)),
        ("mxfp4", "a list", [1.0]),
        ("mxfp4", "a string", "scales"),
        ("nvfp4", "no outer", np.zeros((64, 6), np.uint8)),
        ("nvfp4", "float scale", Scales(single, np.array(1, np.float32))),
        ("nvfp4", "outer of shape (1,)", Scales(outer=np.ones(1, np.float32))),
        ("nvfp4", "empty", Scales()),
        ("int4_g32_asymmetric", "no zero", np.ones((64, 3), np.float32)),
        ("int4_g32_asymmetric", "uint8 zero", Scales(np.ones((64, 3), np.float32), None, byte)),
        ("nf4", "only scale", Scales(np.zeros(96, np.int8))),
        ("fp8_tensorwise", "shape (1,)", np.ones(1, np.float32)),
        ("fp8_rowwise", "half", np.ones((64, 1), np.float16)),
    )
    for scheme, label, scales in wrong:
        for function in ("quantize", "fake_quantize"):
            yield function, f"{scheme} scales: {label}", (x, scheme), {"scales": scales}


def code_calls() -> Iterator[Call]:
    """Functions of codes and formats."""
    x, codes = normals((4, 32)), np.zeros((4, 32), np.uint8)
    yield "encode", "int input", (np.ones(3, np.int32), "float8_e4m3fn"), {}
    yield "encode", "unknown format", (x, "float7"), {}
    yield "encode", "rounding", (x, "float8_e4m3fn"), {"rounding": "nearest"}
    yield "encode", "overflow", (x, "float8_e4m3fn"), {"overflow": "wrap"}
    yield "encode", "overflow of a format", (x, "float8_e4m3fn"), {"overflow": "inf"}
    yield "encode", "overflow of integers", (x, "int4"), {"overflow": "nonfinite"}
    yield "encode", "stochastic without words", (x, "float8_e5m2"), {"rounding": "stochastic"}
    yield "encode", "codebook toward zero", (x, "nf4"), {"rounding": "toward_zero"}
    for function in ("decode", "pack"):
        yield function, "float codes", (x, "int4"), {}
        yield function, "int32 codes", (codes.astype(np.int32), "int4"), {}
        yield function, "unknown format", (codes, "int44"), {}
    yield "pack", "0-d", (np.array(1, np.uint8), "int4"), {}
    yield "unpack", "shape", (codes, "int4", (4, 65)), {}
    yield "unpack", "rank", (codes, "int4", (4, 2, 64)), {}
    q = quantize(x, "mxfp8_e4m3")
    yield "dequantize", "dtype", (q, "float8_e4m3fn"), {}
    yield "dequantize", "dtype unknown", (q, "float33"), {}
    yield "dequantize", "codes of another shape", (replace(q, codes=codes[:2]),), {}
    yield "dequantize", "scale of another shape", (replace(q, shape=(4, 33)),), {}


def fused_calls() -> Iterator[Call]:
    """Functions that do more than one thing."""
    x, weight = normals((64, 96)), np.ones(96, np.float32)
    half, up = x.astype(np.float16), x.astype(np.float16)[:32]
    yield "quantize_both", "tiled", (normals((64, 64)), "fp8_tensorwise"), {"tiled": True}
    yield "quantize_both", "3-D", (normals((2, 32, 32)), "mxfp4"), {}
    yield "quantize_both", "indivisible", (normals((33, 64)), "mxfp4"), {}
    yield "quantize_both", "int", (np.ones((32, 32), np.int32), "mxfp4"), {}
    yield "quantize_both", "scales no pair", (x, "mxfp4"), {"scales": np.ones(3, np.float32)}
    yield "rms_norm_quantize", "weight shape", (x, weight[:95], "mxfp4"), {}
    yield "rms_norm_quantize", "weight dtype", (x, weight.astype(np.float16), "mxfp4"), {}
    yield "rms_norm_quantize", "residual shape", (x, weight, "mxfp4"), {"residual": x[:2]}
    yield "rms_norm_quantize", "eps", (x, weight, "mxfp4"), {"eps": -1.0}
    yield "rms_norm_quantize", "eps NaN", (x, weight, "mxfp4"), {"eps": float("nan")}
    yield "rms_norm_quantize", "float64", (x.astype(np.float64), weight, "mxfp4"), {}
    yield "rms_norm_quantize", "0-d", (np.float32(1), weight, "mxfp4"), {}
    yield "swiglu_quantize", "float32", (x, x, "mxfp4"), {}
    yield "swiglu_quantize", "up shape", (half, up, "mxfp4"), {}
    yield "swiglu_quantize", "up dtype", (half, x, "mxfp4"), {}
    yield "swiglu_quantize", "scheme", (half, half, "mxfp44"), {}


def situation_jobs(settings: Settings) -> list[Job]:
    """Family "situations"."""
    return [
        Job("situations", example, example.partition(",")[0], situations_case, (example,), 5.0)
        for example in list(EXAMPLES)[:: 1 if settings.fraction > 0.2 else 4]
    ]


def situations_case(run: Run, example: str) -> None:
    """One check for each situation; twice, so that remembered calls are asked too."""
    for situation in SITUATIONS:
        for turn in ("first", "again"):
            wrong = list(walk(example, situation, run.device.type, run.fast))
            run.record(example.partition(",")[0], f"{situation} {turn}", 1, len(wrong), wrong)


#: Those that a scheme does not accept are refused by both sides in the same words.
SHAPES = (
    (), (1,), (7,), (32,), (257,), (0,), (0, 32), (32, 0), (1, 256), (3, 32), (256, 1), (5, 37), (13, 131), (96, 31),
    (2, 3, 64), (4, 32, 5), (2, 128, 48), (1, 1, 256), (7, 160), (2, 33, 256), (130, 258), (2, 0, 32),
)  # fmt: skip
#: Rows beyond 65,536 elements, of which 256 is no divisor but 32 is, and a long first axis.
LONG = ((2, 65536 + 160), (2, 131072 + 256), (65536 + 160, 2), (3, 65537))
#: Schemes whose scales have a tiled layout, and matrices whose rows and columns fill its tiles, or do not.
TILED = ("mxfp8_e4m3", "mxfp8_e5m2_rceil", "mxfp6_e2m3", "mxfp4", "mxint8", "nvfp4", "torchao.nvfp4", "torchao.mxfp8_e4m3_even",
         "te.nvfp4", "compressed_tensors.nvfp4")  # fmt: skip
TILED_SHAPES = (
    (96, 96),
    (128, 128),
    (256, 512),
    (384, 192),
    (1, 32),
    (130, 2048),
    (640, 64),
    (0, 64),
    (4096, 1024),
)
PARTS = 3  # jobs that share the shapes of a scheme
Place = Callable[[torch.Tensor], torch.Tensor]
#: From a contiguous (128, 512) tensor.
VIEWS: dict[str, Place] = {
    "transposed": lambda t: t.t(),
    "every second row": lambda t: t[::2],
    "every second column": lambda t: t[:, ::2],
    "from column 1": lambda t: t[:, 1:257],
    "from column 8": lambda t: t[3:, 8:264],
    "one element off": lambda t: t.flatten()[1 : 1 + 64 * 256].view(64, 256),
    "expanded": lambda t: t[:1, :256].expand(64, 256),
    "expanded column": lambda t: t[:, :1].expand(128, 256),
    "permuted": lambda t: t.view(4, 32, 512).permute(2, 0, 1),
    "middle axis last": lambda t: t.view(4, 32, 512).transpose(1, 2),
}


def jobs(settings: Settings) -> list[Job]:
    """All families of this module."""
    return [*layout_jobs(settings), *device_jobs(settings), *error_jobs(settings), *situation_jobs(settings)]


def layout_jobs(settings: Settings) -> list[Job]:
    """Families "shapes", "views" and "tiled"."""
    names = REPRESENTATIVE[:: 1 if settings.fraction > 0.2 else 4]
    made = []
    for index, name in enumerate(names):
        # Views and thin matrices become many times larger in blocks of rows and columns.
        weight = 12.0 if isinstance(SCHEMES[name].scale.block, tuple) else 6.0
        made += [
            Job("shapes", f"{name} {part}", "quantize", shape_case, (name, index, part), weight)
            for part in range(PARTS)
        ]
        made.append(Job("views", name, "quantize", view_case, (name, index), weight))
    tiled = TILED[:: 1 if settings.fraction > 0.2 else 5]
    return made + [Job("tiled", n, "quantize", tiled_case, (n, i), 4.0) for i, n in enumerate(tiled)]


def axes_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """First, second and last axis, each once; one that does not exist for 0-d and 1-d tensors."""
    return (0, 1, -1) if len(shape) > 2 else (0, -1) if len(shape) == 2 else (-1, 1)


def shape_case(run: Run, name: str, index: int, part: int) -> None:
    """Every PARTS-th shape along several axes, the dtype changing with the shape."""
    two_axes = isinstance(SCHEMES[name].scale.block, tuple)
    shapes = SHAPES + LONG[: len(LONG) if run.settings.fraction > 0.2 and not two_axes else 1]
    for number, shape in list(enumerate(shapes))[part::PARTS]:
        dtype = DTYPES[(number + index + number // 3) % len(DTYPES)]
        x = np.asarray(normals(shape, dtype, seed=number))
        for axis in axes_of(shape):
            everything(run, f"{dtype} {shape} axis {axis}", x, name, axis)
    run.same("quantize", f"float64 {part}", normals((64, 256)).astype(np.float64) * (1 + 2.0**-30), name)


def everything(run: Run, label: str, x: Array, name: str, axis: int) -> None:
    """All functions on one array; where quantize refuses it, all refuse it."""
    q = run.same("quantize", label, x, name, axis=axis)
    run.same("choose_scales", label, x, name, axis=axis)
    run.same("fake_quantize", label, x, name, axis=axis)
    run.same("fake_quantize_vjp", label, x, x, name, axis=axis)
    if isinstance(q, Quantized):
        run.same("dequantize", label, q)
        run.same("dequantize", f"{label} own dtype", q, x.dtype.name)
        run.same("fake_quantize_vjp", f"{label} given scales", x, x, name, axis=axis, scales=q.scales)


def tiled_case(run: Run, name: str, index: int) -> None:
    """Tiled scales of one copy and of both, packed too, from x and given; back to values."""
    for number, shape in enumerate(TILED_SHAPES):
        dtype = DTYPES[(number + index) % len(DTYPES)]
        x, label = normals(shape, dtype, seed=number), f"{dtype} {shape} tiled"
        q = run.same("quantize", label, x, name, tiled=True)
        if isinstance(q, Quantized):
            run.same("dequantize", label, q)
            run.same("quantize", f"{label} given", x, name, tiled=True, scales=q.scales)
            run.same("quantize", f"{label} packed", x, name, tiled=True, packed=True)
    odd = run.put(normals((64 * 256 + 1,), "bfloat16", seed=3))[1:].view(64, 256)
    wanted = run.expect("quantize", host(odd), name, packed=True)
    got = run.guarded(lambda: run.fast.quantize(odd, name, packed=True))
    run.compare("quantize", "packed, one element off", got, wanted, x=host(odd))
    for dtype in DTYPES:
        for shape in TILED_SHAPES:
            run.same(
                "quantize_both", f"{dtype} {shape} tiled", normals(shape, dtype, seed=9), name, tiled=True
            )


def view_case(run: Run, name: str, index: int) -> None:
    """Views: input strides and offsets are not those of a fresh tensor."""
    for number, (label, place) in enumerate(VIEWS.items()):
        dtype = DTYPES[(number + index) % len(DTYPES)]
        base = run.put(normals((128, 512), dtype, seed=number))
        x = host(place(base))
        for axis in axes_of(x.shape):
            viewed(run, f"{label} {dtype} axis {axis}", place(base), x, name, axis)
        run.compare(
            "quantize", f"{label} left its input alone", base, normals((128, 512), dtype, seed=number)
        )
    quantized_views(run, name)


def viewed(run: Run, label: str, view: torch.Tensor, x: Array, name: str, axis: int) -> None:
    """quantize, fake_quantize and its gradient on a view against the reference on a copy."""
    for function in ("quantize", "fake_quantize"):
        wanted = run.expect(function, x, name, axis=axis)
        got = run.guarded(lambda f=function: getattr(run.fast, f)(view, name, axis=axis))
        run.compare(function, label, got, wanted, x=x)
    wanted = run.expect("fake_quantize_vjp", x, x, name, axis=axis)
    got = run.guarded(lambda: run.fast.fake_quantize_vjp(view, view, name, axis=axis))
    run.compare("fake_quantize_vjp", label, got, wanted)


def quantized_views(run: Run, name: str) -> None:
    """dequantize of codes and scales that are views; encode and decode of views."""
    x = normals((128, 256), seed=9)
    q = run.expect("quantize", x, name)
    if isinstance(q, Failure):
        return
    scale = np.asarray(q.scale)
    codes = run.put(np.repeat(q.codes, 2, axis=1))[:, ::2]
    strided = run.put(np.repeat(scale, 2, axis=-1))[..., ::2] if scale.ndim else run.put(scale)
    moved = Quantized(codes, strided, run.put(q.outer), run.put(q.zero), q.shape, q.axis, SCHEMES[name])
    run.compare(
        "dequantize",
        "strided codes",
        run.guarded(lambda: run.fast.dequantize(moved)),
        run.expect("dequantize", q),
    )
    view = run.put(normals((128, 256), seed=4)).t()
    wanted = run.expect("encode", host(view), q.scheme.element)
    got = run.guarded(lambda: run.fast.encode(view, q.scheme.element))
    run.compare("encode", "transposed", got, wanted)
    run.compare("decode", "strided", run.guarded(lambda: run.fast.decode(codes, "float8_e4m3fn")),
                run.expect("decode", q.codes, "float8_e4m3fn"))  # fmt: skip


DEVICE_SCHEMES = (
    "fp8_rowwise",
    "mxfp8_e4m3",
    "mxfp4",
    "nvfp4",
    "fp8_tensorwise",
    "int4_g32_asymmetric",
    "nf4",
)
SHAPE = (128, 256)
ROUNDS = 3  # the first compiles, the others are remembered calls


def device_jobs(settings: Settings) -> list[Job]:
    """Family "devices"."""
    if settings.device != "cuda" or torch.cuda.device_count() < 2:
        return []
    return [Job("devices", name, "quantize", devices_case, (name,)) for name in DEVICE_SCHEMES]


def devices_case(run: Run, name: str) -> None:
    """Results lie on x's device and have the bits of the first device's, in any order of devices."""
    count = torch.cuda.device_count()
    x = run.put(normals(SHAPE, "bfloat16", seed=5))
    for function, call in calls(run.fast, name).items():
        wanted = host(outcome(lambda call=call: call(x)))
        for step in range(ROUNDS * count):
            with torch.cuda.device((step + 1) % count):
                there = x.to(f"cuda:{step % count}")
                got = outcome(lambda call=call, there=there: call(there))
            run.compare(function, f"round {step}", got, wanted)
            away = [t.device.index for t in torch.utils._pytree.tree_leaves(vars(got) if hasattr(got, "codes") else got)
                    if isinstance(t, torch.Tensor) and t.device != there.device]  # fmt: skip
            run.record(function, f"device of round {step}", 1, len(away), [f"results on {away}"])


def calls(fast: Any, name: str) -> dict[str, Callable[[torch.Tensor], Any]]:
    """The functions that have kernels, on one tensor."""
    weight = torch.ones(SHAPE[1], dtype=torch.bfloat16)
    return {
        "quantize": lambda x: fast.quantize(x, name),
        "dequantize": lambda x: fast.dequantize(fast.quantize(x, name), "bfloat16"),
        "fake_quantize": lambda x: fast.fake_quantize(x, name),
        "fake_quantize_vjp": lambda x: fast.fake_quantize_vjp(x, x, name)[0],
        "quantize_both": lambda x: fast.quantize_both(x, name)[1],
        "rms_norm_quantize": lambda x: fast.rms_norm_quantize(x, weight.to(x.device), name)[0],
        "swiglu_quantize": lambda x: fast.swiglu_quantize(x, x, name),
    }
