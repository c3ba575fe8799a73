"""What kernels in Gluon share: elements along the axes of a tile, the same for many, rows, and the output's dtype."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from fast.kernels.layers.swiglu import silu
from fast.kernels.sm90.bf16x2 import clamped_gate, gated

# That is: silu(gate) * up of sums in a program's registers, in Gluon: what `swiglu` makes of two products, a few elements at
# a time.


@gluon.jit
def gated_sums(gate, up, DTYPE: gl.constexpr):
    """silu(gate) * up of float32 values that are rounded to a 16-bit dtype first, as two products by themselves are."""
    g, u = narrowed(gate, DTYPE), narrowed(up, DTYPE)
    # Element by element: pairs of 16-bit floats need not lie in one lane here.
    return gated(silu(clamped_gate(g, DTYPE, False), DTYPE, True), g, u, DTYPE, False, False)


@gluon.constexpr_function
def _axis_layout(axis, rank, layout):
    """The layout of one axis of a tile."""
    for other in reversed(range(rank)):
        layout = layout if other == axis else gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def axis_range(COUNT: gl.constexpr, AXIS: gl.constexpr, RANK: gl.constexpr, LAYOUT: gl.constexpr):
    """0 to COUNT - 1 along one axis of a tile."""
    i = gl.arange(0, COUNT, layout=_axis_layout(AXIS, RANK, LAYOUT))
    for other in gl.static_range(RANK):
        if other != AXIS:
            i = gl.expand_dims(i, other)
    return i


@gluon.jit
def broadcast_to_tile(v, SHAPE: gl.constexpr, FROM: gl.constexpr, TILE: gl.constexpr):
    """Elements of some axes of a tile for the whole tile; raises at compile time if that moved data between lanes."""
    v = gl.convert_layout(v, FROM, assert_trivial=True)
    v = gl.broadcast(v, gl.zeros(SHAPE, gl.int32, FROM))[0]
    return gl.convert_layout(v, TILE, assert_trivial=True)


@gluon.jit
def row_of(row, rows, WIDE: gl.constexpr):
    """Rows of a weight, beyond the last one the last; WIDE: as 64 bits."""
    row = gl.minimum(row, rows - 1)
    return row.to(gl.int64) if WIDE else row


@gluon.jit
def word_of(WARPS_K: gl.constexpr, TILE: gl.constexpr):
    """Offsets of the words of 4 bytes that WARPS_K warps take of a row at once, four neighbours a lane: (WARPS_K, 1, 32, 4)."""
    return (axis_range(WARPS_K, 0, 4, TILE) * 32 + axis_range(32, 2, 4, TILE)) * 4 + axis_range(4, 3, 4, TILE)


@gluon.jit
def as_words(codes):
    """The same address as a pointer to words of 4 bytes."""
    return codes.to(gl.pointer_type(gl.int32), bitcast=True)


@gluon.jit
def words_of_rows(codes, row, word, LENGTH: gl.constexpr):
    """Pointers to these words of rows of LENGTH bytes: (WARPS_K, rows, 32, 4)."""
    return as_words(codes) + (row * (LENGTH // 4) + word)


@gluon.jit
def select_pointers(one, other, which):
    """Pointers of the first where `which` is 0 and of the second elsewhere; of the first where there is no second."""
    if other is None:
        return one
    else:
        return gl.where(which == 0, one, other)


@gluon.jit
def wait_for_previous(USE_PDL: gl.constexpr):
    """Wait for the kernel before this one, where this one may begin while that one ends (programmatic dependent launch).

    Then the one behind may begin, if it was launched so. Where each kernel waits before it lets the next one begin, what lies
    further in front than the neighbour has ended by then.
    """
    if USE_PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip


@gluon.jit
def as_scale(s, STORAGE: gl.constexpr):
    """Scales as float32, stored as float32, bfloat16, float16 or e8m0."""
    if STORAGE == "bfloat16":
        return (s.to(gl.int32) << 16).to(gl.float32, bitcast=True)
    elif STORAGE == "float16":
        return s.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    elif STORAGE == "float8_e8m0fnu":
        # 2**-127 is a subnormal float32, and the last code is NaN.
        e = s.to(gl.int32)
        return gl.where(e == 0, 0x00400000, gl.where(e == 255, 0x7FC00000, e << 23)).to(
            gl.float32, bitcast=True
        )
    else:
        return s


@gluon.jit
def narrowed(v, DTYPE: gl.constexpr):
    """float32 as the output's dtype, NaN canonical."""
    if DTYPE == "float32":
        return gl.where(v != v, gl.to_tensor(0x7FC00000).to(gl.float32, bitcast=True), v)
    else:
        nan: gl.constexpr = 0x7FC0 if DTYPE == "bfloat16" else 0x7E00
        kind: gl.constexpr = gl.bfloat16 if DTYPE == "bfloat16" else gl.float16
        bits = v.to(kind).to(gl.int16, bitcast=True)
        return gl.where(v != v, gl.to_tensor(nan).to(gl.int16), bits).to(kind, bitcast=True)
