"""`scaled_mm` without a GPU: its tiles, the shapes it is chosen for, what it refuses, and its launches past Triton's launcher.

Its indices are compared in the interpreter (`tests/emulator/programs/linear.py`), its machine code in `test_linear_compile`.
"""

import platform
from types import SimpleNamespace

import pytest
import torch

if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)

import triton.backends.nvidia.driver as driver

from fast.gemm.choose import codes_beat_torch, takes_codes
from fast.kernels.triton_scaled_mm.host import MANY, WIDE, int_tile_of, is_faster, launches_for, tile_of
from fast.launch import launcher as descriptors
from fast.launch.cuda import MULTIPROCESSORS
from fast.launch.launcher import DirectDescriptors, Matrix
from reference import SCHEMES

#: Bytes of a multiprocessor's memory that programs share.
SHARED = 227 * 1024
ROWS = (2, 16, 17, 48, 64, 65, 128, 129, 256, 1024)
WEIGHTS = (
    (14336, 4096),
    (4096, 14336),
    (4096, 4096),
    (1024, 4096),
    (28672, 8192),
    (8192, 28672),
    (37, 528),
    (256, 16),
)


@pytest.mark.parametrize("fast_sums", [False, True])
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("rows", ROWS)
def test_tiles(rows, weight, fast_sums):
    """They fit a multiprocessor, have rows enough for few rows, and all but those of short sums keep it busy."""
    tile = tile_of(rows, *weight, fast_sums)
    assert (tile.rows + tile.columns) * tile.length * tile.stages < SHARED
    assert tile.rows >= min(rows, 128)
    assert (tile.columns if tile.swap else tile.rows) >= 64
    assert fast_sums or tile.length == 128
    programs = -(-rows // tile.rows) * -(-weight[0] // tile.columns) * tile.splits
    assert tile.splits == 1 or (weight[1] > 8192 and programs <= MULTIPROCESSORS)


@pytest.mark.parametrize(
    ("rows", "weight", "precise", "faster"),
    [
        (16, (14336, 4096), True, True), (64, (14336, 4096), True, True), (128, (14336, 4096), False, False),
        (128, (4096, 14336), True, True), (128, (8192, 8192), True, True), (256, (4096, 4096), False, True),
        (512, (4096, 4096), False, False), (1024, (1024, 2048), False, True), (2048, (1024, 1024), False, False),
        (16384, (14336, 4096), False, False), (1, (4096, 4096), False, False), (17, (4096, 4096), False, False),
        (24, (14336, 4096), True, True), (48, (4096, 4096), False, False), (96, (8192, 8192), False, False),
        (192, (4096, 4096), False, False), (16, (11008, 4096), False, False), (16, (4096, 272), False, False),
        (16, (4104, 4096), False, False), (16, (256, 4096), False, False),
    ],
)  # fmt: skip
def test_which_shapes_it_is_chosen_for(rows, weight, precise, faster):
    """Those that were measured, with a scale for each row; with one for each matrix none. Precise sums: few rows alone."""
    assert is_faster(rows, *weight, rowwise=True, fast_sums=True) == faster
    assert is_faster(rows, *weight, rowwise=True, fast_sums=False) == precise
    assert not is_faster(rows, *weight, rowwise=False, fast_sums=True)
    keys = [SCHEMES[name].key for name in ("fp8_rowwise", "fp8_tensorwise")]
    chosen = [codes_beat_torch(a, b, weight, rows, True) for a in keys for b in keys]
    assert chosen == [faster, faster, faster, False]


def test_whole_waves_of_fast_sums_have_wide_tiles():
    """Precise ones have no registers for them; integers have a rule of their own; few rows none of a vocabulary's columns."""
    assert tile_of(6144, 8192, 18432, True) == tile_of(8192, 1024, 3456, True) == WIDE
    assert tile_of(6144, 8192, 18432, False).columns == tile_of(4096, 1024, 3456, True).columns == 128
    assert int_tile_of(6144, 8192, 18432) == MANY
    assert [tile_of(rows, 128_256, 4096, True).columns for rows in (2, 16, 64, 128, 129)] == [
        64,
        64,
        64,
        64,
        256,
    ]


def test_what_it_takes():
    """Rows of whole descriptors, 8-bit floats, and all three dtypes; one row is another kernel's."""
    for name, shape, dtype, taken in (
        ("fp8_rowwise", (2, 64, 528), torch.float16, True), ("fp8_tensorwise_e5m2", (300, 1, 16), torch.float32, True),
        ("fp8_rowwise", (2, 64, 520), torch.bfloat16, False), ("fp8_rowwise", (0, 64, 512), torch.bfloat16, False),
        ("fp8_rowwise", (2, 0, 512), torch.bfloat16, False), ("fp8_rowwise", (2, 64, 512), torch.float64, False),
        ("int8_rowwise", (2, 64, 512), torch.bfloat16, True),
    ):  # fmt: skip
        scheme = SCHEMES[name]
        assert (launches_for(scheme, scheme, shape, dtype) is not None) == taken
        assert takes_codes(scheme.key, scheme.key, shape[1:], dtype, shape[0]) == taken
    mixed = SCHEMES["fp8_rowwise"], SCHEMES["int8_rowwise"]
    assert launches_for(*mixed, (2, 64, 512), torch.bfloat16) is None


def compiled(launcher, hidden=False):
    """A kernel with two descriptors and a pointer as the installed Triton wraps its launcher; hidden: as no known version."""
    meta = ["first", "second"]
    signature = {"a": "tensordesc<u8[16,128]>", "b": "tensordesc<u8[16,128]>", "c": "*fp32", "d": "constexpr"}

    class Run:
        global_scratch_size = profile_scratch_size = 0

        def __call__(self, *given):
            self.launch(*given[:5], None, None, None, None, None, None, given[9:])

    run = Run()
    run.launch = launcher if hidden else driver.wrap_handle_tensordesc(launcher, signature, meta)
    return SimpleNamespace(
        run=run, function=5, packed_metadata=(4, 1, 0), metadata=SimpleNamespace(tensordesc_meta=meta)
    )


@pytest.fixture
def described(monkeypatch):
    """Descriptors that were made: the matrix's address and shape, and how the kernel wants it."""
    made = []

    def describe(argument, layout):
        made.append((argument.base.data_ptr(), argument.shape, argument.strides, layout))
        return [f"map {len(made)}", *argument.shape, *argument.strides]

    monkeypatch.setattr(driver, "make_tensordesc_arg", describe)
    return made


LEFT, RIGHT = (Matrix(torch.float8_e4m3fn, shape, (16, 128)) for shape in ((16, 256), (64, 256)))


def test_a_descriptor_is_made_once_for_an_address(described, monkeypatch):
    monkeypatch.setattr(descriptors, "MOST_DESCRIPTORS", 2)
    launched = []
    kernel = compiled(lambda *given: launched.append(tuple(given[-1])))
    launch = DirectDescriptors(kernel, (3, 1, 1), 3, ("tail",), (LEFT, RIGHT)).function
    for left in (160, 320, 160):
        launch(9, [left, 640, 77])
    assert launched == [
        (f"map {i}", 16, 256, 256, 1, "map 2", 64, 256, 256, 1, 77, "tail") for i in (1, 3, 1)
    ]
    assert described == [
        (160, [16, 256], [256, 1], "first"), (640, [64, 256], [256, 1], "second"), (320, [16, 256], [256, 1], "first")
    ]  # fmt: skip
    # Two addresses are kept: the one that was not used for longest is described again.
    launch(9, [480, 640, 77])
    launch(9, [320, 640, 77])
    assert [entry[0] for entry in described[3:]] == [480, 320]


def test_a_launcher_of_another_version_goes_on_making_descriptors(described):
    """It is given what it reads of Triton's own: base, shape, strides."""
    launched = []
    kernel = compiled(lambda *given: launched.append(given[-1]), hidden=True)
    DirectDescriptors(kernel, (3, 1, 1), 3, ("tail",), (LEFT, RIGHT)).function(9, [160, 640, 77])
    ((left, right, *rest),) = launched
    assert (left.base.data_ptr(), left.shape, right.base.data_ptr(), rest) == (
        160,
        [16, 256],
        640,
        [77, "tail"],
    )
    assert not described


def test_a_tensor_at_an_odd_address_is_copied():
    odd = torch.arange(16 * 256 + 1, dtype=torch.int32).to(torch.uint8)[1:].view(16, 256)
    made = LEFT.of(odd).base
    assert made.data_ptr() % 16 == 0
    assert torch.equal(made.view(torch.uint8), odd)
