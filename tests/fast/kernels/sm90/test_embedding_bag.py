"""`sm90_embedding_bag` in the emulator, bit for bit with the reference; planted faults; what is compiled, and what is taken."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import reference
from fast.kernels.layers import embedding_bag as triton_kernel
from fast.kernels.layers import sm90_embedding_bag as host
from fast.kernels.layers.sm90_embedding_bag import KERNEL, VARIANT, Problem, Variant
from reference import Quantized
from tests.emulator.device.stand_in import StandIn
from tests.emulator.faults import assert_seen, unchanged
from tests.fast.kernels.sm90.machine_code import compiled, complaints, disassembled
from tests.fast.kernels.sm90.products import require_nvrtc
from tests.support.embedding import BAD, Case, bags_of, table_of

#: Small pieces, so that a warp has several, and programs of two warps.
SMALL, EACH = Variant(2, 8, 3, 1), 5
CASES = {
    "int8": Case("int8_rowwise", lengths=(3, 0, 1, 7, 20), bags=13, dtype="bfloat16"),
    "int8, two lines, means": Case("int8_rowwise", width=256, mode="mean", ids=torch.int32),
    "fp8": Case("fp8_rowwise", dtype="float16", lengths=(9, 1, 0)),
    "int8, a line and a quarter": Case("int8_rowwise", width=160, lengths=(9, 1, 0)),
    "int8, large": Case("int8_rowwise", large=True),
    "fp8, large": Case("fp8_rowwise", large=True, lengths=(9, 1)),
}
ASSERTION = "    __assertfail("


def refusing(text):
    """A store that the emulator refuses in place of the assertion, which no emulator has."""
    head, _, tail = text.rpartition(ASSERTION)
    return f"{head}*reinterpret_cast<volatile int*>(8) = 1;{tail.partition(', 1);')[2]}"


def sums(case, q, ids, offsets, change=unchanged, variant=SMALL, **device):
    """What the kernel makes of bags."""
    problem = host.problem_of(q, ids, offsets, case.mode, case.dtype)
    out = torch.full((len(offsets), q.shape[1]), 7.0, dtype=getattr(torch, case.dtype))
    device = StandIn(change=lambda text: refusing(change(text)), **device)
    device.made(
        lambda: host.embedding_bag(q, ids, offsets, out, problem, variant, EACH),
        q.codes,
        q.scale,
        ids,
        offsets,
        out,
    )
    return out


def is_right(name, change=unchanged, **how):
    """Whether the sums of a case have the reference's bits."""
    case = CASES[name]
    q = table_of(case)
    ids, offsets, _ = bags_of(case, q.shape[0])
    ids[0] = q.shape[0] - 1
    if case.large:
        # From outside: products of finite numbers that overflow, infinities.
        q.scale[ids[1]], q.scale[ids[-1]] = 2.0**125, float("inf")
    found = sums(case, q, ids, offsets, change, **how)
    expected = reference.embedding_bag(q, ids, offsets, mode=case.mode, dtype=case.dtype)
    carrier = torch.int32 if case.dtype == "float32" else torch.int16
    return torch.equal(found.view(carrier), expected.view(carrier))


@pytest.mark.parametrize("name", CASES)
def test_bits(name):
    """Empty bags, bags over the ends of pieces, NaN, infinities, products that overflow; copies late, then early."""
    require_nvrtc()
    assert is_right(name)
    assert name != "int8" or is_right(name, early=True)
    assert name != "fp8" or is_right(name, variant=SMALL._replace(stages=2))


def test_rows_of_any_pitch():
    """Codes and scales in one buffer."""
    require_nvrtc()
    case = CASES["int8"]
    q = table_of(case)
    rows = torch.zeros((q.shape[0], 144), dtype=torch.uint8)
    rows[:, :128], rows[:, 128:132] = q.codes.view(torch.uint8), q.scale.view(torch.uint8)
    beside = replace(q, codes=rows[:, :128].view(q.codes.dtype), scale=rows.view(torch.float32)[:, 32:33])
    ids, offsets, _ = bags_of(case, q.shape[0])
    stand_in = StandIn(change=refusing)
    stand_in.add(rows)
    out = torch.empty((len(offsets), 128), dtype=torch.bfloat16)
    problem = host.problem_of(beside, ids, offsets, case.mode, case.dtype)
    stand_in.made(
        lambda: host.embedding_bag(beside, ids, offsets, out, problem, SMALL, EACH), ids, offsets, out
    )
    expected = reference.embedding_bag(q, ids, offsets, dtype="bfloat16")
    assert torch.equal(out.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("bad", BAD)
def test_ids_outside_end_in_the_assertion(bad):
    require_nvrtc()
    case = CASES["int8"]
    q = table_of(case)
    ids, offsets, _ = bags_of(case, q.shape[0])
    ids[len(ids) // 2] = q.shape[0] if bad > 0 else bad
    with pytest.raises((ValueError, LookupError)):
        sums(case, q, ids, offsets)


#: A piece of the source and what takes its place.
FAULTS = {
    "a piece is not waited for": ('"n"(STAGES - 1)', '"n"(STAGES)'),
    "read over the piece that is added up": ("shared + slot * STAGE, ahead", "shared + (slot + 1) % STAGES * STAGE, ahead"),
    "ids of the piece before": ("  read_ids(ahead);\n  return", "  return"),
    "a line's first sixteen bytes": ("lane % 8 * 16", "lane % 4 * 16"),
    "the scale of the piece's first row": ("scale = scales[i]", "scale = scales[0]"),
    "a scale's place is the next piece's": ("COPY * lane + beyond", "COPY * lane + ahead.beyond[0]"),
    "codes without a sign": ("word ^ 0x80808080", "word"),
    "products beyond the largest float32": ("if (SATURATED) product", "if (false) product"),
    "every bag ends with the warp's last": ("min(__shfl_sync(ALL, own_end, bag), last)", "last"),
    "means by the ids of a warp": ("max(end - begin, 1)", "max(last, 1)"),
    "the first line for all": ("p.codes + part * LINE", "p.codes"),
    "NaN as it comes": ("min.s16x2", "max.s16x2"),
    "lanes behind a row store": ("if (4 * lane < wide) store", "store"),
    "scales behind the last one are read": ("from - beyond + 12 <= last", "true"),
    "bytes behind a row are read": ("&& ahead.copies", ""),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_sees(fault):
    require_nvrtc()
    assert_seen(FAULTS[fault], lambda name, change: is_right(name, change), list(CASES))


#: Instructions of four rows of the loop that adds up without saturating.
FOUR_ROWS = {0: 84, 1: 84}


@pytest.mark.parametrize("element", FOUR_ROWS)
def test_compiled(element):
    """No spills; rows by copies of 16 bytes; few enough instructions a row."""
    problem = Problem(element, True, False, 1)
    cubin, log = compiled(KERNEL, VARIANT, problem)
    assert complaints(log, VARIANT.threads * VARIANT.resident) == []
    lines = [line.text for line in disassembled(cubin).lines]
    copies = [line for line in lines if line.startswith("LDGSTS.E.BYPASS.128")]
    assert len(copies) == VARIANT.stages * (VARIANT.rows // 4 + 1)
    branches = [at for at, line in enumerate(lines) if line.startswith("BRA")]
    loops = [
        end - begin for begin, end in pairwise(branches)
        if sum(line.startswith("LDS") for line in lines[begin:end]) == 8
    ]  # fmt: skip
    assert len(loops) == 2
    assert min(loops) <= FOUR_ROWS[element]


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        (Case("int8_rowwise"), Problem(0, True, False, 0)),
        (
            Case("fp8_rowwise", width=384, mode="mean", ids=torch.int32, dtype="float16"),
            Problem(1, False, True, 2),
        ),
        (Case("int8_rowwise", width=96), Problem(0, True, False, 0)),
        (Case("int8_rowwise", width=64), None),
        (Case("int8_rowwise", width=104), None),
        (Case("int8_rowwise_asymmetric"), None),
        (Case("int4_g128_asymmetric"), None),
        (Case("torchao.fp8_rowwise_training"), None),
        (Case("mxfp8_e4m3"), None),
    ],
    ids=lambda one: getattr(one, "scheme", None),
)
def test_what_is_taken(case, problem):
    """Nothing without a GPU; what is not taken Triton's kernel or the reference adds up."""
    q = table_of(case)
    ids, offsets, weights = bags_of(case, q.shape[0])
    assert host.problem_of(q, ids, offsets, case.mode, case.dtype) == problem
    assert host.taken(q, ids, offsets, weights, case.mode, -1, case.dtype) is None
    shifted = Quantized(torch.empty(q.codes.numel() + 1, dtype=q.codes.dtype)[1:].view(q.codes.shape), q.scale, q.outer,
                        q.zero, q.shape, q.axis, q.scheme, q.packed)  # fmt: skip
    assert host.problem_of(shifted, ids, offsets, case.mode, case.dtype) is None
    assert triton_kernel.OUTSIDE in (KERNEL.folder / "sm90_embedding_bag.cu").read_text()


@pytest.mark.parametrize(
    ("ids", "bags", "each"), [(214 * 8192, 26 * 8192, 26), (8192, 8192, 8), (100, 2, 1), (0, 4096, 4)]
)
def test_bags_of_a_warp(ids, bags, each):
    """A sample of DLRMv2; fewer where a batch is small."""
    assert host.bags_of_a_warp(ids, bags, 1) == each
