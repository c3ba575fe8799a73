"""Kernels that mix blocks, draw words and quantize, in Triton's interpreter: bits of the reference along both axes.

Values in bfloat16 under scales that are no powers of two are not compared: the interpreter truncates where it should round.

TRITON_INTERPRET=1 python tests/emulator/programs/training/hadamard.py
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

import torch
import triton

import reference
from fast.kernels import hadamard as host
from reference import SCHEMES
from reference.training import hadamard
from tests.emulator import quick_interpreter

SEED, STREAM = 2**40 + 5, 3
#: Scheme, Hadamard length, axis, dtype: each recipe's operands, and formats whose codes go by other rules.
CASES = (
    ("mxfp4_rceil", 32, 0, torch.bfloat16, True),
    ("mxfp4_rceil", 32, 1, torch.bfloat16, True),
    ("nvfp4", 16, 0, torch.float32, False),
    ("nvfp4", 0, 1, torch.bfloat16, True),
    ("mxfp6_e3m2_rceil", 32, 1, torch.float16, False),
)


def matrix(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of all sizes, zeros, subnormals, NaN and infinity."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator)
    x *= torch.exp(3 * torch.randn(rows, columns, generator=generator))
    # The interpreter has no subnormal bfloat16.
    x[0], x[:, 3], x[9] = 0, 0, 1e-40 if dtype == torch.float32 else 0
    x[5, 7], x[20, 9], x[25, 1] = float("nan"), float("inf"), 1e-30
    return x.to(dtype)


def along(x: torch.Tensor, axis: int) -> torch.Tensor:
    """The matrix whose last axis is this one, and back."""
    return x if axis else x.t().contiguous()


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """The same bits."""
    view = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[found.element_size()]
    assert found.shape == wanted.shape
    assert torch.equal(found.view(view), wanted.contiguous().view(view))


def compare_mixed() -> None:
    """The transform alone, of whole and of partly filled tiles."""
    for axis, dtype, length in (
        (0, torch.float32, 32),
        (0, torch.bfloat16, 16),
        (1, torch.float16, 4),
        (1, torch.bfloat16, 128),
    ):
        x = matrix(32, 384, dtype)
        found = host.mixed(x, host.Rule(None, length, axis))
        assert_same(found, along(hadamard(along(x, axis), length), axis))


def compare(name: str, length: int, axis: int, dtype: torch.dtype, stochastic: bool) -> None:
    """Codes, scales and values."""
    scheme = SCHEMES[name]
    if stochastic:
        scheme = replace(scheme, name=f"{name}_stochastic", rounding="stochastic")
    x = matrix(32, 72 if axis == 0 else 160, dtype)
    rule = host.Rule(scheme, length, axis)
    assert host.covers(x, rule)
    mixed = hadamard(along(x, axis), length) if length else along(x, axis)
    words = None
    if stochastic:
        words = torch.from_numpy(reference.random_bits(tuple(mixed.shape), seed=SEED, stream=STREAM))
    wanted = reference.quantize(mixed, scheme, random_bits=words)
    found = host.quantized(x, rule, SEED, STREAM)
    assert_same(found.codes, along(wanted.codes, axis))
    assert_same(found.scale, along(wanted.scale, axis))
    if wanted.outer is not None:
        assert_same(found.outer, wanted.outer)
    if dtype != torch.bfloat16 or scheme.outer is None:
        values = reference.dequantize(wanted, str(dtype).removeprefix("torch."))
        assert_same(host.quantized_values(x, rule, SEED, STREAM), along(values, axis))


def compare_all() -> None:
    """Compare all cases, a line for each."""
    compare_mixed()
    for case in CASES:
        compare(*case)
        print(*case, flush=True)


def main() -> None:
    """Install the interpreter, and compare all cases."""
    assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 is missing"
    quick_interpreter.install()
    compare_all()
    print("agreed", flush=True)


if __name__ == "__main__":
    main()
