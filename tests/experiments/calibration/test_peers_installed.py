"""Other projects' own code through the driver, in the interpreters that AO_LAB_PEERS names (parted as in PATH): what comes
back lies on the scheme's grid and near the weights, and parameters that no layer holds are as they were."""

import os

import pytest
import torch

from experiments.calibration.peers import exchange
from experiments.calibration.peers.records import PEERS, PeerScheme
from tests.support.models import hf_models

pytestmark = pytest.mark.nightly
PYTHONS = tuple(filter(None, os.environ.get("AO_LAB_PEERS", "").split(os.pathsep)))
#: A scheme for each kind of elements, and the relative error that rounding to it may have twice of.
SCHEMES = {
    "": (PeerScheme(4, 64, False), 0.1),
    "mxfp4": (PeerScheme(4, 32, True, "mxfp4"), 0.12),
    "nvfp4": (PeerScheme(4, 16, True, "nvfp4"), 0.1),
}
CASES = [(name, element) for name, arm in PEERS.items() for element in arm.elements if "best" not in name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("models") / "tiny-llama"
    hf_models.save_llama(made, tied=True)
    (made / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return made


@pytest.mark.parametrize(("name", "element"), CASES)
def test_a_peer_quantizes_a_small_model(folder, name, element):
    from transformers import AutoModelForCausalLM

    if not PYTHONS or not exchange.available(name, PYTHONS):
        pytest.skip(f"{PEERS[name].peer} is in no interpreter of AO_LAB_PEERS")
    scheme, error = SCHEMES[element]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    before = {one: parameter.detach().clone() for one, parameter in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    batches = list(torch.randint(0, 300, (16, 64), generator=generator).split(1))
    exchange.quantized_by_peer(name, scheme, model, folder, batches, 0, PYTHONS)
    for one, parameter in model.named_parameters():
        if one.endswith("proj.weight"):
            check_grid(parameter, scheme)
            change = (parameter.float() - before[one].float()).norm() / before[one].float().norm()
            assert 0 < change < 2 * error, one
        elif "AWQ" not in name:
            assert torch.equal(parameter, before[one]), one


def check_grid(weight, scheme):
    """No group has more values than the scheme has codes."""
    groups = weight.detach().float().reshape(-1, scheme.group)
    assert max(len(row.unique()) for row in groups) <= 2**scheme.bits
