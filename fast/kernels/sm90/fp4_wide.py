"""Codes of float4_e2m1fn of any float32: float operations as in `words.e2m1_numbers`, sign and NaN for four at a time.

The general rule (`elements.nonnegative_code`) takes 15 instructions an element, most of them at half the rate of these: more
than there is time for while bfloat16 is read and bytes are written.
"""

import triton
import triton.language as tl


def _codes() -> tl.constexpr:
    """NaN saturates to 0 in every term of the number. The sign is that of a minimum, whose bound replaces NaN."""
    text = ".reg .b32 p, q, w, c0, c1, c2, c3, t0, t1, t2, t3; .reg .f32 a, g, h, k; "
    for i in range(4):
        text += f"""abs.f32 a, ${i + 1};
        mul.rn.sat.f32 g, a, 0f3F000000;
        fma.rn.sat.f32 h, a, 0f3F000000, 0fBF800000;
        fma.rn.sat.f32 k, a, 0f3F000000, 0fC0000000;
        fma.rn.f32 g, g, 0f40800000, 0f4B000000;
        fma.rn.f32 g, h, 0f40000000, g;
        add.rn.f32 g, k, g; mov.b32 c{i}, g;
        min.f32 a, ${i + 1}, 0f7F7FFFFF; mov.b32 t{i}, a;
        """
    text += """prmt.b32 p, t0, t1, 0x0073; prmt.b32 q, t2, t3, 0x0073; prmt.b32 w, p, q, 0x5410; shr.u32 w, w, 4;
        prmt.b32 p, c0, c1, 0x0040; prmt.b32 q, c2, c3, 0x0040; prmt.b32 p, p, q, 0x5410;
        lop3.b32 $0, w, 0x08080808, p, 0xEA;"""
    return tl.constexpr(f"{{ {text} }}")


CODES = _codes()


@triton.jit
def e2m1_codes(v):
    """int8 codes of float32 values, nearest even, saturating; 0 for NaN."""
    return tl.inline_asm_elementwise(CODES, "=r,f,f,f,f", [v], dtype=tl.int8, is_pure=True, pack=4)
