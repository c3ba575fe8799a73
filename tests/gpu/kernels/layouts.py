"""Axes, odd and empty shapes, long rows, tensors that are views of others, and tiled scales.

Several GPUs in one process: every call on each of them, while another one is current; nothing where there is one GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from reference import SCHEMES, Quantized
from tests.gpu.harness.inputs import DTYPES, REPRESENTATIVE, Array, normals
from tests.gpu.harness.pool import Job
from tests.gpu.harness.run import Failure, Run, Settings, host, outcome

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
    return [*layout_jobs(settings), *device_jobs(settings)]


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
