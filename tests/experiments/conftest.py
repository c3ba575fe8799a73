"""What tests of experiments on real models start from."""

import pytest

from tests.support.models import hf_models


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The folder of a small random language model, named tiny-llama, whose head is tied; nothing is written into it."""
    pytest.importorskip("transformers")
    made = tmp_path_factory.mktemp("models") / "tiny-llama"
    hf_models.save_llama(made, tied=True)
    return made
