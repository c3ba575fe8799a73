"""The kernel of embedding bags on CPU tensors in Triton's interpreter, against `reference.embedding_bag`, bit for bit.

TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process embedding
"""

from __future__ import annotations

import pytest
import torch
from triton.runtime import interpreter

import reference
from fast.kernels.layers import embedding_bag as host
from tests.support.embedding import BAD, CASES, Case, bags_of, table_of


def kernel(
    case: Case, q: reference.Quantized, ids: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    """The kernel's sums."""
    padding = -1 if case.padding is None else case.padding
    y = host.embedding_bag(q, ids, offsets, weights, case.mode, padding, case.dtype, case.features)
    assert y is not None, case
    return y


def main(few: str = "") -> None:
    """Each case, four ids at a time and two of what is left of a bag; then ids that are outside."""
    host.TOGETHER, host.FEW = 4, 2
    for case in CASES[1:3] if few else CASES:
        q = table_of(case)
        ids, offsets, weights = bags_of(case, q.shape[0])
        found = kernel(case, q, ids, offsets, weights)
        expected = reference.embedding_bag(
            q, ids, offsets, weights, mode=case.mode, padding=case.padding, dtype=case.dtype
        )
        carrier = torch.int32 if case.dtype == "float32" else torch.int16
        different = int((found.view(carrier) != expected.view(carrier)).sum())
        assert not different, f"{case}: {different} of {found.numel()} values differ"
        print(case)
    case = CASES[0]
    q = table_of(case)
    ids, offsets, _ = bags_of(case, q.shape[0])
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(debug=True)
    for bad in BAD:
        wrong = ids.clone()
        wrong[len(ids) // 2] = q.shape[0] if bad > 0 else bad
        with pytest.raises(interpreter.InterpreterError, match=host.OUTSIDE):
            kernel(case, q, wrong, offsets, None)
    print("ids outside end in an assertion")
