"""What waits for transformers and the libraries around it registers in either order of imports."""

import pytest

from tests.support.runs import forks

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
