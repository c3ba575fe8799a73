"""What becomes of an architecture: built small, saved, `ao-lab quantize`, read by transformers and by ao_lab, run.

    python -m tests.support.models.architecture_sweep > tests/ao_lab/checkpoint/architectures.csv
    python -m tests.support.models.architecture_sweep xlnet swinv2

Each in a fork of its own with a limit of time. Prints one line of CSV an architecture.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tests.support.models.architectures import architectures, outputs, small_model, text

COLUMNS = ("type", "class", "dense", "int8", "int4")
CONFIGS = {
    "int8": ("Int8WeightOnlyConfig", []),
    "int4": ("Int4WeightOnlyConfig", ["group_size=32"]),
}
#: Characters of a reason in the table.
LENGTH = 100
#: How far outputs of two readers may lie apart, of the largest output.
NEAR = 1e-3


def row(kind: str, configs: Iterable[str] = ("int8", "int4")) -> dict[str, str]:
    """What becomes of one, under some of `CONFIGS`."""
    from tests.support.models.hf_models import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    result = {"type": kind, "class": architectures()[kind], "dense": "", "int8": "", "int4": ""}
    try:
        small = small_model(kind)
    except ValueError as error:
        return {**result, "dense": f"not built: {error}"[:LENGTH]}
    model, inputs = small.model, small.inputs
    result["dense"] = f"not run: {small.reason}"[:LENGTH] if small.reason else "runs"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "dense"
        try:
            model.save_pretrained(source)
            type(model).from_pretrained(source)
        except Exception as error:  # noqa: BLE001  (whatever it is, it is told)
            return {**result, "dense": f"not saved and loaded: {text(error)}"[:LENGTH]}
        for name in configs:
            result[name] = outcome(source, Path(folder) / name, name, type(model), inputs)
    return result


def outcome(source: Path, target: Path, name: str, model_class: Any, inputs: dict[str, torch.Tensor]) -> str:
    """What becomes of a folder under a configuration: "refused: ...", or the layout and who reads it."""
    from ao_lab.cli.quantize import run_quantize
    from ao_lab.cli.terminal.output import WrongInput

    config, options = CONFIGS[name]
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            run_quantize(
                source, target, config, activation=None, options=options, skip=None, sparsity=None, layout="auto", as_json=True
            )  # fmt: skip
    except WrongInput as error:
        return f"refused: {text(error).removeprefix('WrongInput: ')[:LENGTH]}"
    except Exception as error:  # noqa: BLE001  (whatever it is, it is told)
        return f"CRASH: {text(error)}"
    described = json.loads((target / "config.json").read_text()).get("quantization_config", {})
    method = described.get("quant_method", "none")
    return f"{method}: {read(target, model_class, inputs)}"


def read(folder: Path, model_class: Any, inputs: dict[str, torch.Tensor]) -> str:
    """Whether transformers and ao_lab read a folder whole, and agree."""
    import ao_lab

    try:
        model, told = model_class.from_pretrained(folder, output_loading_info=True)
    except Exception as error:  # noqa: BLE001  (whatever it is, it is told)
        return f"NOT LOADED: {text(error)}"
    if wrong := {
        key: sorted(map(str, value))[:2] for key, value in told.items() if value and key.endswith("keys")
    }:
        return f"NOT WHOLE: {wrong}"
    try:
        ours = ao_lab.load_pretrained(folder)
    except Exception as error:  # noqa: BLE001  (whatever it is, it is told)
        return f"NOT LOADED BY ao_lab: {text(error)}"
    if not inputs:
        return "loads"
    try:
        one, two = outputs(model.eval(), inputs), outputs(ours.eval(), inputs)
    except Exception as error:  # noqa: BLE001  (whatever it is, it is told)
        return f"NOT RUN: {text(error)}"
    apart = (one - two).abs().max() / one.abs().max().clamp_min(1e-9)
    return (
        "loads, runs"
        if apart <= NEAR or (one.isnan().equal(two.isnan()) and one.isnan().all())
        else f"APART: {apart:.3f}"
    )


def in_fork(kind: str, seconds: int = 60) -> dict[str, str]:
    """`row`, in a process of its own."""
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        signal.alarm(seconds)
        os.close(reading)
        with contextlib.suppress(BaseException), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            torch.set_num_threads(1)
            os.write(writing, json.dumps(row(kind)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    os.waitpid(process, 0)
    if told:
        return dict(json.loads(told))
    return {
        "type": kind,
        "class": architectures()[kind],
        "dense": f"not within {seconds} s",
        "int8": "",
        "int4": "",
    }


def main(kinds: list[str]) -> None:
    """Rows of these architectures, or of all."""
    small_model("llama")  # imports what all need

    torch.set_num_threads(1)
    writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for kind in kinds or architectures():
        writer.writerow(in_fork(kind))
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
