"""The kernels of `linear_sparse_int4` compile for Hopper as they are meant to: in registers, wide reads before all else, the
sparse tensor core; and the dense weight has the reference's bits."""

import platform
from itertools import product

import pytest
import torch

from tests.emulator.interpreter_process import lines_of

if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)

import fast
from fast import dispatch
from fast.kernels.triton_sparse24_small_m import host
from fast.kernels.triton_sparse24_small_m.dense import STEPS
from fast.kernels.triton_sparse24_small_m.host import arranged_bound, in_place, weight_bound, widened
from tests.fast.kernels.compiling.kernel_compiler import launched
from tests.fast.kernels.compiling.kernel_samples import by_day, named

BF16, F16, FLOAT = torch.bfloat16, torch.float16, torch.float32
UP, DOWN, SQUARE = (14336, 4096), (4096, 14336), (4096, 4096)


def operands(count, shape, group, dtype=BF16, storage=FLOAT, bias=False):
    """Memory that nobody writes or reads."""
    rows, length = shape
    return (
        torch.empty((count, length), dtype=dtype), torch.empty((rows, length // 4), dtype=torch.uint8),
        torch.empty((rows, length // 8), dtype=torch.uint8), torch.empty((rows, length // group), dtype=storage),
        torch.empty(rows, dtype=dtype) if bias else None,
    )  # fmt: skip


#: Calls, and the most instructions of an element of a turn, the whole kernel counted, where the loop is most of it.
CALLS = {
    "one row up": ((1, UP, 128), 2.4), "one row down": ((1, DOWN, 128, F16, BF16), 3.3), "one row g64": ((1, SQUARE, 64), 3.4),
    "one row g32": ((1, UP, 32), 3.1), "one row g256": ((1, SQUARE, 256, BF16, torch.uint16), 3.0),
    "two rows": ((2, UP, 128, BF16, BF16, True), 2.8), "eight rows": ((8, UP, 128), 2.7), "sixteen rows": ((16, UP, 128), 5.2),
    "sixteen rows g32": ((16, SQUARE, 32, F16), 10.7), "64 rows": ((64, UP, 128, BF16, BF16, True), 9.0),
    "cut": ((3, (37, 352), 32), 8.6), "few": ((3, (5, 128), 128), 3.6),
}  # fmt: skip


def features_of(name):
    """Options of a call: groups, dtypes, a bias, whether a row of x is alone, the rows of a tile of sums."""
    (count, shape, group, *rest), _ = CALLS[name]
    return named(
        group=group, rest=tuple(rest), cut=shape[0] % 16 > 0, length=shape[1] % 128 > 0, rows=min(count, 16)
    )


@pytest.mark.parametrize("name", by_day(CALLS, features_of))
def test_the_product(name):
    """No detour of the weight: each register of codes is read once, 8 bytes at a time, indices 16; four products of the sparse
    tensor core for sixteen rows, 128 columns and eight columns of sums."""
    given, most = CALLS[name]
    call = operands(*given)
    rows, length, group = *given[1], given[2]
    tiling = in_place(rows, length, group, given[0])
    (machine,) = launched(lambda: host.linear_sparse_int4(*call, group, None, tiling))
    assert (machine.kernel, machine.local, machine.stack) == ("triton_sparse24_small_m_kernel", 0, 0)
    tiles = tiling.chunks * (1 if rows < 16 * tiling.tiles else tiling.tiles)
    sparse = sum(n for name, n in machine.instructions.items() if name.startswith("HMMA.SP.16832.F32"))
    assert sparse == machine.named("HMMA", "HGMMA") == 4 * tiles * tiling.sums
    read = machine.accesses("LDG")
    # Of small groups the scales of two neighbouring columns of sums too, where a row of them begins at 8 bytes.
    pairs_of_scales = group < 128 and length // group % 2 == 0 and call[3].dtype == FLOAT
    assert read[8] == (4 if pairs_of_scales else 2) * tiles
    assert length % 128 or read[16] == 2 * tiles
    assert machine.count() <= most * 64 * tiles
    # Three programs of four warps at least; of the kernel in front all has been written before anything is read.
    assert machine.registers * 32 * tiling.warps_k * max(1, 12 // tiling.warps_k) <= 65536
    assert machine.order.index("ACQBULK") < min(
        at for at, one in enumerate(machine.order) if one.startswith("LDG")
    )


@pytest.mark.parametrize(
    ("shape", "count"),
    by_day(product([UP, DOWN, SQUARE], [1, 3]), lambda case: named(length=case[0][1], count=case[1])),
)
def test_two_turns_at_a_read(shape, count):
    """Codes 16 bytes at a time, the scales of both turns 8, and registers for four programs of two row tiles."""
    tiling = widened(weight_bound(*shape, 128, count), shape[1], 128, count)
    (machine,) = launched(lambda: host.linear_sparse_int4(*operands(count, shape, 128), 128, None, tiling))
    pairs = tiling.tiles * tiling.chunks // 2
    assert (tiling.wide, machine.local, machine.stack) == (True, 0, 0)
    assert machine.accesses("LDG") == {16: 6 * pairs, 8: 2 * pairs, 4: 16 * tiling.chunks}
    assert machine.named("HMMA") == 8 * pairs
    assert machine.registers <= 128


def test_wide_reads_that_there_are_not():
    for given, group in (((1, SQUARE, 32), 32), ((1, (64, 384), 128), 128)):
        with pytest.raises(ValueError, match="wide reads are of pairs"):
            host.linear_sparse_int4(*operands(*given), group, None, host.Tiling(1, 1, 1, 2, wide=True))


@pytest.mark.parametrize(
    ("shape", "count"),
    by_day(
        product([UP, DOWN, SQUARE, (37, 352)], [3, 16, 33]), lambda case: named(shape=case[0], count=case[1])
    ),
)
def test_arranged_inputs(shape, count):
    """Sixteen bytes at a time, four reads of a column tile and a turn; the first kernel lets the second one begin."""
    group = 32 if shape[1] % 128 else 128
    tiling = arranged_bound(*shape, group, count)
    call = operands(count, shape, group)
    arranging, machine = launched(lambda: host.linear_sparse_int4(*call, group, None, tiling))
    assert [one.kernel for one in (arranging, machine)] == [
        "arrange_kernel",
        "triton_sparse24_small_m_kernel",
    ]
    assert (arranging.local, machine.local, machine.stack) == (0, 0, 0)
    assert arranging.accesses("STG") == {16: 1}
    indices = 2 * tiling.tiles if shape[1] % 128 == 0 else 0
    steps = 2 if machine.named("HMMA") > 4 * tiling.tiles * tiling.chunks * tiling.sums else 1
    assert machine.accesses("LDG")[16] == steps * tiling.chunks * (4 * tiling.sums + indices)
    # All programs of a multiprocessor at once, where the rule counts on it.
    assert machine.registers * 32 * tiling.warps_k * max(1, 8 // tiling.warps_k) <= 65536


@pytest.mark.parametrize(
    "name",
    [
        "one row up",
        "sixteen rows",
        *(pytest.param(one, marks=pytest.mark.nightly) for one in ("one row down", "eight rows")),
    ],
)
def test_reads_come_first(name):
    """What a step reads from the memory is under way before its first product."""
    given, _ = CALLS[name]
    tiling = in_place(*given[1], given[2], given[0])
    (machine,) = launched(lambda: host.linear_sparse_int4(*operands(*given), given[2], None, tiling))
    order = [one for one in machine.order if one.startswith(("LDG.E.EF", "HMMA"))]
    reads = sum(one.startswith("LDG") for one in order)
    assert all(one.startswith("LDG") for one in order[:reads])


def test_the_rule_launches_what_it_chose():
    """Of one row one kernel, of more, by a weight that is worth it, one in front that arranges."""
    names = []
    for call in (operands(1, SQUARE, 128), operands(8, SQUARE, 128)):
        found = launched(lambda call=call: host.linear_sparse_int4(*call, 128))
        names.append([one.kernel for one in found])
    assert names == [["triton_sparse24_small_m_kernel"], ["arrange_kernel", "triton_sparse24_small_m_kernel"]]


def test_what_other_paths_take():
    """More rows, no rows, other floats."""
    x, *weight = operands(65, (64, 256), 64)
    assert host.linear_sparse_int4(x, *weight, 64) is None
    assert host.linear_sparse_int4(x[:0], *weight, 64) is None
    assert host.linear_sparse_int4(x[:1].float(), *weight, 64) is None


def test_calls_are_remembered(monkeypatch):
    """The public function reaches the kernels, the dense weight for many rows."""
    monkeypatch.setattr(dispatch, "has_kernels", lambda x: True)
    few, many = operands(2, (64, 256), 64), operands(65, (64, 256), 64, bias=True)

    def both():
        y = fast.linear_sparse_int4(*few)
        assert (y.shape, y.dtype, len(dispatch.CALLS)) == ((2, 64), BF16, 1)
        assert fast.linear_sparse_int4(*many).shape == (65, 64)
        assert len(dispatch.CALLS) == 2
        return y

    assert [machine.kernel for machine in launched(both)] == [
        "triton_sparse24_small_m_kernel",
        "dense_kernel",
    ]


@pytest.mark.parametrize("dtype", host.INPUTS)
def test_the_dense_weight(dtype):
    _, *weight, _ = operands(1, (64, 1024), 128)
    for zero in (None, torch.empty((64, 8), dtype=torch.int8)):
        (machine,) = launched(lambda zero=zero: host.sparse_int4_dense(*weight, dtype, 128, None, zero))
        assert (machine.kernel, machine.local, machine.stack) == ("dense_kernel", 0, 0)
        # Lanes write 16 bytes beside each other, and nothing goes through shared memory.
        assert machine.accesses("STG") == {16: STEPS}
        assert machine.named("STS", "LDS") == 0
    assert host.sparse_int4_dense(*weight, FLOAT, 128) is None


def test_the_dense_weight_has_the_bits_of_the_reference():
    assert len(lines_of("sparsity", "int4_dense")) == 4
