"""How the help of a command is laid out: room for what options do, and examples below.

Typer gives types of options a column of their own, which on a terminal of 80 columns leaves descriptions a third of it. Options
say in words what they take; those that take one of a few values name them first.
"""

from __future__ import annotations

from typing import Any

#: Command lines by command, below its help.
EXAMPLES = {
    "bench": (
        "ao-lab bench --model MODEL_DIR --configs Int8WeightOnlyConfig,nf4 --batch 1 --batch 64",
        "ao-lab bench --shape 16,4096,4096 --configs mxfp4",
    ),
    "choose": (
        "ao-lab choose MODEL_DIR --config nvfp4 --config int8_rowwise --bits 5 --calibration FILE --out PLAN.json",
    ),
    "compare": (
        "ao-lab compare MODEL_DIR --text FILE --limit 8 --new-tokens 0",
        "ao-lab compare MODEL_DIR Int8WeightOnlyConfig 'Int4WeightOnlyConfig group_size=32' nvfp4 --out COMPARISON",
        "ao-lab compare MODEL_DIR nvfp4 --method gptq --calibration FILE --text OTHER_FILE",
    ),
    "eval": ("ao-lab eval OUT_DIR --against MODEL_DIR --text FILE",),
    "export": ("ao-lab export OUT_DIR model.gguf",),
    "pretrained": ("ao-lab pretrained smollm2-135m",),
    "quantize": (
        "ao-lab quantize MODEL_DIR OUT_DIR --config Int8WeightOnlyConfig",
        "ao-lab quantize MODEL_DIR OUT_DIR --config 'Int4WeightOnlyConfig group_size=32' --method gptq --calibration FILE",
    ),
    "reproduce": (
        "ao-lab reproduce ptq --model MODEL_DIR --text FILE --only weights --only int4_g32",
        "ao-lab reproduce calibration --model MODEL_DIR --text FILE --only int4_g32 --only gptq --seconds 500",
        "ao-lab reproduce decode --model MODEL_DIR --only int8wo",
    ),
}


def laid_out(command: Any, context: Any) -> Any:
    """A command of Typer, and the commands below it, with that help; a second call changes nothing. context: of the group."""
    for below in getattr(command, "commands", {}).values():
        laid_out(below, context)
    for option in filter(None, [*command.params, command.get_help_option(context)]):
        if option.param_type_name != "option" or option.metavar == "":
            continue
        # Typer renamed `type`; only a choice among names has choices there.
        kind = getattr(option, "type_descriptor", None) or option.type
        choices = [str(getattr(one, "value", one)) for one in getattr(kind, "choices", None) or ()]
        if choices and option.help is not None:
            option.help = f"{' | '.join(choices)}. {option.help}"
        option.metavar = ""
    examples = EXAMPLES.get(command.name or "", ())
    # Typer joins single lines.
    command.epilog = "\n\n".join(["Examples:", *examples]) if examples else command.epilog
    return command


__all__ = ["EXAMPLES", "laid_out"]
