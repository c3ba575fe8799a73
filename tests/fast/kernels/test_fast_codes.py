"""Hot paths of kernels with their inline assembly, emulated; `interpreted_hot` and `interpreted_records` say which."""

import platform

import pytest

from tests.emulator.interpreter_process import lines_of

if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)

# Groups, and how many lines each prints.
GROUPS = {
    "fours": 28, "sixes": 16, "bytes": 28, "integers": 24, "groups": 28, "ranges": 16, "drawn": 35, "codebooks": 5,
    "stretched": 9,
    "producers": 6, "encode": 3,
}  # fmt: skip


# Groups that share a process, which takes five seconds to begin; the producers change what the others use, and come last.
TOGETHER = (
    ("fours", "encode"), ("codebooks", "producers"), ("integers", "sixes", "drawn"), ("groups", "ranges", "stretched"),
    ("bytes",),
)  # fmt: skip


# By night also those that share their sequences with the conventions below, and stochastic rounding.
AT_NIGHT = TOGETHER[2:]


@pytest.mark.parametrize(
    "groups",
    [pytest.param(one, marks=pytest.mark.nightly) if one in AT_NIGHT else one for one in TOGETHER],
    ids="-".join,
)
def test_hot_paths_agree_with_the_reference(groups):
    lines = lines_of("tests/emulator/programs/fast_codes.py", ",".join(groups))
    assert len(lines) == sum(GROUPS[group] for group in groups)


def test_every_group_is_run():
    assert sorted(group for groups in TOGETHER for group in groups) == sorted(GROUPS)


@pytest.mark.parametrize(("part", "cases"), [("day", 7), pytest.param("", 12, marks=pytest.mark.nightly)])
def test_both_axes_of_one_read_agree(part, cases):
    """Five schemes, by night in two dtypes; programs that are filled, and that are not."""
    assert len(lines_of("tests/emulator/programs/training/values.py", *part.split())) == cases


@pytest.mark.parametrize("part", ["day", pytest.param("", marks=pytest.mark.nightly)])
def test_records_at_the_edges_of_the_sequences_agree(part):
    assert len(lines_of("tests/emulator/programs/records.py", *part.split())) == 35


# One record of each way in which ordinary blocks equal a default record's; the program without names tries all, in every dtype.
CONVENTIONS = (
    (
        "torchao.mxfp8_e4m3_floor",
        "torchao.mxfp4_rceil",
        "torchao.mxfp6_e2m3_even",
        "torchao.fp8_1x128_inference",
    ),
    ("torchao.int8_g32", "torchao.int4_g32_asymmetric", "torchao.int8_g32_no_clipping", "torchao.intx4_g32"),
    (
        "torchao.int4_g32_tinygemm",
        "torchao.nvfp4_single_level",
        "torchao.nf4",
        "compressed_tensors.fp8_channel",
    ),
    ("compressed_tensors.nvfp4", "compressed_tensors.int4_g128"),
    # The same sequences under other orders of the outer scale.
    pytest.param(("te.nvfp4", "torchao.nvfp4"), marks=pytest.mark.nightly, id="te.nvfp4-torchao.nvfp4"),
)


@pytest.mark.parametrize("names", CONVENTIONS, ids=lambda names: "-".join(names))
def test_conventions_agree_with_the_reference(names):
    lines = lines_of("tests/emulator/programs/conventions.py", "0/1", "bfloat16", *names)
    assert {line.split()[0] for line in lines} == set(names)
