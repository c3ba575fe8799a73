"""Every scheme and every input dtype, all patterns of 16 bits, packed codes; encode and decode of every format, all 2**32
float32 patterns; and the short divisions of `fast.kernels.sm90.bit_tricks` against correctly rounded ones,
for every significand.

A quotient or reciprocal of normal numbers depends on the exponents only by a power of two, so all 2**23 significands at a few
exponents are all cases, as long as nothing leaves the range that the functions promise.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import reference
from ao_lab.testing.samples import fill
from reference import FORMATS, SCHEMES, Quantized, Scales, Scheme
from reference.formats.encode import MODES, OVERFLOWS
from tests.gpu.harness.inputs import (
    DTYPES,
    NUMPY,
    Array,
    all_patterns,
    default_schemes,
    normals,
    scheme_inputs,
)
from tests.gpu.harness.pool import Job
from tests.gpu.harness.run import Failure, Run, Settings

PACKED_SHAPES = ((64, 256), (3, 7, 96), (5, 160), (256, 2), (0, 32), (32, 0), ())


def jobs(settings: Settings) -> list[Job]:
    """All families of this module."""
    return [*scheme_jobs(settings), *format_jobs(settings), *quotient_jobs(settings)]


def scheme_jobs(settings: Settings) -> list[Job]:
    """Families "schemes", "patterns" and "packed"."""
    every = [name for index, name in enumerate(SCHEMES) if settings.fraction > 0.2 or index % 9 == 0]
    # One dtype after the other: the kernels that do not depend on it are compiled by then.
    made = [
        Job("schemes", f"{name} {dtype}", "quantize", scheme_case, (name, dtype), weight=9.0 - rank)
        for rank, dtype in enumerate(DTYPES)
        for name in every
    ]
    made += [
        Job("patterns", f"{name} {dtype}", "quantize", pattern_case, (name, dtype))
        for name in default_schemes()
        if name in every
        for dtype in ("bfloat16", "float16")
    ]
    small = [name for name in every if SCHEMES[name].format.bits < 8]
    return made + [
        Job("packed", name, "quantize", packed_case, (name, i)) for i, name in enumerate([*small, "mxint8"])
    ]


def scheme_case(run: Run, name: str, dtype: str) -> None:
    """All functions of one scheme on all inputs of one dtype."""
    scheme = SCHEMES[name]
    for label, x in scheme_inputs(scheme, dtype, run.settings.fraction):
        q = run.same("quantize", label, x, name)
        if isinstance(q, Failure):
            continue
        # By definition: what `quantize` keeps, and what storage gives (tests/reference/quantize/test_fake_quantize.py
        # holds them to it).
        run.same("choose_scales", label, x, name, expected=q.scales)
        values = {to: run.expect("dequantize", q, to) for to in DTYPES}
        for to, expected in values.items():
            run.same("dequantize", f"{label} to {to}", q, to, expected=expected)
        run.same("fake_quantize", label, x, name, expected=values[dtype])
        gradients(run, label, x, scheme)


def gradients(run: Run, label: str, x: Array, scheme: Scheme) -> None:
    """fake_quantize_vjp with computed scales, and with given ones under which elements saturate."""
    x = x[: min(len(x), 64)]
    g = fill("normals", x.shape, dtype=x.dtype.name, seed=3)
    g.reshape(-1)[::97] = np.nan
    g.reshape(-1)[5::89] = -np.inf
    run.same("fake_quantize_vjp", label, g, x, scheme)
    with np.errstate(all="ignore"):
        smaller = (x.astype(np.float32) / 2).astype(x.dtype)
    given = run.expect("choose_scales", smaller, scheme)
    if isinstance(given, Scales):
        run.same("fake_quantize_vjp", f"{label} given scales", g, x, scheme, scales=given)


def pattern_case(run: Run, name: str, dtype: str) -> None:
    """All 65,536 patterns in several orders."""
    for label, x in all_patterns(dtype).items():
        run.same("quantize", label, x, name)


def packed_case(run: Run, name: str, index: int) -> None:
    """quantize(packed=True) and dequantize of it, along the last and the first axis."""
    dtype = DTYPES[index % len(DTYPES)]
    for shape in PACKED_SHAPES:
        x = np.asarray(normals(shape, dtype, seed=index))
        for axis in (-1, 0):
            label = f"{dtype} {shape} axis {axis}"
            q = run.same("quantize", label, x, name, axis=axis, packed=True)
            if isinstance(q, Quantized):
                run.same("dequantize", f"{label} packed", q)
                run.same("dequantize", f"{label} packed to {dtype}", q, dtype)


def pack_shapes(fmt: str) -> list[tuple[int, ...]]:
    """Lengths that end within a byte, on a byte, within and beyond any tile."""
    long = 4099 if FORMATS[fmt].bits < 8 else 33
    made = [(), (0,), (1,), (7,), (8,), (3, 5), (4, 64), (2, 3, 33), (3, long), (0, 32), (3, 0), (64, 256)]
    # One stream of words: whole groups, and with codes that fill none.
    return made + [(64, 4096), (3, 160), (1, 2048 + 32), (7, 4100), (1, 8301)] * (FORMATS[fmt].bits < 8)


def converted(x: Array, dtype: str) -> Any:
    """x in another dtype, without warnings about infinities."""
    with np.errstate(all="ignore"):
        return x.astype(NUMPY[dtype])


EXPONENTS = (-126, -124, -122, -118, -117, -110, -100, -65, -64, -63, -1, 0, 1, 2, 40, 100, 124)
FLOOR = 2.0**-126


def quotient_jobs(settings: Settings) -> list[Job]:
    """Family "quotients"; kernels only."""
    if settings.device != "cuda":
        return []
    return [Job("quotients", "all significands", "quantize", all_significands, (), 5.0)]


def all_significands(run: Run) -> None:
    """inverse, quotient by every target, and divided."""
    from fast.kernels.scheme.fast_path_rules import QUOTIENTS

    exponents = EXPONENTS[:: 1 if run.settings.fraction > 0.2 else 4]
    fraction = torch.arange(2**23, dtype=torch.int32, device=run.device)
    for exponent in exponents:
        a = (fraction + ((exponent + 127) << 23)).view(torch.float32)
        _count(run, f"inverse 2**{exponent}", _unary("inverse", a, 0.0), _true(torch.ones_like(a), a))
        for target in QUOTIENTS:
            got = _unary("quotient", a, target).clamp(min=FLOOR)
            _count(
                run,
                f"quotient {target} 2**{exponent}",
                got,
                _true(a, torch.full_like(a, target)).clamp(min=FLOOR),
            )
    _random_pairs(run, fraction)


def _random_pairs(run: Run, fraction: torch.Tensor) -> None:
    """Dividends with every significand over random divisors in [1, 2)."""
    generator = torch.Generator(device=run.device).manual_seed(0)
    for step in range(run.settings.few(40, 4)):
        random = torch.randint(
            0, 2**23, fraction.shape, generator=generator, device=run.device, dtype=torch.int32
        )
        a = (fraction + ((step % 20 + 117) << 23)).view(torch.float32)
        b = (random + (127 << 23)).view(torch.float32)
        _count(run, f"divided {step}", _binary(a, b), _true(a, b))


def _true(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """float64 quotients rounded to float32: 53 >= 2 * 24 + 2, so rounding twice is rounding once."""
    return (a.double() / b.double()).float()


def _count(run: Run, label: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
    bad = got.view(torch.int32) != wanted.view(torch.int32)
    different = int(bad.sum())
    detail = [f"got {got[bad][0].item().hex()}, expected {wanted[bad][0].item().hex()}"] if different else []
    run.record("quantize", label, got.numel(), different, detail)


def _unary(name: str, a: torch.Tensor, target: float) -> torch.Tensor:
    from fast.launch.launcher import UNFUSED
    from tests.gpu.kernels.quotient_kernels import unary_kernel

    y = torch.empty_like(a)
    reciprocal_rn = float((1 / torch.tensor(target or 1.0, dtype=torch.float32)).item())
    unary_kernel[(a.numel() // 1024,)](a, y, name, target, reciprocal_rn, **UNFUSED)
    return y


def _binary(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    from fast.launch.launcher import UNFUSED
    from tests.gpu.kernels.quotient_kernels import divided_kernel

    y = torch.empty_like(a)
    divided_kernel[(a.numel() // 1024,)](a, b, y, **UNFUSED)
    return y


# encode and decode of every format, pack and unpack, and all 2**32 float32 patterns.

SWEPT = ("float8_e4m3fn", "float8_e5m2")
SWEPT_POLICIES = ("saturate", "nonfinite")
CHUNK, PART = 1 << 28, 1 << 25  # patterns of one call of fast, and of the yardstick
SUBSET = 1 << 24
KINDS = ("bits", "normals", "ties", "near_ties", "subnormals", "specials")


def format_jobs(settings: Settings) -> list[Job]:
    """Families "encode", "decode", "pack" and "sweep"."""
    made = [
        Job("encode", f"{name} {mode}", "encode", encode_case, (name, mode), weight=3.0)
        for name in FORMATS
        for mode in MODES
    ]
    made += [Job("decode", name, "decode", decode_case, (name,)) for name in FORMATS]
    made += [Job("pack", name, "pack", pack_case, (name,)) for name in FORMATS]
    swept = [(name, policy) for name in SWEPT for policy in SWEPT_POLICIES]
    return made + [
        Job("sweep", f"{n} {p}", "encode", sweep_case, (n, p), weight=20.0 if p == "saturate" else 19.0)
        for n, p in swept
    ]


def encode_inputs(fmt: str, fraction: float) -> Iterator[tuple[str, Array]]:
    """All patterns of 16 bits, and kinds of float32; float64 once."""
    for dtype in ("bfloat16", "float16"):
        yield dtype, all_patterns(dtype)["sorted"]
    rows = max(16, round(64 * fraction))
    wide = np.concatenate([fill(kind, (rows, 256), fmt=fmt) for kind in KINDS])
    yield "float32", wide
    yield "float64", converted(wide[::8], "float64") * (1 + 2.0**-40)


def encode_case(run: Run, name: str, mode: str) -> None:
    """One format and rounding mode with every overflow policy, those it cannot express included."""
    for label, x in encode_inputs(name, run.settings.fraction):
        words = reference.random_bits(x.shape, seed=7) if mode == "stochastic" else None
        for overflow in OVERFLOWS:
            run.same(
                "encode", f"{label} {overflow}", x, name, rounding=mode, overflow=overflow, random_bits=words
            )


def decode_case(run: Run, name: str) -> None:
    """Every code, and every pattern of the carrier: higher bits do not count."""
    if FORMATS[name].bits <= 8:
        run.same("decode", "uint8", np.arange(256).astype(np.uint8), name)
    run.same("decode", "uint16", np.arange(1 << 16).astype(np.uint16), name)
    run.same("decode", "empty", np.zeros((0, 3), np.uint8), name)
    run.same("decode", "0-d", np.array(1, np.uint8), name)


def pack_case(run: Run, name: str) -> None:
    """pack of all bytes (higher bits do not count), unpack of any bytes, and of bytes of a wrong shape."""
    rng = np.random.default_rng(0)
    for shape in pack_shapes(name):
        codes = rng.integers(0, 256, shape).astype(np.uint8)
        packed = run.same("pack", f"{shape}", codes, name)
        if isinstance(packed, Failure):
            continue
        run.same("unpack", f"{shape}", rng.integers(0, 256, packed.shape).astype(np.uint8), name, shape)
        run.same("unpack", f"{shape} refused", packed, name, (*shape, 3))


def sweep_case(run: Run, name: str, policy: str) -> None:
    """All float32 patterns in chunks against the rule as torch operations; a random subset against NumPy."""
    fraction = run.settings.fraction
    chunk = CHUNK if fraction == 1 else 1 << 20
    starts = range(0, 1 << 32, chunk)
    for start in starts if fraction == 1 else [*starts[:: len(starts) // 8], starts[-1]]:
        swept_chunk(run, name, policy, start, chunk)
    subset_case(run, name, policy, SUBSET if fraction == 1 else 1 << 16)


def swept_chunk(run: Run, name: str, policy: str, start: int, size: int) -> None:
    """One chunk: one call of fast, the yardstick in parts that need less memory."""
    first = start - (1 << 32) * (start >= 1 << 31)
    x = (torch.arange(size, dtype=torch.int32, device=run.device) + first).view(torch.float32)
    got = run.guarded(lambda: run.fast.encode(x, name, overflow=policy))
    if isinstance(got, Failure):
        run.record("encode", f"from {start:#x}", size, size, [f"{got.kind}: {got.text}"])
        return
    different, detail = 0, []
    for offset in range(0, size, PART):
        part = x[offset : offset + PART]
        wanted = reference.encode.__wrapped__(part, name, overflow=policy)
        wrong = got[offset : offset + PART] != wanted
        count = int(wrong.sum())
        different += count
        if count and not detail:
            detail = _examples(wrong, part, got[offset : offset + PART], wanted)
    run.record("encode", f"from {start:#x}", size, different, detail)


def _examples(wrong: torch.Tensor, x: torch.Tensor, got: torch.Tensor, wanted: torch.Tensor) -> list[str]:
    """The first few patterns whose codes differ."""
    places = torch.nonzero(wrong).flatten()[:4].tolist()
    bits = x.view(torch.int32)
    return [
        f"input 0x{int(bits[i]) & 0xFFFFFFFF:08x}: got 0x{int(got[i]):02x}, expected 0x{int(wanted[i]):02x}"
        for i in places
    ]


def subset_case(run: Run, name: str, policy: str, size: int) -> None:
    """Random patterns against NumPy, whose path through tables is another one."""
    bits = np.random.default_rng(len(name)).integers(0, 1 << 32, size, dtype=np.uint32)
    run.same("encode", "random subset", bits.view(np.float32), name, overflow=policy)
