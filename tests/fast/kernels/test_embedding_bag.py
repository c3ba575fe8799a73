"""`fast.embedding_bag`: its bits in Triton's interpreter, the code made for Hopper, operators, and what the host refuses."""

import platform

import pytest
import torch

import fast
import reference
from reference import SCHEMES, Quantized
from reference.formats.storage import storage_dtype
from tests.emulator.interpreter_process import lines_of
from tests.support.embedding import CASES, Case, bags_of, table_of

if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)

from fast.kernels.layers import embedding_bag as host
from tests.fast.kernels.compiling.kernel_compiler import launched_together

# Issue slots for a byte at the rate of a copy on an H200: 132 multiprocessors, 4 slots a clock of 32 lanes, 4.28 TB/s.
SLOTS_PER_BYTE = 7
#: Bytes of a row of 128 elements with its scale.
ROW = 132


def test_bits_in_the_interpreter():
    """Two cases, and ids outside of the table."""
    assert len(lines_of("embedding", "few")) == 3


@pytest.mark.nightly
def test_bits_of_every_case_in_the_interpreter():
    assert len(lines_of("embedding")) == len(CASES) + 1


def call(name, width=128):
    scheme, rows = SCHEMES[name], 1024
    blocks = 1 if scheme.scale.block == -1 else width // scheme.scale.block
    codes = torch.empty((rows, width * scheme.format.bits // 8), dtype=torch.uint8)
    scale = torch.empty((rows, blocks), dtype=getattr(torch, storage_dtype(scheme.scale.storage)))
    table = Quantized(codes, scale, None, None, (rows, width), 1, scheme, scheme.format.bits < 8)
    ids, offsets = (torch.empty(count, dtype=torch.int64) for count in (4096, 416))
    return lambda: host.embedding_bag(table, ids, offsets, None, "sum", -1, "bfloat16", 26)


def test_rows_are_read_wide_ahead_and_within_the_time_of_memory():
    """A row's codes in words of 16 bytes, those of all ids in flight asked for before the first is scaled; in the loop fewer
    instructions than memory leaves time for at 0.85 of its rate; nothing in shared or local memory but one row of sums."""
    names = ("int8_rowwise", "fp8_rowwise", "int4_g128")
    for name, (code,) in zip(names, launched_together([call(name) for name in names]), strict=True):
        assert (code.local, code.stack) == (0, 0), name
        if name == "int4_g128":  # 8 bytes a thread
            continue
        assert not code.named("LDS", "STS", "BAR")
        loads = [at for at, text in enumerate(code.order) if text.startswith("LDG.E.128")]
        ahead = host.TOGETHER * host.WARP // (16 * 32)
        scaled = next(at for at, text in enumerate(code.order) if at > loads[0] and text.startswith("FMUL"))
        assert loads[ahead - 1] < scaled
        branches = [at for at, text in enumerate(code.order) if text.startswith("BRA")]
        moved = host.TOGETHER * (host.WARP // 128) * ROW
        # The fence behind the loads is a branch too.
        assert 32 * (branches[2] - branches[0]) / moved <= SLOTS_PER_BYTE / 0.85


def test_a_cpu_runs_the_reference_and_programs_an_operator():
    case = Case("int8_rowwise", weighted=True, padding=41)
    q, (ids, offsets, weights) = table_of(case), bags_of(case, 61)
    expected = reference.embedding_bag(q, ids, offsets, weights, padding=41)
    y = fast.embedding_bag(q, ids, offsets, weights, padding=41)
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.nan_to_num(), expected.nan_to_num())

    def bags(ids, offsets, weights):
        return fast.embedding_bag(q, ids, offsets, weights, padding=41, dtype="bfloat16", features=4)

    compiled = torch.compile(bags, backend="aot_eager", fullgraph=True)(ids, offsets, weights)
    assert torch.equal(compiled.nan_to_num(), expected.to(torch.bfloat16).nan_to_num())
    with pytest.raises(TypeError, match="takes a table as a Quantized"):
        fast.embedding_bag(q.codes, ids, offsets)


@pytest.mark.parametrize(
    ("scheme", "width", "size"),
    [
        ("int8_rowwise", 128, 128),
        ("int8_rowwise", 160, 32),
        ("int8_rowwise", 96, 32),
        ("int4_g32", 64, 32),
        ("int8_rowwise", 24, None),
        ("fp8_tensorwise", 128, None),
        ("nvfp4", 128, None),
        ("mxfp6_e2m3", 128, None),
    ],
)
def test_which_tables_the_kernel_reads(scheme, width, size):
    """Pieces are powers of two of elements with one scale; what it does not read the reference computes on the device."""
    q = reference.quantize(torch.ones(4, width), scheme, packed=SCHEMES[scheme].format.bits < 8)
    assert host.covered(q) == size


@pytest.mark.parametrize(
    ("ids", "offsets", "weights", "mode", "error", "message"),
    [
        (torch.zeros(2), torch.zeros(1, dtype=torch.long), None, "sum", TypeError, "ids are integers, got float32"),
        (torch.zeros(1, 2).long(), torch.zeros(1).long(), None, "sum", ValueError, "ids have one axis"),
        (torch.zeros(2).long(), torch.zeros(0).long(), None, "sum", ValueError, "2 ids belong to no bag"),
        (torch.zeros(2).long(), torch.zeros(1).long(), torch.ones(2), "mean", ValueError, "mode='mean' takes none"),
        (torch.zeros(2).long(), torch.zeros(1).long(), torch.ones(3), "sum", ValueError, "for 2 ids"),
    ],
)  # fmt: skip
def test_shapes_are_checked_without_waiting(ids, offsets, weights, mode, error, message):
    with pytest.raises(error, match=message):
        host.embedding_bag(table_of(CASES[0]), ids, offsets, weights, mode, -1, "float32", 1)
