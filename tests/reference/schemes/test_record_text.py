"""Records as text: the same record in any process."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from reference import SCHEMES
from reference.schemes.record_text import record_of, scheme_fields, scheme_from
from reference.schemes.schemes import RECORDS

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_fields_and_names(name):
    scheme = SCHEMES[name]
    result = scheme_from(json.loads(json.dumps(scheme_fields(scheme))))
    assert result == scheme
    assert (result.key, scheme.key) == (name, name)
    assert record_of(name) == scheme


def test_names_are_those_of_a_new_process():
    """Records that only serve to make others have names too, and none of them takes a record's place."""
    script = (
        "from reference.schemes.record_text import record_of; from reference.schemes.schemes import SCHEMES; "
        "print([name for name, scheme in SCHEMES.items() if record_of(name) != scheme])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_a_record_of_ones_own_travels_with_its_fields():
    own = replace(SCHEMES["nvfp4"], name="mine", dequantize="ieee", deviations=("a", "b"))
    del RECORDS[own.key]
    assert record_of(own.key) == own
    assert record_of(own.key) is record_of(own.key)
    # A known name with other fields is another record, and leaves the known one alone.
    other = replace(SCHEMES["mxfp4"], negative_zero=False)
    assert other.key != "mxfp4"
    assert record_of(other.key) == other
    assert record_of("mxfp4") == SCHEMES["mxfp4"]


def test_another_process_understands_the_text():
    own = replace(SCHEMES["fp8_128x128"], name="mine", deviations=("a",))
    script = f"from reference.schemes.record_text import *; print(record_of({own.key!r}).key)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == own.key


def test_other_texts_are_refused():
    with pytest.raises(ValueError, match="unknown scheme"):
        record_of("mxfp5")
    with pytest.raises(TypeError):
        record_of('{"name": "mine", "unknown": 3}')
