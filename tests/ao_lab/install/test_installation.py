"""Missing extras are named with the command that installs them, which a clone and a wheel spell differently."""

import importlib.metadata
import re
import sys
import tomllib
import types
import warnings
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from safetensors.torch import save_file

import ao_lab
from ao_lab.cli.app import main
from ao_lab.cli.doctor import library
from ao_lab.install import extras as installation
from ao_lab.install import versions
from ao_lab.install.extras import needed
from tests.support.runs import forks

ROOT = Path(__file__).resolve().parents[3]


def test_extras_are_those_of_the_project():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, modules in installation.EXTRAS.items():
        # What one system alone has is not asked for: pages are written without Triton.
        needed = [one for one in map(Requirement, declared[extra]) if one.marker is None]
        named = {canonicalize_name(one.name) for one in needed}
        assert named <= {canonicalize_name(module) for module in modules}
    assert set(declared) - set(installation.EXTRAS) == {"test", "lint", "docs"}


def test_a_clone_and_a_wheel_are_installed_differently(tmp_path):
    assert installation.is_clone()
    assert not installation.is_clone(tmp_path)
    assert installation.pip_install("hf") == "pip install -e '.[hf]'"
    assert installation.pip_install("hf", clone=False) == "pip install 'ao_lab[hf]'"
    assert installation.pip_install(clone=False) == "pip install 'ao_lab'"


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("transformers", "hf"),
        ("lm_eval.models", "eval"),
        ("torchao", "ao"),
        ("gguf", "models"),
        ("accelerate", "models"),
        ("peft", "train"),
    ],
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


# Versions outside of the tested range are told of once; the range holds what is pinned and asked for.


def test_the_range_holds_the_pins_and_nothing_below_what_is_required():
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        *project["dependencies"],
        *(one for extra in project["optional-dependencies"].values() for one in extra),
    ]
    required = {Requirement(line).name: Requirement(line).specifier for line in lines}
    for name, (oldest, newest) in versions.TESTED.items():
        named = name.replace("_", "-")
        assert versions.outside(name, pins[named]) is None
        assert required[named].contains(f"{oldest}.99")
        assert versions.numbers(oldest) <= versions.numbers(newest)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("5.22.9", "tested with transformers 5.23 to 5.24; this is 5.22.9.*pip install -U"),
        ("4.57.1", "pip install -U transformers"),
        ("5.23.0", None),
        ("5.24.3.dev0+local", None),
        ("5.25.0", r"this is 5.25.0: if something differs, pip install 'transformers<5\.25'$"),
        ("6.0", "this is 6.0"),
        ("unknown", "this is unknown"),
    ],
)
def test_what_is_said(version, said):
    found = versions.outside("transformers", version)
    assert found is None if said is None else re.search(said, found)


@pytest.mark.parametrize("use", [lambda: ao_lab.__getattr__("quantize_"), lambda: needed("transformers")])
def test_one_warning_at_the_first_use(monkeypatch, use):
    monkeypatch.setattr(versions, "_checked", set())
    monkeypatch.setattr(versions, "TESTED", {"transformers": ("1.0", "1.5"), "torch": ("0.1", "99.0")})
    monkeypatch.setitem(versions.sys.modules, "torchao", types.ModuleType("torchao"))  # one without a version
    transformers = pytest.importorskip("transformers")
    versions._checked.clear()
    with pytest.warns(UserWarning, match=r"tested with transformers 1.0 to 1.5; this is") as told:
        use()
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use()
    assert versions.outside("transformers", transformers.__version__)


def test_triton_is_told_of_with_torch(monkeypatch):
    """Torch brings it: two warnings of one cause say less than one."""
    monkeypatch.setattr(versions, "_checked", set())
    monkeypatch.setattr(versions, "TESTED", {"torch": ("0.1", "0.2"), "triton": ("0.1", "0.2")})
    monkeypatch.setitem(versions.sys.modules, "triton", types.SimpleNamespace(__version__="9.9"))
    with pytest.warns(versions.UntestedVersion) as told:
        versions.check_loaded()
    assert [str(one.message).split(";")[0] for one in told] == ["ao_lab was tested with torch 0.1 to 0.2"]


def test_a_command_says_it_in_a_line(monkeypatch, capsys):
    def command(**options):
        warnings.warn(versions.outside("torch", "99.1"), versions.UntestedVersion, stacklevel=1)

    monkeypatch.setattr("ao_lab.cli.app.app", command)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main([]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ao-lab: ao_lab was tested with torch 2.11 to ")
    assert line.endswith("(PYTHONWARNINGS='ignore:ao_lab was tested' hides this)")


def test_doctor_says_it(monkeypatch):
    version = importlib.metadata.version("torch")
    monkeypatch.setitem(versions.TESTED, "torch", ("0.1", "99.0"))
    assert library("torch").detail == version
    monkeypatch.setitem(versions.TESTED, "torch", ("1.0", "1.5"))
    assert library("torch").detail.endswith("(tested: 1.0 to 1.5)")


# What waits for transformers and the libraries around it registers in either order of imports.

CHECK = """
import sys
from ao_lab.install.transformers_hook import AWAITED
from accelerate.utils import compute_module_sizes
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.utils.other import ModulesToSaveWrapper
from transformers import PreTrainedModel
from transformers.trainer import Trainer
changed = [
    compute_module_sizes, TrainableTokensLayer.update_layer, ModulesToSaveWrapper.update, Trainer._load_from_checkpoint,
    PreTrainedModel.save_pretrained, PreTrainedModel.get_memory_footprint, PreTrainedModel._get_resized_lm_head,
]
assert all(getattr(one, "of_ao_lab", False) for one in changed), [one for one in changed if not hasattr(one, "of_ao_lab")]
assert not any("transformers_hook" in type(finder).__module__ for finder in sys.meta_path)
assert set(AWAITED) <= set(sys.modules)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("order", ["import ao_lab, peft", "import peft, transformers.trainer; import ao_lab"])
def test_either_order(order):
    done = forks.python("-c", order + CHECK, server="transformers")
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_cache_is_passed_by_the_name_that_does_not_warn():
    def before(input_ids, past_key_values=None): ...

    def today(input_ids, cache=None): ...

    named = {forward: types.SimpleNamespace(forward=forward) for forward in (before, today)}
    assert versions.cache_argument(named[before]) == "past_key_values"
    assert versions.cache_argument(named[today]) == "cache"
