"""torchtitan's debug model on a GPU, in bfloat16 and with layers that train by a recipe, gathered as codes or not.

Needs torchtitan 0.3.0 and what that needs; without them nothing was compared. Under torch 2.11 two names of
torch 2.13 are supplied, which torchtitan imports and these runs do not use. The wheel lacks a tokenizer and a text: a
folder gets both, a vocabulary of 2048 trained on the source of sympy. Both runs go through torchrun in it. A run fails,
too, whose last loss by the recipe is more than 2% above bfloat16's.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.gpu.harness.subject import Asked, Check, Subject

ROOT = Path(__file__).resolve().parents[3]
LOSS = re.compile(r"step:\s*(\d+).*?loss:\s*([0-9.]+)")
MISSING = re.compile(r"ModuleNotFoundError: No module named '(.+)'")
ANSI = re.compile(r"\x1b\[[0-9;]*m")
#: The module that torchtitan imports; it is written into FOLDER.
RUNS = '''\
"""Runs of torchtitan's debug model."""

import os

from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel


def bfloat16():
    """As torchtitan has it, without validation and checkpoints."""
    config = llama3_debugmodel()
    config.training.steps = int(os.environ["STEPS"])
    config.parallelism.spmd_backend = "partial_dtensor"
    config.validator.enable = False
    # Chunked losses use the head's weight after FSDP2 of torch 2.11 has freed it.
    config.loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(config.model_spec))
    return config


def low_precision():
    """The same, all layers but the head by a recipe."""
    from ao_lab.training.torchtitan import LowPrecisionLinearConverter

    config = bfloat16()
    converter = LowPrecisionLinearConverter.Config(
        recipe_name=os.environ["RECIPE"], filter_fqns=["lm_head"], fsdp_float8_all_gather=os.environ["GATHERED"] == "1"
    )
    config.model_spec = model_registry("debugmodel", converters=[converter])
    return config
'''
#: What is run in place of `torchtitan.train`.
LAUNCH = '''\
"""torchtitan.train, with the names of torch 2.13 that it imports where they are missing; nothing here uses them."""

import inspect
import runpy

import torch.distributed.fsdp as fsdp
import torch.nn.attention.flex_attention as flex_attention

if not hasattr(fsdp, "DataParallelMeshDims"):
    plain = fsdp.fully_shard

    def fully_shard(module, *, dp_mesh_dims=None, **options):
        """torch's own, for a mesh of one kind of parallelism."""
        if dp_mesh_dims is not None:
            raise ValueError("dp_mesh_dims needs torch 2.13")
        return plain(module, **options)

    fully_shard.state = plain.state
    fsdp.fully_shard, fsdp.DataParallelMeshDims = fully_shard, type("DataParallelMeshDims", (), {})

if "separate_full_blocks" not in inspect.signature(flex_attention.create_block_mask).parameters:
    blocks = flex_attention.create_block_mask

    def create_block_mask(*args, separate_full_blocks=True, **options):
        """torch's own, which separates them always."""
        if not separate_full_blocks:
            raise ValueError("separate_full_blocks=False needs torch 2.13")
        return blocks(*args, **options)

    flex_attention.create_block_mask = create_block_mask

if __name__ == "__main__":
    runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)
'''


STEPS, RECIPE = 30, "rowwise"


def checks(asked: Asked) -> Iterator[Check]:
    """With weights gathered as values and as codes."""
    for gathered in (False, True):
        yield f"{RECIPE}, gathered as {'codes' if gathered else 'values'}", partial(wrong_losses, gathered)


def wrong_losses(gathered: bool) -> Iterator[str]:
    """What is missing, a run that failed, or a loss that is too high."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for module, text in (("debug_runs.py", RUNS), ("debug_launch.py", LAUNCH)):
            (folder / module).write_text(text)
        if why := why_not(folder):
            if missing := MISSING.search(why):
                raise ModuleNotFoundError(why, name=missing[1])
            yield f"torchtitan does not run here: {why}"
            return
        prepare(folder)
        base, found = (run(kind, folder, gathered) for kind in ("bfloat16", "low_precision"))
        print(f"losses: bfloat16 {base[-3:]}, {RECIPE} {found[-3:]}", flush=True)
        if not base or not found or not found[-1][1] <= 1.02 * base[-1][1]:
            yield f"the last losses are {base[-1:]} in bfloat16 and {found[-1:]}"


def search_path(folder: Path) -> dict[str, str]:
    """The environment in which both modules and this project are found."""
    path = [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def why_not(folder: Path) -> str | None:
    """What is missing, by importing it in a process of its own; None where nothing is."""
    wanted = (
        "import debug_launch, torchtitan.train, debug_runs, ao_lab.training.torchtitan, tokenizers, sympy"
    )
    command = [sys.executable, "-c", wanted]
    done = subprocess.run(
        command, cwd=folder, env=search_path(folder), capture_output=True, text=True, check=False
    )
    return None if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def prepare(folder: Path) -> None:
    """The tokenizer and the text at the places that torchtitan's configuration names."""
    import sympy
    from tokenizers import ByteLevelBPETokenizer

    texts = [path.read_text() for path in sorted(Path(sympy.__file__).parent.rglob("*.py"))[:400]]
    data, words = (folder / "tests/assets" / name for name in ("c4_test", "tokenizer"))
    for place in (data, words):
        place.mkdir(parents=True, exist_ok=True)
    (data / "data.json").write_text("\n".join(json.dumps({"text": text}) for text in texts if text))
    made = ByteLevelBPETokenizer()
    made.train_from_iterator(texts, vocab_size=2048, special_tokens=["<bos>", "<eos>"])
    made.save(str(words / "tokenizer.json"))
    (words / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))


def run(name: str, folder: Path, gathered: bool) -> list[tuple[int, float]]:
    """Steps and losses of a run; none where it failed, with its last lines printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
    command += ["-m", "debug_launch", "--module", "debug_runs", "--config", name]
    env = {**search_path(folder), "STEPS": str(STEPS), "RECIPE": RECIPE, "GATHERED": str(int(gathered))}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    log = ANSI.sub("", done.stdout + done.stderr)
    if done.returncode:
        print(f"{name} failed:\n{log[-3000:]}", flush=True)
        return []
    return sorted({int(step): float(loss) for step, loss in LOSS.findall(log)}.items())


SUBJECTS = (Subject("torchtitan", "torchtitan's debug model by a recipe", checks),)
