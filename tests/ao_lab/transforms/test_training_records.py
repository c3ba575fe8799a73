"""What a checkpoint says it was trained with, and what is said where it is resumed otherwise."""

import io
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ao_lab
from ao_lab import LoRA, QATConfig, convert_for_training_, convert_from_training_, quantize_
from ao_lab.transforms.training_records import (
    FILE,
    read_training,
    training_of,
    warn_of_other_training,
    write_training,
)

INT4 = ao_lab.IntxWeightOnlyConfig("int4", ao_lab.PerGroup(32))


def net():
    return nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64))


def trained(kind):
    """A model that trains so."""
    model = net()
    if kind in ("rowwise", "mxfp8"):
        convert_for_training_(model, kind)
    elif kind == "LoRA":
        quantize_(model, QATConfig(INT4, lora=LoRA(4)))
    elif kind != "nothing":
        bits, start = kind.split()
        config = ao_lab.IntxWeightOnlyConfig(bits, ao_lab.PerGroup(32))
        quantize_(model, QATConfig(config, start_step=int(start)))
    return model


def test_a_dense_model_of_a_training_checkpoint_says_so(tmp_path):
    write_training(trained("int4 0"), tmp_path)
    model = net()
    model.config = SimpleNamespace(_name_or_path=str(tmp_path))
    assert "was saved in training with QAT int4_g32 in 2 layers; this model is dense" in str(
        ao_lab.explain(model)
    )
    quantize_(model, QATConfig(INT4))
    assert "this model is dense" not in str(ao_lab.explain(model))


def through_torch_save(model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_names_stay_and_records_add_up():
    model = trained("rowwise")
    assert list(model.state_dict()) == list(net().state_dict())
    assert training_of(model) == {"recipe rowwise": 2}
    both = trained("int4 0")
    convert_for_training_(both, "mxfp8")
    assert training_of(both) == {"QAT int4_g32": 2, "recipe mxfp8": 2}
    assert training_of(trained("LoRA")) == {"LoRA rank 4, alpha 8 beside int4_g32": 2}
    convert_from_training_(model)
    assert training_of(model) == {}


@pytest.mark.parametrize(
    ("saved", "now"), [("rowwise", "mxfp8"), ("int4 0", "int3 0"), ("int4 3", "int4 1"), ("LoRA", "LoRA")]
)
def test_a_state_of_another_training(saved, now):
    """One warning for all layers, again for the next load; none for the same training, and none where either has no recipe."""
    state, model = through_torch_save(trained(saved)), trained(now)
    if saved == now:
        model[0].lora = model[2].lora = LoRA(4, alpha=1)
    for _ in range(2):
        with pytest.warns(UserWarning, match="the state was saved in training with") as found:
            model.load_state_dict(state)
        assert len(found) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(saved).load_state_dict(state)
        trained("rowwise").load_state_dict(net().state_dict())
        net().load_state_dict(state, strict=False)


def test_a_changed_recipe_keeps_no_name():
    from dataclasses import replace

    from reference import RECIPES

    changed = replace(RECIPES["rowwise"], input_grad=RECIPES["mxfp8"].input_grad)
    model = net()
    convert_for_training_(model, changed)
    assert training_of(model) == {f"recipe {changed.key}": 2}


def test_the_file_beside_a_checkpoint(tmp_path):
    write_training(trained("rowwise"), tmp_path)
    assert read_training(tmp_path) == {"recipe rowwise": 2}
    warn_of_other_training(trained("rowwise"), tmp_path)
    with pytest.warns(UserWarning, match="with recipe rowwise in 2 layers; this model trains with no recipe"):
        warn_of_other_training(net(), tmp_path)
    for broken in ("[", "[]", '{"layers": {"a": "b"}}'):
        (tmp_path / FILE).write_text(broken)
        assert read_training(tmp_path) == {}
    quantized = net()
    quantize_(quantized, INT4)
    for save in (write_training, lambda model, folder: ao_lab.save_pretrained(quantized, folder)):
        write_training(trained("rowwise"), tmp_path)
        save(net(), tmp_path)
        assert not (tmp_path / FILE).exists()
    (tmp_path / "file").touch()
    write_training(net(), tmp_path / "file")  # transformers says that it is no folder, and goes on


def test_models_read_from_a_checkpoint(tmp_path):
    """Of the way in which they are prepared now: a run in FP8 that QAT follows is one on purpose."""
    write_training(trained("rowwise"), tmp_path)
    read = net()
    read.config = SimpleNamespace(_name_or_path=str(tmp_path))
    with pytest.warns(
        UserWarning, match="training with recipe rowwise in 2 layers; this model trains with recipe mxfp8"
    ):
        convert_for_training_(read, "mxfp8")
    convert_from_training_(read)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantize_(read, QATConfig(INT4))
        convert_for_training_(read, "rowwise")
        convert_from_training_(read)
        for part in ("0", "2"):  # one call after the other
            convert_for_training_(read, "rowwise", filter_fn=lambda module, name, part=part: name == part)


def test_trainer(tmp_path):
    """A run that is resumed with another recipe, or with none, says so; the file lies beside the weights of each checkpoint."""
    transformers = pytest.importorskip("transformers")

    def run(kind, **resumed):
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            max_steps=2 if resumed else 1,
            save_steps=1,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        data = [{"x": torch.ones(64), "labels": torch.ones(64)}] * 4
        transformers.Trainer(Model(kind), arguments, train_dataset=data).train(**resumed)

    class Model(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.net = trained(kind)

        def forward(self, x, labels):
            y = self.net(x)
            return {"loss": (y - labels).square().mean(), "logits": y}

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*was saved in training.*")
        run("rowwise")
        assert read_training(tmp_path / "checkpoint-1") == {"recipe rowwise": 2}
        run("rowwise", resume_from_checkpoint=True)
    for other in ("mxfp8", "nothing"):
        with pytest.warns(UserWarning, match="checkpoint-1 was saved in training with recipe rowwise"):
            run(other, resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
