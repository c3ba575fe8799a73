"""Every family by its record: choices held to measured times, variants that compile, products in the emulator."""

import csv
import math
import platform
import re
from itertools import product
from pathlib import Path

import pytest

if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)

from ao_lab.testing.strategies import assert_same_bits
from experiments.report.families import WEIGHTS, problem_of
from fast import cost
from fast.gemm.families import FAMILIES, HALVES, HOPPER, PLAIN, PRESHUFFLED, SM90, SPARSE, SPARSE_INT4, Device
from reference import SCHEMES as SCHEME
from tests.fast.kernels.compiling.kernel_samples import by_day
from tests.fast.kernels.sm90.machine_code import compiled, complaints
from tests.fast.kernels.sm90.products import multiplied, require_nvrtc
from tests.support.family_times import FILE, OTHERS, measured, problem

ROOT = Path(__file__).resolve().parents[3]
with FILE.open(encoding="utf-8", newline="") as lines:
    TIMED = sorted({row["family"] for row in csv.DictReader(lines)})


#: How much slower than the quickest the choices of a family may be whose coefficients do not say it.
HELD = [{"worst": 0.05, "mean": 0.02}]


@pytest.mark.parametrize("name", TIMED)
def test_choices_are_among_the_quickest(name):
    """Of what was timed, which they are among but for a number of cells; how much slower at most is a coefficient."""
    held, means, untimed = cost._sections().get(name, {}).get("held", HELD), {}, 0
    for key, times in measured(name).items():
        scheme, n, k, rows, experts = key
        facts = {"scheme": scheme, "n": n, "k": k, "rows": sum(map(int, rows.split())), "experts": experts}
        # How a tile is written is no part of its time.
        chosen = times.get(FAMILIES[name].chosen(problem(name, key)).name.partition("_")[0])
        if chosen is None:
            untimed += 1
            continue
        loss = chosen / min(us for variant, us in times.items() if variant not in OTHERS) - 1
        most = cost.first_row(held, **facts)
        assert loss <= most["worst"], (key, loss)
        assert times.get("bf16", math.inf) / chosen >= most.get("dense", 0), key
        mean = next(row["mean"] for row in held if "mean" in row and cost.holds(row, facts))
        means.setdefault((mean, experts), []).append(loss)
    assert means
    assert untimed == sum(row.get("untimed", 0) for row in held)
    for (mean, _), losses in means.items():
        assert sum(losses) / len(losses) <= mean


#: Layers whose variants are compiled, and rows of them.
SHAPES, ROWS = ((14336, 4096), (4096, 14336)), (1, 16, 17, 64, 200, 1024)
#: Weights besides those of the page.
SCHEMES = {
    **WEIGHTS,
    PRESHUFFLED: (*WEIGHTS[PRESHUFFLED], "int4_g128_asymmetric", "int4_g32_asymmetric"),
    PLAIN: (*WEIGHTS[PLAIN], "int3_g32_asymmetric", "int5_g32"),
    SPARSE: ("float16", *WEIGHTS[SPARSE]),
    SPARSE_INT4: ("int4_g128", "int4_g32", "int4_g64", "int4_g128_asymmetric", "int4_g256"),
}
#: Families whose variants spill a little where programs share a multiprocessor.
SPILL = ("sm90_intn_small_m", "sm90_w4a16_gemv")


def chosen_of(shapes, rows, device=HOPPER):
    """(family, scheme, problem, what is chosen) of CUDA C++."""
    for name, family in FAMILIES.items():
        for takes in family.takes if family.chosen else ():
            for scheme, shape, count, inputs in product(SCHEMES[takes.layout], shapes, rows, HALVES):
                p = problem_of(takes.layout, scheme, shape)
                p = p._replace(rows=count, inputs=inputs, device=device, experts=8 * takes.experts)
                if takes.sm90 and family.refusal(p) is None and (one := family.chosen(p)) is not None:
                    yield name, scheme, p, one


def variants():
    """Each once: by day every form, and every tile of one."""
    found = dict.fromkeys((name, one) for name, _, _, one in chosen_of(SHAPES, ROWS))
    return by_day(
        found, lambda case: [*case[1].problem, (case[0], type(case[1].variant), case[1].variant[0])]
    )


@pytest.mark.parametrize(("name", "chosen"), variants())
def test_variants_compile(name, chosen):
    """Without spills and serialized products, within registers."""
    cubin, log = compiled(chosen.kernel, chosen.variant, chosen.problem)
    assert cubin.startswith(b"\x7fELF")
    assert name in SPILL or complaints(log, chosen.variant.threads) == []


def products():
    """Of small layers, on a device that they fill; by day one of each form of a family."""
    found = {}
    for name, scheme, p, one in chosen_of([(128, 512)], (1, 5, 300), Device(SM90, 2, True)):
        if not p.experts:
            found.setdefault((name, one), (name, scheme, p, one))
    return by_day(found.values(), lambda case: [(case[0], case[1])])


@pytest.mark.parametrize(("name", "scheme", "p", "chosen"), products())
def test_products_are_exact(name, scheme, p, chosen):
    """In the emulator, of small integers, bit for bit."""
    require_nvrtc()
    got, expected = multiplied(name, SCHEME.get(scheme), p, chosen.variant)
    assert_same_bits(got, expected)


def test_coefficients_are_read():
    """Each by its name: in the code of its family, which asks for no other; those of a device by what reckons with it."""
    text = {
        path: path.read_text("utf-8") for top in ("fast", "ao_lab") for path in (ROOT / top).rglob("*.py")
    }
    for name, section in cost._sections().items():
        source = "".join(
            code for path, code in text.items() if f'Coefficients("{name}")' in code or name in path.parts
        )
        names = rf"\b(C|TILES|{name.upper()})"
        unread = {key for key in section if key != "held" and not re.search(rf"{names}\.{key}\b", source)}
        assert (name, unread) == (name, set())
    with pytest.raises(AttributeError, match=r"\[choose\] has no 'nothing', but "):
        _ = cost.Coefficients("choose").nothing


def test_rows_of_tables():
    """The first whose conditions hold: a value, one of several names, a range; an empty one where none does."""
    table = [
        {"when": {"rows": [1, 8], "element": ["int4", "nf4"]}, "us": 1},
        {"when": {"fills": True}, "us": 2},
    ]
    of = lambda **facts: cost.first_row(table, **{"rows": 8, "element": "nf4", "fills": False, **facts})  # noqa: E731
    assert (of()["us"], of(rows=9, fills=True)["us"], of(rows=9), of(element="int8")) == (1, 2, {}, {})
    assert cost.quickest([("a", 2.0), ("b", 1.0), ("c", 1.0)]) == "b"
    assert cost.quickest([]) is None
    assert cost.Time(2, 10, 0.5, 1.0, 3.0).total == 15.0
