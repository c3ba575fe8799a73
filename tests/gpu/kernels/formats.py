"""encode and decode of every format, pack and unpack, and all 2**32 float32 patterns."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

import reference
from ao_lab.testing.samples import fill
from reference import FORMATS
from reference.formats.encode import OVERFLOWS
from reference.formats.rounding import MODES
from tests.gpu.harness.inputs import Array, all_patterns
from tests.gpu.harness.pool import Job
from tests.gpu.harness.run import Failure, Run, Settings
from tests.gpu.kernels.numerics.schemes import converted, pack_shapes

SWEPT = ("float8_e4m3fn", "float8_e5m2")
SWEPT_POLICIES = ("saturate", "nonfinite")
CHUNK, PART = 1 << 28, 1 << 25  # patterns of one call of fast, and of the yardstick
SUBSET = 1 << 24
KINDS = ("bits", "normals", "ties", "near_ties", "subnormals", "specials")


def jobs(settings: Settings) -> list[Job]:
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
