"""Indices, masks and passes of the kernels, in Triton's interpreter; `emulator/programs/kernels.py` says what is compared."""

import platform
import re
from dataclasses import replace

import pytest
import torch
from triton.runtime.jit import JITFunction

import reference
from ao_lab.testing.strategies import assert_same_bits
from fast.kernels import encode
from fast.kernels.quantize import plan as passes
from fast.quantize.rowwise_colwise import both_values, values_and_codes
from reference import SCHEMES
from tests.emulator.interpreter_process import lines_of
from tests.fast.kernels.compiling.kernel_calls import case, dequantize, quantize
from tests.fast.kernels.compiling.kernel_compiler import compiling

# Tensors of 2**31 elements and more: kernels count what they read and write in 64 bits.

if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)


# Whatever places elements itself: pairs packed and a byte each, segments, groups, words.
CASES = (
    case(quantize, "mxfp4"),
    case(quantize, "mxfp4", packed=True),
    case(quantize, "nvfp4", given="outer"),
    case(quantize, "nvfp4", given="outer", packed=True),
    case(quantize, "mxfp6_e2m3", packed=True),
    case(quantize, "int4_g128_asymmetric", packed=True),
    case(quantize, "int3_g128", packed=True),
    case(quantize, "int8_g64_asymmetric"),
    case(quantize, "mxfp4", stochastic=True, packed=True),
    case(dequantize, "int3_g128", packed=True),
    case(dequantize, "int4_g32", packed=True),
    case(dequantize, "mxfp6_e2m3", packed=True),
)
MOVED = re.compile(r"tt\.addptr %\S+, (%\S+) : tensor<([0-9x]+)x!tt\.ptr<\w+>>, tensor<[0-9x]+xi32>")
DEFINED = re.compile(r"^\s*(%\w+)\S* = (.*)$", re.MULTILINE)


def narrow_moves(text):
    """Offsets of 32 bits that depend on the program, but for one number a block, as scales are."""
    made = dict(DEFINED.findall(text))
    ends = [offset for offset, shape in MOVED.findall(text) if not shape.endswith("x1")]
    return [end for end in ends if any("tt.get_program_id" in made[name] for name in reached(made, end))]


def reached(made, end):
    """What a value is made of."""
    found, left = set(), [end]
    while left:
        name = left.pop().split("#")[0]
        if name in made and name not in found:
            found.add(name)
            left += re.findall(r"%\w+", made[name])
    return found


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_elements_are_counted_in_64_bits(one, monkeypatch):
    geometry = passes.geometry
    monkeypatch.setattr(passes, "geometry", lambda blocks: replace(geometry(blocks), wide=True))
    made = []
    with compiling([]):
        run = JITFunction.run
        monkeypatch.setattr(JITFunction, "run", lambda *args, **options: made.append(run(*args, **options)))
        one.call()
        # Before the driver is back.
        monkeypatch.undo()
    (kernel,) = made
    assert "xi64>" in kernel.asm["ttir"]
    assert not narrow_moves(kernel.asm["ttir"])


@pytest.mark.parametrize(("function", "kernel"), [("pack", "pack_kernel"), ("unpack", "unpack_kernel")])
def test_bits_of_long_rows_are_counted_in_64_bits(function, kernel, monkeypatch):
    """A row of 600 million codes from an odd address: the number of a bit does not fit 32."""
    many, made = 600_000_000, []
    memory = torch.empty((many if function == "pack" else many // 2) + 1, dtype=torch.uint8)[1:]
    with compiling([]):
        run = JITFunction.run
        monkeypatch.setattr(JITFunction, "run", lambda *args, **options: made.append(run(*args, **options)))
        encode.pack(memory, "int4") if function == "pack" else encode.unpack(memory, "int4", (many,))
        monkeypatch.undo()
    (compiled,) = made
    assert compiled.metadata.name == kernel
    # The number of a code or byte in its row is the remainder of a 64-bit division, and stays one.
    assert re.search(r"arith\.muli .*: tensor<4096xi64>", compiled.asm["ttir"])
    assert not re.search(r"arith\.(muli|divsi|remsi) .*: tensor<4096xi32>", compiled.asm["ttir"])


@pytest.mark.parametrize("bits", [1, 3, 4, 6])
def test_rows_are_long_where_their_bits_leave_32(bits):
    assert encode.width_of(2**20, 2**20, bits) is False
    assert encode.width_of(2**31, 1024, bits) is True
    assert encode.width_of(2**31 // bits, 2**31 // bits, bits) == 2
    assert 2 * encode.width_of(2**31 // bits - 64, 2**31 // bits - 64, bits) < 4


# Hot paths of kernels with their inline assembly, emulated; `emulator/programs/{fast_codes,conventions}.py` say which.

if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)

# Groups, and how many lines each prints.
CODES_GROUPS = {
    "fours": 28, "sixes": 16, "bytes": 28, "integers": 24, "groups": 28, "ranges": 16, "drawn": 35, "codebooks": 5,
    "stretched": 9,
    "producers": 6, "encode": 3,
}  # fmt: skip


# Groups that share a process, which takes five seconds to begin; the producers change what the others use, and come last.
CODES_TOGETHER = (
    ("fours", "encode"), ("codebooks", "producers"), ("integers", "sixes", "drawn"), ("groups", "ranges", "stretched"),
    ("bytes",),
)  # fmt: skip


# By night also those that share their sequences with the conventions below, and stochastic rounding.
AT_NIGHT = CODES_TOGETHER[2:]


@pytest.mark.parametrize(
    "groups",
    [pytest.param(one, marks=pytest.mark.nightly) if one in AT_NIGHT else one for one in CODES_TOGETHER],
    ids="-".join,
)
def test_hot_paths_agree_with_the_reference(groups):
    lines = lines_of("fast_codes", ",".join(groups))
    assert len(lines) == sum(CODES_GROUPS[group] for group in groups)


def test_every_group_is_run():
    assert sorted(group for groups in CODES_TOGETHER for group in groups) == sorted(CODES_GROUPS)


@pytest.mark.parametrize(("part", "cases"), [("day", 7), pytest.param("", 12, marks=pytest.mark.nightly)])
def test_both_axes_of_one_read_agree(part, cases):
    """Five schemes, by night in two dtypes; programs that are filled, and that are not."""
    assert len(lines_of("training", "values", *part.split())) == cases


@pytest.mark.parametrize("part", ["day", pytest.param("", marks=pytest.mark.nightly)])
def test_records_at_the_edges_of_the_sequences_agree(part):
    assert len(lines_of("conventions", "records", *part.split())) == 35


# One record of each way in which ordinary blocks equal a default record's; the program without names tries all, in every dtype.
CONVENTIONS = (
    (
        "torchao.mxfp8_e4m3_floor",
        "torchao.mxfp4_rceil",
        "torchao.mxfp6_e2m3_even",
        "torchao.fp8_1x128_inference",
        "torchao.fp8_1x128_inference_e5m2",
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
    lines = lines_of("conventions", "conventions", "0/1", "bfloat16", *names)
    assert {line.split()[0] for line in lines} == set(names)


# Both axes of one read: which matrices the kernel takes; elsewhere two reads, the same bits.

MX = [name for name in SCHEMES if name.startswith(("mxfp8", "mxfp6", "mxfp4"))]


def matrix(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", ["mxfp8_e4m3_rceil", "nvfp4", "fp8_1x128"])
def test_they_are_two_calls(name, dtype):
    x, scheme = matrix(64, 256, dtype=getattr(torch, dtype)), SCHEMES[name]
    rows, columns = (reference.fake_quantize(x, scheme, axis=axis) for axis in (1, 0))
    for made, wanted in zip(both_values(x, scheme), (rows, columns), strict=True):
        assert_same_bits(made, wanted)
    values, q = values_and_codes(x, scheme)
    assert_same_bits(values, rows)
    assert_same_bits(q, reference.quantize(x, scheme, axis=0))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_in_a_compiled_program():
    """By operators, whose scales and outer scales find their places."""
    x, scheme = matrix(64, 256), SCHEMES["nvfp4"]
    torch._dynamo.reset()
    made, q = torch.compile(values_and_codes, backend="aot_eager", fullgraph=True)(x, scheme)
    assert_same_bits(made, reference.fake_quantize(x, scheme))
    assert_same_bits(q, reference.quantize(x, scheme, axis=0))
    both = torch.compile(both_values, backend="aot_eager", fullgraph=True)(x, scheme)
    assert_same_bits(both[1], reference.fake_quantize(x, scheme, axis=0))


def test_which_matrices_the_kernel_takes():
    from fast.kernels.both_axes import covers

    scheme = SCHEMES["mxfp8_e4m3"]
    assert all(covers(matrix(*shape), scheme) for shape in ((32, 32), (96, 160), (64, 1024)))
    assert covers(matrix(64, 64, dtype=torch.float16), scheme)
    for x in (matrix(48, 64), matrix(64, 48), matrix(64, 64).t()[:, :32], matrix(2, 32, 32), matrix(0, 32)):
        assert not covers(x, scheme)
    assert not covers(matrix(64, 64, dtype=torch.float32), scheme)


def test_which_schemes_the_kernel_takes():
    """MX floats of both rules and no other default scheme; neither drawn, nor those with other blocks."""
    from fast.kernels.both_axes import covers

    x = matrix(128, 128)
    assert [name for name, scheme in SCHEMES.items() if covers(x, scheme) and "." not in name] == MX
    mx = SCHEMES["mxfp4"]
    assert not covers(x, replace(mx, name="drawn", rounding="stochastic"))
    assert not covers(x, replace(mx, name="short", scale=replace(mx.scale, block=16)))


if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)

# Groups, each as many lines as it has cases, and what has to have answered in them.
GROUPS = {
    "fp8": (36, {"gradient"}),
    "mx": (39, {"gradient", "packed", "tiled"}),
    "integers": (52, {"gradient", "packed"}),
    "two levels": (20, {"gradient", "packed", "outer", "tiled"}),
    "formats": (21, {"stochastic", "packed"}),
    "both": (27, {"both", "layouts"}),
}


# Groups that share a process, which takes five seconds to begin.
TOGETHER = (("fp8", "mx", "both"), ("integers", "two levels", "formats"))


@pytest.mark.parametrize("groups", TOGETHER, ids="-".join)
def test_kernels_agree_with_the_reference(groups):
    """Triton is required here, on any machine: it is among what `make test` installs."""
    lines = lines_of("kernels", "schemes", ",".join(groups))
    assert len(lines) == sum(GROUPS[group][0] for group in groups)
    for group in groups:
        cases, answered = GROUPS[group]
        mine, lines = lines[:cases], lines[cases:]
        assert answered <= set(" ".join(mine).split())


@pytest.mark.parametrize(("part", "cases"), [("day", 19), pytest.param("", 25, marks=pytest.mark.nightly)])
def test_scales_of_scales_agree_with_the_reference(part, cases):
    assert len(lines_of("kernels", "second_level", *part.split())) == cases


@pytest.mark.parametrize(("part", "cases"), [("day", 22), pytest.param("", 35, marks=pytest.mark.nightly)])
def test_gradients_agree_with_the_reference(part, cases):
    assert len(lines_of("gradients", "gradients", *part.split())) == cases


@pytest.mark.parametrize(("part", "cases"), [("day", 24), pytest.param("", 43, marks=pytest.mark.nightly)])
def test_products_agree_with_exact_ones(part, cases):
    assert len(lines_of("linear", "products", *part.split())) == cases


def test_tokens_sorted_by_expert_and_blocks_that_are_mixed():
    assert len(lines_of("training", "grouped")) == 6 + 5
