"""The mutation check itself: every mutation still applies to today's text (`make mutation` runs them)."""

import ast

import pytest

from tests.repo.mutation import MUTATIONS, ROOT, copy_tree, mutate


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_applies_exactly_once(mutation):
    text = (ROOT / "reference" / mutation.file).read_text()
    assert text.count(mutation.old) == 1
    ast.parse(text.replace(mutation.old, mutation.new))
    for argument in mutation.tests.split():
        if argument.startswith("tests/"):
            assert (ROOT / argument).is_file()


def test_mutations_are_many():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 14
    assert len({mutation.file for mutation in MUTATIONS}) >= 10


def test_a_text_that_is_gone_is_reported(tmp_path):
    copy_tree(tmp_path)
    mutation = MUTATIONS[0]
    assert mutate(tmp_path, mutation)
    assert not mutate(tmp_path, mutation)
