"""`sm90_sparse24_gemm` in the emulator, against the reference bit for bit: metadata, swizzles, barriers, what is written
where.

Products of integers are exact, so what the emulator does not know, how the tensor core rounds, does not enter.
"""

from typing import Any

import pytest
import torch

import reference
from ao_lab.testing.strategies import assert_same_bits
from fast import dispatch
from fast.kernels.sm90_sparse24_gemm import host
from fast.kernels.sm90_sparse24_gemm.arrange import arrange
from fast.kernels.sm90_sparse24_gemm.host import Variant, fitted
from fast.launch.launcher import Call
from tests.emulator.device.stand_in import StandIn
from tests.emulator.faults import assert_seen, every_second
from tests.fast.kernels.sm90.products import require_nvrtc, sparse24_gemm

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


def operands(
    m: int,
    n: int,
    k: int,
    kinds: tuple[str, str],
    *,
    seed: int = 0,
    scaled: bool = True,
    bias: str | None = "float32",
) -> list[Any]:
    """x, values, metadata, bias, x_scale, scale; kinds: of values and x."""
    g = torch.Generator().manual_seed(seed)
    kept = reference.prune(torch.rand(n, k, generator=g))
    # Kept zeros too: their indices must do no harm.
    w = torch.where(kept, torch.randint(-4, 5, (n, k), generator=g).float(), 0.0).to(getattr(torch, kinds[0]))
    x = torch.randint(-4, 5, (m, k), generator=g).to(getattr(torch, kinds[1]))
    values, metadata = reference.compress(w, kept)
    rest = torch.rand(n, generator=g).to(getattr(torch, bias)) if bias else None
    scales = (torch.rand(m, 1, generator=g), torch.rand(n, 1, generator=g) - 0.5) if scaled else (None, None)
    return [x, values, metadata, rest, *scales]


def expected(given: list[Any], name: str) -> torch.Tensor:
    """By the reference."""
    x, values, metadata, bias, x_scale, scale = given
    made: torch.Tensor = reference.linear_sparse(
        x, values, metadata, bias, x_scale=x_scale, scale=scale, out_dtype=name
    )
    return made


#: Variant, dtypes of values and x, shape (M, N, K), output, bias, scales.
CASES = {
    "fp8": (Variant(16, 1, 1, 3, 1, 1), (E4M3, E4M3), (19, 72, 416), "bfloat16", "float32", True),
    "bf16 split in two": (
        Variant(16, 1, 2, 3, 1, 2),
        ("bfloat16",) * 2,
        (13, 70, 336),
        "bfloat16",
        "bfloat16",
        True,
    ),
    "int8 split in four": (Variant(16, 2, 2, 3, 1, 4), ("int8",) * 2, (5, 130, 1056), "int32", None, False),
    "int8 scaled": (Variant(16, 1, 2, 3, 1, 1), ("int8",) * 2, (9, 65, 544), "float16", "float16", True),
    "fp16 in pairs": (
        Variant(32, 2, 1, 3, 2, 1),
        ("float16",) * 2,
        (37, 196, 144),
        "float16",
        "float16",
        True,
    ),
    "mixed fp8": (Variant(32, 1, 2, 2, 1, 1), (E4M3, E5M2), (33, 8, 96), "float32", None, True),
    "e5m2, pairs, splits": (Variant(64, 2, 1, 3, 2, 2), (E5M2, E4M3), (66, 200, 416), "bfloat16", None, True),
    "promoted": (Variant(64, 1, 1, 3, 1, 2, True), (E4M3, E4M3), (65, 72, 672), "float32", "float32", True),
    "splits without steps": (
        Variant(16, 1, 2, 3, 1, 8),
        (E4M3, E4M3),
        (3, 64, 64),
        "float32",
        "float32",
        True,
    ),
    "wide tile": (Variant(128, 2, 1, 3, 2, 1), (E4M3, E4M3), (130, 136, 288), "bfloat16", "float32", True),
    "widest tile": (Variant(256, 2, 1, 4, 2, 1), ("bfloat16",) * 2, (40, 264, 144), "bfloat16", None, False),
    "tiles of 13 chunks": (
        Variant(208, 2, 1, 3, 2, 1),
        ("float16",) * 2,
        (212, 264, 80),
        "float16",
        "float16",
        False,
    ),
    "stored": (
        fitted(128, 2, 1, 2, 1, 16, stored=True),
        ("float16",) * 2,
        (140, 264, 400),
        "float16",
        "float16",
        False,
    ),
    "stored, more stages than steps": (
        fitted(32, 2, 1, 1, 1, 16, stored=True),
        ("bfloat16",) * 2,
        (70, 136, 80),
        "bfloat16",
        None,
        False,
    ),
    "stored by 13 chunks": (
        fitted(208, 2, 1, 2, 1, 16, stored=True),
        ("bfloat16",) * 2,
        (212, 136, 144),
        "float16",
        "float32",
        False,
    ),
    "stored without skew": (
        fitted(64, 2, 1, 1, 1, 16, stored=True)._replace(skew=0),
        ("float16",) * 2,
        (70, 264, 272),
        "float16",
        None,
        False,
    ),
    "four neighbours": (Variant(32, 1, 1, 3, 4, 1), (E4M3, E4M3), (40, 330, 160), "bfloat16", None, True),
    "serial": (Variant(16, 2, 1, 3, 1, 1, False, True), (E4M3, E4M3), (16, 128, 544), "bfloat16", None, True),
}


@pytest.mark.parametrize(
    ("name", "early"),
    [
        pytest.param(name, early, marks=[pytest.mark.nightly] * (early == bool(at % 2)))
        for at, name in enumerate(CASES)
        for early in (True, False)
    ],
)
def test_variants_give_the_bits_of_the_reference(name, early):
    require_nvrtc()
    variant, kinds, shape, out, bias, scaled = CASES[name]
    given = operands(*shape, kinds, bias=bias, scaled=scaled)
    assert_same_bits(sparse24_gemm(variant, out, *given, early=early, seed=1), expected(given, out))


@pytest.mark.parametrize("at", [4, 5])
def test_one_scale(at):
    """Of x, of the weight."""
    require_nvrtc()
    given = operands(17, 72, 96, (E4M3, E4M3))
    given[at] = given[at][:1].clone().reshape(())
    got = sparse24_gemm(Variant(16, 1, 2, 3, 1, 2), "bfloat16", *given, early=True)
    assert_same_bits(got, expected(given, "bfloat16"))


def test_canonical_metadata_is_put_in_order_in_every_call(monkeypatch):
    require_nvrtc()
    monkeypatch.setattr(dispatch, "CALLS", {})
    monkeypatch.setattr(host, "variant_for", lambda *given: Variant(16, 1, 2, 3, 1, 2))
    given, stand_in, key = operands(17, 72, 96, (E4M3, E4M3)), StandIn(early=True), ("linear_sparse", 0, ())
    monkeypatch.setattr(host, "arrange", lambda *given: stand_in.add(arrange(*given)))
    answers, remember = [], dispatch.remember
    monkeypatch.setattr(
        dispatch, "remember", lambda key, call, record: answers.append(call) or remember(key, call, record)
    )

    def both():
        first = host.linear_sparse("bfloat16", True, given, key)
        return first, dispatch.find(key)(*given)

    for made in stand_in.made(both, *given):
        assert_same_bits(made, expected(given, "bfloat16"))
    # Another thread never finds the call of metadata that are in order already.
    assert [isinstance(answer, Call) for answer in answers] == [False]


PUT = "    put<FIRST>(sum, tile, thread);\n"
GROUP = "    sync_group(group);"
#: A fault of the kernel that no test of one variant on a quiet GPU need find: what is changed.
FAULTS = {
    "a stage is handed back while it is read": ("else if (!first_stage) release(before);", "else release(at.stage);"),
    "nobody waits for the copies": ("      wait_for(ring.full + 8 * at.stage, at.parity);\n", ""),
    "a tile is taken before it is put": (PUT + GROUP, PUT),
    "metadata of another instruction": ("words[panel].y);", "words[panel].x);"),
    "values of another instruction": ("a + 4 * panel + 2,", "a + 4 * panel,"),
    "sums in other rows": ("i / 2 % 2 * 8", "i % 2 * 8"),
    "scales of another token": ("load_float(side + 4 * at)", "load_float(side)"),
    "scales are read before they are there": (f"  {GROUP}\n      const Epilogue e", "      const Epilogue e"),
    "metadata is loaded over that of products": ("TWO = LATER && !PROMOTE", "TWO = false"),
    "features beyond the last": ("if (feature + i < p.features) y[i]", "y[i]"),
}  # fmt: skip


#: Faults of tiles that the copy engine writes.
STORED_FAULTS = {
    "a buffer is filled before it was read": ("    if (thread == 0) wait_written<1>();\n", ""),
    "the last tile is not waited for": ("  if (thread == 0) wait_written<0>();\n", ""),
    "nobody lets the second warpgroup begin": ("step - first == SKEW) skew_arrive()", "step - first == SKEW) {}"),
    "biases of other rows": ("thread % 32 / 4 + 8 * i", "thread % 32 / 4 + 4 * i"),
}  # fmt: skip


@pytest.mark.parametrize("fault", STORED_FAULTS)
def test_the_emulator_sees_faults_of_stored_tiles(fault):
    require_nvrtc()
    assert_seen(STORED_FAULTS[fault], is_right_stored, [True])


def is_right_stored(early, change):
    given = operands(70, 136, 208, ("float16",) * 2, bias="float16", scaled=False)
    variant = fitted(64, 2, 1, 1, 1, 16, stored=True)
    made = sparse24_gemm(variant, "float16", *given, early=early, change=change)
    return torch.equal(made, expected(given, "float16"))


@pytest.mark.parametrize("fault", every_second(FAULTS))
def test_the_emulator_sees_faults(fault):
    require_nvrtc()
    assert_seen(FAULTS[fault], is_right)


def is_right(early, change):
    given = operands(19, 70, 1056, (E4M3, E4M3))
    made = sparse24_gemm(Variant(16, 1, 1, 3, 1, 1), "bfloat16", *given, early=early, change=change)
    return torch.equal(made, expected(given, "bfloat16"))
