"""torchtitan's debug model with layers that train by a recipe, as far as it runs without a GPU: its attention does not."""

import warnings

import pytest
import torch
from torch import nn

import ao_lab
from tests.support.distributed.ranks import check_on_ranks
from tests.support.refusals import refused

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what torchtitan imports
    # A newer torch than the installed one, or a part of torchtitan's own needs that is missing, is an ImportError as well.
    models = pytest.importorskip(
        "torchtitan.models.llama3", reason="torchtitan 0.3.0 is not installed", exc_type=ImportError
    )
    titan = pytest.importorskip("ao_lab.training.torchtitan")


def debug_model(**options):
    converter = titan.LowPrecisionLinearConverter.Config(**options)
    return models.model_registry("debugmodel", converters=[converter]).model


def built(config):
    torch.manual_seed(0)
    model = config.build()
    model.init_states(buffer_device=torch.device("cpu"))
    return model


@pytest.mark.parametrize("gathered", [False, True])
def test_layers_train_by_the_recipe(gathered):
    model = built(debug_model(filter_fqns=["lm_head"], fsdp_float8_all_gather=gathered))
    model.verify_module_protocol()
    kind = titan.TitanGatheredLinear if gathered else titan.TitanLinear
    found = [name for name, module in model.named_modules() if isinstance(module, kind)]
    assert len(found) == 6 * 5
    assert type(model.lm_head) is titan.Linear
    plain = models.model_registry("debugmodel").model.build()
    plain.load_state_dict(model.state_dict())
    feed = plain.layers["0"].feed_forward
    for module in feed.modules():
        module.__class__ = nn.Linear if type(module) is titan.Linear else type(module)
    ao_lab.convert_for_training_(feed, "rowwise", fsdp_float8_all_gather=gathered)
    x = torch.randn(2, 16, 256)
    assert torch.equal(model.layers["0"].feed_forward(x), feed(x))


def test_wrong_configurations():
    refused(ValueError, r"no linear layer has \['output'\]", debug_model, filter_fqns=["output"])
    refused(ValueError, "unknown recipe 'rowise'", debug_model, recipe_name="rowise")
    refused(ValueError, "takes no layer", debug_model, filter_fqns=["layers", "lm_head"])


def test_layers_that_a_recipe_cannot_take_stay():
    config = models.model_registry("debugmodel").model
    config.lm_head.out_features = 2050
    converted = titan.LowPrecisionLinearConverter.Config().build().convert(config)
    assert type(converted.lm_head) is titan.Linear.Config


@pytest.mark.parametrize("gathered", [0, 1])
def test_two_ranks(gathered):
    """torchtitan's own sharding, its attention replaced by one that CPUs have."""
    check_on_ranks("torchtitan_model.run", gathered)
