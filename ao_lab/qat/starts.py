"""Where learned scales start: at those that methods with data find.

`quantize_(model, QATConfig(base, learn_scales=True), calibration=batches, methods=(Clip(),))` walks a copy of the model block
by block, as quantizing it would (`ao_lab.calibration.run`), and takes of each weight the scales and zero points alone: the
weights stay, and training begins where the calibrated model is. Methods that change weights or codes have nothing to start
from here, and are refused.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from ao_lab.calibration.methods import HQQ, Clip
from ao_lab.config.base import Config, FqnToConfig
from ao_lab.qat.config import QATConfig
from ao_lab.qat.layers import with_usual
from ao_lab.quantization.api import Call, configs_of, quantize_weights
from ao_lab.quantization.plan import QuantizationPlan
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from reference import Scales


def calibrated_starts(call: Call, plan: QuantizationPlan) -> dict[str, Scales]:
    """Scales of each weight that is to be prepared and that methods quantize, by its full names; the model stays as it is.

    ValueError for methods that find no scales, for configurations whose scales are not learned, and as calibration has it.
    """
    check_starts(call)
    wanted = {full for change in plan.changes.values() for full in change.places}
    paths = {full.rpartition(".")[0] for full in wanted}
    model: nn.Module = copy.deepcopy(call.model)
    here = {id(module) for path, module in model.named_modules(remove_duplicate=False) if path in paths}

    def filter_fn(module: nn.Module, name: str) -> bool:
        """The layers of the plan, in the copy."""
        return id(module) in here

    config = of_base(call.config)
    chosen = None if isinstance(config, FqnToConfig) else filter_fn
    report = quantize_weights(replace(call, model=model, config=config, filter_fn=chosen, device=None))
    starts = {}
    for layer in report.changed:
        weight = model.get_parameter(layer.name)
        if layer.calibrated is not None and layer.name in wanted and isinstance(weight, QuantizedTensor):
            starts[layer.name] = with_usual(weight.plain.quantized.scales)
    return starts


def check_starts(call: Call) -> None:
    """ValueError for methods that find no scales, and for a configuration that learns none."""
    request = call.request
    others = (
        [] if request is None else [one.name for one in request.methods if not isinstance(one, (Clip, HQQ))]
    )
    if others:
        raise ValueError(
            f"step='prepare' starts learned scales at those of Clip() or HQQ(); {' and '.join(others)} change weights or "
            f"quantized values, which training learns itself: drop them"
        )
    if not all(isinstance(one, QATConfig) and one.learn_scales for one in configs_of(call.config)):
        raise ValueError(
            "calibration and methods find where learned scales start: give QATConfig(..., learn_scales=True), or leave them out"
        )


def of_base(config: Config | FqnToConfig) -> Config | FqnToConfig:
    """What is trained for, without the training."""
    if isinstance(config, FqnToConfig):
        inner: Mapping[str, Config | None] = config.fqn_to_config
        return FqnToConfig({name: base_of(one) for name, one in inner.items()})
    found = base_of(config)
    assert found is not None
    return found


def base_of(config: Config | None) -> Config | None:
    """The configuration inside of a `QATConfig`."""
    return config._base if isinstance(config, QATConfig) else config
