"""`quantize_rows` by its kernel on CPU tensors in Triton's interpreter, against the codes and scales of the reference.

    TRITON_INTERPRET=1 python tests/emulator/programs/products/static_scales.py

See `programs/kernels.py` for what the interpreter can show.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

import torch
import triton

from ao_lab.testing.strategies import assert_same_bits
from fast.kernels import static_scales
from fast.quantize.static_scales import quantize_rows, rows_record
from reference import SCHEMES, Scales
from tests.emulator import quick_interpreter

#: Scheme, zero point, shape, the first in all dtypes: short rows of which a program takes several, and a row of two parts.
CASES = (
    ("int8_tensorwise", None, (9, 64)), ("int8_tensorwise", None, (3, 77)), ("int8_tensorwise", None, (2, 17001)),
    ("int8_tensorwise", None, (1, 2048)), ("torchao.int8_tensorwise_asymmetric", -7, (9, 64)),
    ("int8_rowwise", None, (40, 24)), ("int8_rowwise_asymmetric", 5, (5, 160)),
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def given(name: str, zero: int | None, count: int) -> Scales:
    """Scales in all or for each row, of ordinary size, zero and infinite."""
    if SCHEMES[name].scale.block == "tensor":
        scale = torch.tensor(0.02)
    else:
        scale = torch.linspace(0.01, 0.05, count)[:, None].contiguous()
        scale[:3] = torch.tensor([[0.0], [float("inf")], [float("nan")]])
    return Scales(scale, None, None if zero is None else torch.full_like(scale, zero, dtype=torch.int8))


def inputs_with_nan(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Random rows beyond the range too, an infinity in some, and a NaN at the end of the first and last row."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul_(2).to(dtype)
    x[::2, 1] = float("inf")
    x[0, -1] = x[-1, -1] = float("nan")
    return x


def compare(name: str, zero: int | None, shape: tuple[int, int], dtype: torch.dtype) -> None:
    scheme, x = SCHEMES[name], inputs_with_nan(shape, dtype)
    scales = given(name, zero, shape[0])
    made = static_scales.quantize_rows(x, scheme, rows_record(scheme.key), scales)
    assert made is not None, "no kernel takes this"
    wanted = quantize_rows(x, scheme, scales)
    for part in ("codes", "scale", "zero"):
        one, other = getattr(made, part), getattr(wanted, part)
        assert (one is None) == (other is None)
        if one is not None:
            assert_same_bits(one, other)
    assert (made.scheme, made.shape, made.axis) == (wanted.scheme, wanted.shape, wanted.axis)
    assert made.scale.isnan().flatten().tolist()[-1]


if __name__ == "__main__":
    assert triton.knobs.runtime.interpret
    quick_interpreter.install()
    for at, case in enumerate(CASES):
        for dtype in DTYPES if at == 0 else DTYPES[at % 3 :][:1]:
            compare(*case, dtype)
        print(*case)
    print("agreed")
