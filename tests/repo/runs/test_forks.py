"""Programs in forks end, print and fail as those of an interpreter of their own do.

The records that stand for all others: nothing that decides which code runs is missing among them.
"""

import signal
import socket
from collections.abc import Collection

import pytest

from reference import SCHEMES
from reference.schemes.schemes import Scale, Scheme
from tests.support.record_samples import (
    FIELDS,
    KINDS,
    NAMES,
    PAIRS,
    STRUCTURES,
    covering,
    kinds_of,
    sampled,
    values_of,
)
from tests.support.runs import fork_server, forks


def test_a_program_prints_and_ends():
    done = forks.python("-c", "import sys; print(sys.argv[1:]); print('so', file=sys.stderr)", "a", 2)
    assert (done.returncode, done.stdout, done.stderr) == (0, "['a', '2']\n", "so\n")


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("raise ValueError('no')", 1, "ValueError: no\n"),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('why')", 1, "why\n"),
        ("import sys; sys.exit()", 0, ""),
        ("import os; os.abort()", -signal.SIGABRT, ""),
    ],
)
def test_a_program_fails(code, status, said):
    done = forks.python("-c", code)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.endswith(said)


def test_no_program_sees_another(tmp_path):
    change = "import os, sys, ao_lab; os.environ['LEFT'] = 'x'; ao_lab.left = 1; os.chdir('/'); sys.modules['left'] = 1"
    assert forks.python("-c", change, cwd=tmp_path).returncode == 0
    look = "import os, sys, ao_lab; print('LEFT' in os.environ, hasattr(ao_lab, 'left'), 'left' in sys.modules, os.getcwd())"
    assert forks.python("-c", look, cwd=tmp_path).stdout == f"False False False {tmp_path}\n"


def test_files_modules_and_variables(tmp_path):
    (tmp_path / "program.py").write_text("import os, sys; print(__name__, os.environ['GIVEN'], sys.argv[1:])")
    done = forks.python(tmp_path / "program.py", "a", env={"GIVEN": "here"})
    assert done.stdout == "__main__ here ['a']\n"
    done = forks.python("-m", "ao_lab", "formats", "int4", "--json")
    assert done.returncode == 0, done.stderr
    assert '"max": 7.0' in done.stdout


def test_a_program_that_hangs_is_ended():
    assert forks.python("-c", "import time; time.sleep(60)", timeout=1).returncode == -signal.SIGALRM


def test_workers_share_what_has_imported_the_library(monkeypatch):
    forks.connected("ao_lab")
    monkeypatch.setattr(forks, "start", lambda *_: pytest.fail("started again"))
    with forks.connected.__wrapped__("ao_lab"):
        pass


def test_it_ends_with_the_last_connection(tmp_path, monkeypatch):
    left = iter([True, False])
    monkeypatch.setattr(fork_server, "PATIENCE", 0.01)
    monkeypatch.setattr(fork_server, "is_serving", lambda: next(left))
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        found = fork_server.connections(listener)
        client.connect(str(tmp_path / "socket"))
        next(found).close()
        assert next(found, None) is None
    assert next(left, None) is None


def scales_in(names: Collection[str]) -> list[Scale]:
    return [part for name in names for part in (SCHEMES[name].scale, SCHEMES[name].outer) if part]


def rules_in(names: Collection[str]) -> dict[str, set[object]]:
    """What the sample must have of `SCHEMES`, read from the records themselves."""
    records: list[Scheme] = [SCHEMES[name] for name in names]
    scales, zeros = scales_in(names), [record.zero for record in records if record.zero]
    return {
        "element": {record.element for record in records},
        "rounding": {(record.rounding, record.overflow) for record in records},
        "scale rule": {(scale.rule, scale.compute, scale.stored, scale.statistic) for scale in scales},
        "block": {"rows" if scale.block == -1 else type(scale.block).__name__ for scale in scales},
        "named block": {str(scale.block)[:4] for scale in scales if isinstance(scale.block, str)},
        "partial block": {scale.partial for scale in scales},
        "storage": {scale.storage for scale in scales},
        "floor": {scale.floor and (scale.floor[0], isinstance(scale.floor[1], str)) for scale in scales},
        "zero point": {(zero.rule, zero.storage) for zero in zeros}
        | {record.zero is None for record in records},
        "second level": {(record.outer is None, record.outer_order, record.codes_from) for record in records},
        "scaling": {(record.apply, record.arithmetic) for record in records},
        "special values": {(record.nan, record.negative_zero) for record in records},
        "dequantization": {record.dequantize for record in records},
    }


def test_every_structure_is_sampled():
    assert {values_of(name) for name in STRUCTURES} == {values_of(name) for name in NAMES}
    assert rules_in(STRUCTURES) == rules_in(NAMES)
    assert len(STRUCTURES) < len(NAMES) / 2


def pairs_in(names: Collection[str]) -> set[frozenset[object]]:
    return {frozenset((a, b)) for name in names for a in values_of(name) for b in values_of(name)}


def test_every_pair_of_values_is_sampled():
    assert pairs_in(PAIRS) == pairs_in(NAMES)
    assert rules_in(PAIRS) == rules_in(NAMES)


def test_every_value_of_every_field_is_sampled():
    every = frozenset().union(*(values_of(name) for name in NAMES))
    assert frozenset().union(*(values_of(name) for name in FIELDS)) == every
    for what in ("element", "rounding", "storage", "named block", "partial block", "zero point"):
        assert rules_in(FIELDS)[what] == rules_in(NAMES)[what]
    assert {scale.rule for scale in scales_in(FIELDS)} == {scale.rule for scale in scales_in(NAMES)}


def test_every_kind_is_sampled():
    assert frozenset().union(*map(kinds_of, KINDS)) == frozenset().union(*map(kinds_of, NAMES))


def test_numbers_make_no_structure():
    """Sizes of blocks and bits of integers do not, a name in a number's place, the kind of a block and a zero point do."""
    assert values_of("int2_g32") == values_of("int6_g256")
    assert values_of("fp8_rowwise") == values_of("fp8_rowwise_e5m2")
    for one, other in (
        ("int4_g32", "int4_g32_asymmetric"),
        ("fp8_tensorwise", "fp8_rowwise"),
        ("mxfp4", "mxfp4_rceil"),
        ("mxfp4", "mxint8"),
        ("torchao.int8_g32", "torchao.int6_g32"),
        ("ternary_g32", "stretched2_g32"),
    ):
        assert values_of(one) != values_of(other)


def test_those_outside_a_sample_are_marked():
    given = sampled({"mxfp4"}, ["mxfp4", "nvfp4"])
    assert given == ["mxfp4", pytest.param("nvfp4", marks=pytest.mark.nightly)]


def test_covering_leaves_out_what_adds_nothing():
    features = {"a": {1}, "b": {1, 2}, "c": {3}}
    assert covering(lambda name: frozenset(features[name]), features) == ["b", "c"]
