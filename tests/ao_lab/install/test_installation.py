"""Missing extras are named with the command that installs them, which a clone and a wheel spell differently."""

import sys
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from safetensors.torch import save_file

from ao_lab.cli.app import main
from ao_lab.install import extras as installation

ROOT = Path(__file__).resolve().parents[3]


def test_extras_are_those_of_the_project():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, modules in installation.EXTRAS.items():
        named = {canonicalize_name(Requirement(text).name) for text in declared[extra]}
        assert named <= {canonicalize_name(module) for module in modules}
    assert set(declared) - set(installation.EXTRAS) == {"test", "lint", "docs"}


def test_a_clone_and_a_wheel_are_installed_differently(tmp_path):
    assert installation.is_clone()
    assert not installation.is_clone(tmp_path)
    assert installation.pip_install("hf") == "pip install -e '.[hf]'"
    assert installation.pip_install("hf", clone=False) == "pip install 'ao_lab[hf]'"
    assert installation.pip_install(clone=False) == "pip install 'ao_lab'"


@pytest.mark.parametrize(
    ("name", "extra"), [("transformers", "hf"), ("lm_eval.models", "eval"), ("torchao", "ao")]
)
def test_a_missing_library_is_named_with_its_extra(monkeypatch, name, extra):
    for loaded in [module for module in sys.modules if module.partition(".")[0] == name.partition(".")[0]]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, name.partition(".")[0], None)
    with pytest.raises(installation.MissingExtra, match=rf"pip install 'ao_lab\[{extra}\]'") as found:
        installation.needed(name)
    assert isinstance(found.value, ModuleNotFoundError)
    assert found.value.name == name.partition(".")[0]


def test_what_an_installed_library_lacks_is_its_own_affair(tmp_path, monkeypatch):
    (tmp_path / "broken_library.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_module") as found:
        installation.needed("broken_library")
    assert not isinstance(found.value, installation.MissingExtra)
    assert installation.needed("json") is sys.modules["json"]


@pytest.mark.parametrize(
    "arguments", [["quantize", "{}", "{}/out", "--config", "int8_rowwise"], ["eval", "{}"]]
)
def test_the_command_line_says_it_in_one_line(tmp_path, monkeypatch, capsys, arguments):
    """Code 2, and no folder is left behind."""
    (tmp_path / "config.json").write_text('{"vocab_size": 256}')
    save_file({"weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main([text.format(tmp_path) for text in arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "transformers is not installed; pip install 'ao_lab[hf]'" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_ao_lab_for_jax_says_what_it_needs(monkeypatch):
    for loaded in [
        module for module in sys.modules if module == "ao_lab.jax" or module.startswith("ao_lab.jax.")
    ]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(installation.MissingExtra, match=r"pip install 'ao_lab\[jax\]'"):
        installation.needed("ao_lab.jax")
