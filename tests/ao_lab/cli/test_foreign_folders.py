"""Folders that somebody made to be read otherwise than they were checked: one line, before any work."""

import json
import os
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from ao_lab.cli import quantize
from ao_lab.cli.app import main
from ao_lab.cli.quantize import copy_the_rest
from tests.support.models.hf_models import save_llama

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    path = tmp_path_factory.mktemp("sound") / "model"
    save_llama(path)
    return path


@pytest.fixture
def folder(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "model")


def edit(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def complaints(capsys, folder):
    """What `quantize` and `eval` say, a line each."""
    target = folder.parent / "out"
    for arguments in (["quantize", str(folder), str(target), "--config", "mxfp4"], ["eval", str(folder)]):
        assert main(arguments) == 2
        yield capsys.readouterr().err
    assert not target.exists()


def by_night(*cases):
    """Further cases of a rule."""
    return [pytest.param(case, marks=pytest.mark.nightly, id=f"night{at}") for at, case in enumerate(cases)]


@pytest.mark.parametrize("name", ["other.safetensors.index.json", *by_night("other.safetensors", 5)])
def test_a_configuration_does_not_choose_the_file_of_weights(capsys, folder, name):
    """transformers would read it, and no index of another name is looked at."""
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, folder.parent / "outside.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "../outside.safetensors")}
    (folder / "other.safetensors.index.json").write_text(json.dumps(index))
    edit(folder, transformers_weights=name)
    for line in complaints(capsys, folder):
        assert f"transformers_weights names {name}" in line


class Runs:
    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("content", [pickle.dumps({"x": Runs()}), *by_night(b"no archive", b"")])
def test_pickles_that_are_not_tensors_alone(capsys, folder, monkeypatch, content):
    monkeypatch.chdir(folder.parent)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    for line in complaints(capsys, folder):
        assert "pytorch_model.bin cannot be read as tensors alone" in line
    assert not (folder.parent / "ran").exists()


def test_pickles_outside_of_the_folder_are_not_read(capsys, folder):
    torch.save(load_file(folder / "model.safetensors"), folder.parent / "outside.bin")
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "../outside.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    for line in complaints(capsys, folder):
        assert "name of a .bin file in the same folder, got ../outside.bin" in line


@pytest.mark.parametrize(
    "text", ['{"to_dict": 1}', *by_night('{"a":', "[]", '{"watermarking_config": 5}', "[" * 10**5)]
)
def test_settings_of_generation_that_are_none(capsys, folder, text):
    (folder / "generation_config.json").write_text(text)
    for line in complaints(capsys, folder):
        assert "generation_config.json" in line


@pytest.mark.parametrize(
    "name", ["part/config.json", *by_night("notes.json", "modules.json", "generation_config.json")]
)
def test_links_in_a_circle_are_left_out(folder, name):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to((folder / name).name)
    target = folder.parent / "out"
    assert main(["quantize", str(folder), str(target), "--config", "mxfp4"]) == 0
    assert not any(path.is_symlink() for path in target.rglob("*"))


def test_no_text_of_a_link_out_goes_into_a_card(capsys, folder):
    """A card may be published: of the folder's README.md its licence is taken over, and results are put into it."""
    (folder.parent / "secret").write_text("---\nlicense: key\n---\n")
    (folder / "README.md").symlink_to("../secret")
    assert main(["eval", str(folder), "--save"]) == 2
    assert "README.md is a link out of the model's folder" in capsys.readouterr().err
    assert (folder / "README.md").is_symlink()
    target = folder.parent / "out"
    assert main(["quantize", str(folder), str(target), "--config", "mxfp4"]) == 0
    assert "key" not in (target / "README.md").read_text()


@pytest.mark.parametrize("value", [{"quant_method": "\x1b[31mred"}, *by_night("gptq", [], 5)])
def test_a_quantization_that_is_none(capsys, folder, value):
    edit(folder, quantization_config=value)
    for line in complaints(capsys, folder):
        assert "quant" in line
        assert line.removesuffix("\n").isprintable()


def test_adapters_beside_a_model_are_not_merged_silently(capsys, folder):
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    for line in complaints(capsys, folder):
        assert "adapter_config.json describes adapters of peft" in line


@pytest.mark.parametrize("value", ["9" * 5000, *by_night("[" * 10**5, f"PerGroup({'9' * 5000})")])
def test_values_of_options_that_no_number_is(capsys, folder, value):
    command = ["quantize", str(folder), str(folder.parent / "out"), "--config", "Int8WeightOnlyConfig"]
    assert main([*command, "--option", f"granularity={value}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# Files beside the weights: all of the folder goes along, and nothing from outside of it.


@pytest.fixture
def source(tmp_path):
    (tmp_path / "secret").write_text("key")
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "notes.txt").write_text("mine")
    folder = tmp_path / "model"
    folder.mkdir()
    return folder


@pytest.fixture
def target(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def write(folder, **files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def names(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_links_out_of_the_folder_are_left_out_and_told(source, target):
    write(source, **{"tokenizer.json": "{}", "inner/a.json": "1"})
    (source / "vocab.txt").symlink_to("../secret")
    (source / "merges.txt").symlink_to(source.parent / "secret")
    (source / "inner" / "b.json").symlink_to("../../secret")
    (source / "linked").symlink_to("../private")
    (source / "same.json").symlink_to("tokenizer.json")
    (source / "lost.json").symlink_to("nowhere")
    os.mkfifo(source / "pipe")
    os.mkfifo(source / "pipe_config.json")
    told = copy_the_rest(source, target)
    assert names(target) == {"tokenizer.json", "same.json", "inner/a.json"}
    assert not any(path.is_symlink() for path in target.rglob("*"))
    left = {line.split(": ")[1].split(",")[0] for line in told}
    assert left == {
        "vocab.txt",
        "merges.txt",
        "inner/b.json",
        "linked",
        "lost.json",
        "pipe",
        "pipe_config.json",
    }
    assert any("a link out of the model's folder" in line for line in told)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_settings_that_are_links_out_are_refused(source, target, capsys, name):
    """Unknown entries of theirs are written with the result."""
    (source.parent / "credentials.json").write_text('{"model_type": "llama", "token": "key"}')
    write(source, **{"config.json": "{}", "model.safetensors": ""})
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to("../credentials.json")
    assert main(["quantize", str(source), str(target), "--config", "mxfp4"]) == 2
    assert f"{name} is a link out of the model's folder; copy the file there" in capsys.readouterr().err
    assert list(target.iterdir()) == []


def test_the_hubs_cache_is_one_folder(tmp_path, target):
    repository = tmp_path / "models--org--name"
    write(repository, **{"blobs/abc": "{}", "refs/main": "1"})
    snapshot = repository / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer.json").symlink_to("../../blobs/abc")
    (snapshot / "stolen.json").symlink_to("../../refs/main")
    told = copy_the_rest(snapshot, target)
    assert names(target) == {"tokenizer.json"}
    assert [line for line in told if "stolen.json" in line] == told


def test_code_goes_along_only_where_a_tokenizer_names_it(source, target):
    auto = {"AutoTokenizer": ["tokenization_x.XTokenizer", None], "AutoConfig": "other/repo--evil3.C"}
    write(
        source,
        **{
            "evil.py": "boom",
            "evil3.py": "boom",
            "tokenization_x.py": "class XTokenizer: ...",
            "config.json": json.dumps({"auto_map": {"AutoModel": "evil.M"}}),
            "tokenizer_config.json": json.dumps({"auto_map": auto}),
        },
    )
    (target / "config.json").write_text("{}")
    told = copy_the_rest(source, target)
    assert names(target) == {"config.json", "tokenizer_config.json", "tokenization_x.py"}
    assert (target / "config.json").read_text() == "{}"
    assert sorted(line.split(",")[0] for line in told) == [
        "copied: tokenization_x.py",
        "left out: evil.py",
        "left out: evil3.py",
    ]


def test_sub_folders_and_small_files_go_along(source, target, monkeypatch):
    """Pooling of sentence-transformers, voices, chat templates; not the weights, nor those in a second format."""
    monkeypatch.setattr(quantize, "LARGEST", 10)
    files = {
        "modules.json": json.dumps([{"path": ""}, {"path": "2_Dense"}]),
        "2_Dense/model.safetensors": "dense weights of a module",
        "1_Pooling/config.json": "{}",
        "additional_chat_templates/tool.jinja": "x",
        "spk_dict.pt": "voices",
        "my_eval.json": "{}",
        "2_Dense/pytorch_model.bin": "x",
    }
    remade = dict.fromkeys(
        ("model.safetensors", "pytorch_model.bin", "model.safetensors.index.json", "eval.json"), "w"
    )
    left = {"onnx/model.onnx": "weights of a model", "original/consolidated.00.pth": "weights of a model"}
    write(source, **files, **remade, **left, **{".git/config": "x", ".cache/x": "x"})
    told = copy_the_rest(source, target)
    assert names(target) == set(files)
    assert {line.split(": ")[1].split(",")[0] for line in told} == set(left)


@pytest.mark.parametrize("broken", ["{", "[1]", '{"auto_map": [1]}', '{"auto_map": {"a": 3}}', "\ud800"])
def test_files_that_say_nothing_are_copied_as_they_are(source, target, broken):
    for name in ("modules.json", "tokenizer_config.json"):
        (source / name).write_bytes(broken.encode("utf-8", "surrogatepass"))
    assert copy_the_rest(source, target) == []
    assert names(target) == {"modules.json", "tokenizer_config.json"}


def test_the_command_runs_and_publishes_no_code(tmp_path, capsys, monkeypatch):
    """Nor does it ask at the terminal whether to."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=1)
    folder, out = tmp_path / "model", tmp_path / "out"
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    (folder / "evil.py").write_text("import pathlib; pathlib.Path('/nowhere/evil').touch()")
    fields = json.loads((folder / "config.json").read_text())
    hooks = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
    (folder / "config.json").write_text(json.dumps(fields | {"auto_map": hooks}))
    (folder / "stolen.txt").symlink_to(tmp_path / "secret")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked whether to run code"))
    assert main(["quantize", str(folder), str(out), "--config", "Int8WeightOnlyConfig", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["beside"]
    assert [line.split(",")[0] for line in told] == ["left out: evil.py", "left out: stolen.txt"]
    assert not {"evil.py", "stolen.txt"} & {path.name for path in out.iterdir()}
    assert "auto_map" not in json.loads((out / "config.json").read_text())


def test_the_result_and_models_beside_are_not_copied(source):
    write(source, **{"tokenizer.json": "{}", "earlier/config.json": "{}", "earlier/model.safetensors": "w"})
    write(source, **{"1_Dense/config.json": "{}", "1_Dense/model.safetensors": "w"})
    write(source, **{"modules.json": json.dumps([{"path": "1_Dense"}])})
    target = source / "out"
    write(target, **{"config.json": "{}"})
    told = copy_the_rest(source, target)
    assert names(target) == {
        "config.json", "tokenizer.json", "modules.json", "1_Dense/config.json", "1_Dense/model.safetensors",
    }  # fmt: skip
    assert [line for line in told if "earlier" in line] == ["left out: earlier, a separate model"]
