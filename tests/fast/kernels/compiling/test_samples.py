"""Cases of the day have between them whatever all cases have; nothing is lost to the night but repetitions."""

import platform

import pytest

from tests.fast.kernels.compiling.kernel_samples import by_day, covering, named

NUMBERS = [(2, "a"), (3, "b"), (2, "b"), (5, "a"), (3, "a")]


def both(case):
    return named(number=case[0], letter=case[1])


def is_nightly(one):
    return any(mark.name == "nightly" for mark in one.marks)


def test_few_cases_have_every_feature():
    chosen = covering(NUMBERS, both)
    assert chosen == [0, 1, 3]
    assert {f for at in chosen for f in both(NUMBERS[at])} == {f for case in NUMBERS for f in both(case)}


def test_the_others_run_by_night():
    made = by_day(NUMBERS, both, ids=lambda case: f"{case[0]}{case[1]}")
    assert [one.values for one in made] == NUMBERS
    assert [one.id for one in made if is_nightly(one)] == ["2b", "3a"]
    assert [one.values for one in by_day([7, 8], lambda case: ["same"]) if not is_nightly(one)] == [(7,)]


def test_marks_of_a_case_stay():
    made = by_day([1, 2], lambda case: ["same"], marks=lambda case: [pytest.mark.skip] * (case == 2))
    assert [[mark.name for mark in one.marks] for one in made] == [[], ["skip", "nightly"]]


@pytest.mark.skipif(platform.system() != "Linux", reason="triton has no packages for this system")
def test_every_kernel_and_element_is_compiled_by_day():
    from tests.fast.kernels import test_compile
    from tests.fast.kernels.compiling.kernel_samples import TOGETHER, features_of
    from tests.fast.linear.test_linear_compile import CASES, PARTS, PRODUCTS

    for cases, made in (
        (test_compile.COMPILED, test_compile.with_marks(test_compile.COMPILED)),
        (PRODUCTS, CASES),
    ):
        day = [one.values[-1] for one in made if not is_nightly(one)]
        assert len(day) < len(cases) == len(made)
        assert {f for one in day for f in features_of(one)} == {f for one in cases for f in features_of(one)}
        assert {name for one in day for name in one.kernels} == {
            name for one in cases for name in one.kernels
        }
    assert sorted(one.name for part in PARTS for one in part) == sorted(one.name for one in PRODUCTS)
    assert all(len(part) <= TOGETHER for part in PARTS)
    nights = {(one.values[0], is_nightly(one)) for one in CASES}
    assert len(nights) == len(PARTS), "a part has cases of the day and of the night"
