"""Hot paths of kernels with their inline assembly, emulated; `interpreted_hot` and `interpreted_records` say which."""

import platform

import pytest

from tests.interpreter_process import lines_of

if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)

# Each group is a process: how many lines it prints before the last.
GROUPS = {
    "fours": 28, "sixes": 16, "bytes": 28, "integers": 24, "groups": 28, "ranges": 16, "drawn": 35, "codebooks": 5,
    "stretched": 9,
    "producers": 6, "encode": 3,
}  # fmt: skip


@pytest.mark.parametrize("group", GROUPS)
def test_hot_paths_agree_with_the_reference(group):
    assert len(lines_of("tests/interpreted_hot.py", group)) == GROUPS[group]


def test_records_at_the_edges_of_the_sequences_agree():
    assert len(lines_of("tests/interpreted_records.py")) == 34
