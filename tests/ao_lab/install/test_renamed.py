"""Files that were written when modules had other names: they load, and mean what freshly made ones mean.

`data/` was written by the tree in which `ao_lab` was one folder of modules (ao_lab.configs_float, ao_lab.tensor, ...).
"""

import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ao_lab
from ao_lab import QATConfig, QuantizedTensor, explain, quantize_
from ao_lab.install.renamed import RENAMED
from tests.support.quantized_weights import same

DATA = Path(__file__).parent / "data"
CONFIGS = {
    "int4": ao_lab.Int4WeightOnlyConfig(group_size=32),
    "int8_dynamic": ao_lab.Int8DynamicActivationInt8WeightConfig(),
    "mxfp8": ao_lab.MXDynamicActivationMXWeightConfig(),
    "qat": QATConfig(ao_lab.Int4WeightOnlyConfig(group_size=32), step="prepare"),
}


def state_dicts():
    """The saved states of one dense model in each configuration; that of QAT is dense."""
    return torch.load(DATA / "state_dicts.pt", weights_only=True)


def fresh(name):
    """The same dense model, given to quantize_ now."""
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64, bias=False)).to(torch.bfloat16)
    model.load_state_dict(state_dicts()["qat"])
    quantize_(model, CONFIGS[name])
    return model


def assert_same(a, b):
    assert type(a) is type(b)
    if not isinstance(a, QuantizedTensor):
        assert same(a.detach(), b.detach())
        return
    assert (a.meta, a.shape, a.recipe) == (b.meta, b.shape, b.recipe)
    for name, part in a.parts.items():
        other = b.parts[name]
        assert (part is None) == (other is None)
        assert part is None or (part.dtype == other.dtype and same(part, other))


def test_configurations_are_those_of_today():
    loaded = pickle.loads((DATA / "configs.pkl").read_bytes())
    kinds = [one for one in loaded if not callable(one)]
    assert len(kinds) > 20
    for one in kinds:
        kind = getattr(ao_lab, type(one).__name__)
        assert type(one) is kind
        assert one == kind()
        assert repr(one) == repr(kind())


def test_methods_of_configurations_give_the_recipes_of_today():
    loaded = pickle.loads((DATA / "configs.pkl").read_bytes())
    methods = [one for one in loaded if callable(one)]
    assert len(methods) > 15
    for recipe in methods:
        assert recipe() == type(recipe.__self__)().recipe()


@pytest.mark.parametrize("name", CONFIGS)
def test_state_dicts_load_as_weights_only(name):
    model = fresh(name)
    for key, value in state_dicts()[name].items():
        assert_same(value, model.state_dict()[key])


@pytest.mark.parametrize("name", CONFIGS)
def test_whole_models_load_and_compute_the_same(name):
    model, loaded = fresh(name), torch.load(DATA / "models.pt", weights_only=False)[name]
    for (key, a), (other, b) in zip(loaded.named_parameters(), model.named_parameters(), strict=True):
        assert key == other
        assert_same(a.data, b.data)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert same(loaded(x).detach(), model(x).detach())
    assert [(layer.scheme, layer.kernel) for layer in explain(loaded).layers] == [
        (layer.scheme, layer.kernel) for layer in explain(model).layers
    ]


def test_a_model_in_training_goes_on():
    loaded = torch.load(DATA / "models.pt", weights_only=False)["qat"]
    quantize_(loaded, QATConfig(CONFIGS["int4"], step="convert"))
    for a, b in zip(loaded.parameters(), fresh("int4").parameters(), strict=True):
        assert_same(a.data, b.data)


def test_a_process_that_imports_nothing_else_reads_them():
    code = f"import ao_lab, pickle; pickle.loads(open({str(DATA / 'configs.pkl')!r}, 'rb').read())"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[3])


@pytest.mark.parametrize("name", RENAMED)
def test_every_old_name_leads_somewhere(name):
    if name in ("checkpoint.hf_quantizer", "checkpoint.hf_config"):
        pytest.importorskip("transformers")
    assert importlib.import_module(f"ao_lab.{name}").__name__ == f"ao_lab.{name}"
