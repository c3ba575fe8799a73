"""What a folder's model does, by its configuration: predict text, encode sentences, or write down speech.

The task decides which metrics an experiment measures. A sentence encoder is a folder that says so (``modules.json``, which
sentence-transformers writes) or whose configuration is of an encoder's type; a speech model is Whisper; all others are taken
for causal language models, and refused later where they are none.
"""

from __future__ import annotations

from pathlib import Path

from ao_lab.checkpoint.model_builder import read_config

LANGUAGE, ENCODER, SPEECH = "language model", "encoder", "speech"
TASKS = (LANGUAGE, ENCODER, SPEECH)
#: `model_type` of encoders of text.
ENCODERS = frozenset(
    ("albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "modernbert", "mpnet", "nomic_bert",
     "roberta", "xlm-roberta")
)  # fmt: skip
#: The file by which a folder says that it is a sentence encoder.
MODULES = "modules.json"


def task_of(folder: Path) -> str:
    """One of TASKS."""
    kind = read_config(folder).get("model_type")
    if kind == "whisper":
        return SPEECH
    return ENCODER if kind in ENCODERS or (folder / MODULES).is_file() else LANGUAGE


def check_task(task: str, wanted: tuple[str, ...], model: str, experiment: str) -> None:
    """ValueError where an experiment has no metric for a model's task."""
    if task not in wanted:
        raise ValueError(
            f"{model} is no {' and no '.join(wanted)} but {task}, which {experiment} does not measure; `ao-lab reproduce ptq` "
            "does"
        )
