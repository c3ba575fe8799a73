"""Batched experts in `quantize_`: the axis of their blocks, routers, and what a filter means."""

import pytest
import torch
from torch import nn

from ao_lab import QuantizedTensor, SchemeConfig, explain, linear_and_experts, quantize_
from ao_lab.transforms.layers import contraction_axis, is_experts, routers
from tests.support.models.expert_models import MODELS, model_of


@pytest.mark.parametrize("name", sorted(MODELS))
def test_blocks_run_along_the_contraction_axis(name):
    """GPT-OSS and Llama 4 keep (experts, in, out); nobody has to say so."""
    model = model_of(name)
    report = quantize_(model, SchemeConfig(scheme="int4_g32"), linear_and_experts)
    experts = [p for p in model.parameters() if p.dim() == 3]
    assert len(experts) == 2
    assert all(isinstance(p, QuantizedTensor) and p.block_axis == MODELS[name][3] for p in experts)
    assert {layer.name for layer in report.left if "routes tokens" in layer.reason} == {
        f"{path}.weight" for path in routers(model)
    }


def test_linear_layers_and_experts_of_one_model_have_an_axis_each():
    model = model_of("gpt_oss")
    quantize_(model, SchemeConfig(scheme="int4_g32"), linear_and_experts)
    axes = {
        name.rsplit(".", 2)[-2]: p.block_axis
        for name, p in model.named_parameters()
        if isinstance(p, QuantizedTensor)
    }
    assert axes["q_proj"] == -1
    assert axes["experts"] == -2


def test_a_given_axis_is_taken():
    model = model_of("mixtral")
    quantize_(model, SchemeConfig(scheme="int4_g32", axis=-2), lambda module, path: path.endswith("experts"))
    assert {p.block_axis for p in model.parameters() if isinstance(p, QuantizedTensor)} == {-2}


def test_without_a_filter_experts_and_routers_stay_dense():
    """As torchao leaves experts; Llama 4's router is an nn.Linear."""
    model = model_of("llama4")
    report = quantize_(model, SchemeConfig(scheme="int4_g32"))
    reasons = {layer.name: layer.reason for layer in report.left}
    assert (
        "by default (no filter_fn) only nn.Linear"
        in reasons["model.layers.0.feed_forward.experts.gate_up_proj"]
    )
    assert "routes tokens to experts" in reasons["model.layers.0.feed_forward.router.weight"]
    assert {layer.name for layer in explain(model).left} == set(reasons)


def test_a_filter_of_ones_own_may_accept_a_router():
    model = model_of("llama4")
    report = quantize_(model, SchemeConfig(scheme="int4_g32"), lambda module, path: path.endswith("router"))
    assert [layer.name for layer in report.changed] == ["model.layers.0.feed_forward.router.weight"]


class Unknown(nn.Module):
    """Experts that say nothing of their orientation, square."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 64, 64))

    def forward(self, x):
        return torch.bmm(x, self.up)


class ByLinear(Unknown):
    """Experts that torch's linear multiplies with, one after the other."""

    def forward(self, x):
        return torch.stack([nn.functional.linear(x[i], self.up[i]) for i in range(4)])


class ByShape(nn.Module):
    """A fused projection and its counterpart, in either orientation."""

    def __init__(self, up, down):
        super().__init__()
        self.gate_up, self.down = nn.Parameter(torch.randn(4, *up)), nn.Parameter(torch.randn(4, *down))


def test_what_nothing_says_is_asked_for():
    model = Unknown()
    with pytest.raises(
        ValueError, match=r"up of shape \(4, 64, 64\).*give the configuration axis=-1 or axis=-2"
    ):
        quantize_(model, SchemeConfig(scheme="int4_g32"), lambda module, path: True)
    assert not isinstance(model.up, QuantizedTensor)
    quantize_(model, SchemeConfig(scheme="int4_g32", axis=-2), lambda module, path: True)
    assert model.up.block_axis == -2


@pytest.mark.parametrize(
    ("module", "axis"),
    [
        (Unknown(), None),
        (ByLinear(), -1),
        (ByShape((96, 64), (64, 48)), -1),
        (ByShape((64, 96), (48, 64)), -2),
        (ByShape((64, 64), (64, 64)), None),
        (ByShape((128, 64), (64, 64)), -1),
        (ByShape((64, 128), (64, 64)), -2),
    ],
)
def test_what_a_module_says_of_its_axis(module, axis):
    assert is_experts(module)
    assert contraction_axis(module, next(module.parameters())) == axis


class Turned(Unknown):
    """As ByLinear, each matrix turned before: (experts, in, out)."""

    def forward(self, x):
        return torch.stack([nn.functional.linear(x[i], self.up[i].T) for i in range(4)])


class Beside(Unknown):
    """A table that is looked up in beside a product by torch's linear with another weight."""

    def __init__(self):
        super().__init__()
        self.table, self.weight = nn.Parameter(torch.randn(2, 9, 64)), nn.Parameter(torch.randn(64, 64))
        del self.up

    def look_up(self):
        return self.table[0]

    def forward(self, x):
        return nn.functional.linear(x, self.weight) + self.look_up()


class Attention(nn.Module):
    """Kernels of attention with three axes, a scale for each head, and a layer that has as many outputs as a kernel entries."""

    def __init__(self):
        super().__init__()
        self.q, self.logit_scale = nn.Parameter(torch.randn(64, 4, 16)), nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x):
        return torch.einsum("bh,hnd->bnd", x, self.q)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.up, self.down = Attention(), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return self.down(self.up(self.attention(x).flatten(1)))


@pytest.mark.parametrize("axis", [None, -1, -2])
def test_what_is_no_experts_is_left(axis):
    """Whatever axis is given for those that are; the model computes afterwards."""
    model = nn.Sequential(Block())
    report = quantize_(
        model, SchemeConfig(scheme="int8_rowwise" if axis is None else "nf4", axis=axis), linear_and_experts
    )
    assert [layer.name for layer in report.changed] == ["0.up.weight", "0.down.weight"]
    reasons = {layer.name: layer.reason for layer in report.left}
    assert "not recognized as experts" in reasons["0.attention.q"]
    assert "its entries are no matrices" in reasons["0.attention.logit_scale"]
    assert model(torch.randn(2, 64)).isfinite().all()


@pytest.mark.parametrize("module", [Turned(), Beside()])
def test_linear_says_the_axis_of_what_it_multiplies_with_as_it_is(module):
    assert contraction_axis(module, next(module.parameters())) is None
    assert not linear_and_experts(module, "")


@pytest.mark.parametrize(
    ("kind", "fields", "left"),
    [
        ("XLNetLMHeadModel", {"vocab_size": 256, "d_model": 128, "n_layer": 1, "n_head": 4, "d_inner": 256}, ".rel_attn.q"),
        ("FunnelBaseModel", {"vocab_size": 64, "d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 128,
                             "block_sizes": [1], "num_decoder_layers": 1}, ".attention.r_kernel"),
    ],
)  # fmt: skip
def test_models_with_kernels_of_three_axes(kind, fields, left):
    """The rest is quantized, the experts' rule takes none of their layers for a router, and they run."""
    transformers = pytest.importorskip("transformers")
    model = getattr(transformers, kind)(getattr(transformers, kind).config_class(**fields)).eval()
    report = quantize_(model, SchemeConfig(scheme="int8_rowwise", axis=-1), linear_and_experts)
    reasons = {layer.name: layer.reason for layer in report.left}
    assert any(
        name.endswith(left) and "not recognized as experts" in reason for name, reason in reasons.items()
    )
    assert not any("routes tokens" in reason for reason in reasons.values())
    with torch.no_grad():
        assert model(input_ids=torch.arange(8)[None])[0].isfinite().all()


def test_one_entry_is_no_batch():
    module = ByShape((96, 64), (64, 48))
    module.gate_up, module.down = (nn.Parameter(p[:1]) for p in (module.gate_up, module.down))
    assert not is_experts(module)
    assert not is_experts(nn.Conv1d(4, 4, 3))


def test_what_was_quantized_before_keeps_its_reason():
    """A second call with another filter refuses nothing that the first one changed."""
    model = model_of("mixtral")
    config = SchemeConfig(scheme="int4_g32")
    quantize_(model, config)
    report = quantize_(model, config, lambda module, path: path.endswith("experts"))
    reasons = {layer.name: layer.reason for layer in report.changed}
    assert reasons["lm_head.weight"] == "Linear"
    assert reasons["model.layers.0.mlp.experts.down_proj"] == "accepted by filter_fn"
    assert [layer.reason for layer in report.left] == ["refused by filter_fn"]


BIAS = torch.linspace(-1, 1, 4 * 48).reshape(4, 48)
#: Products with a batch of matrices (4, 48, 64), of inputs (4, 5, 64).
PRODUCTS = {
    "bmm": lambda w, x: torch.bmm(x, w.transpose(1, 2)),
    "matmul": lambda w, x: x @ w.mT,
    "permuted": lambda w, x: torch.matmul(x, w.permute(0, 2, 1)),
    "baddbmm": lambda w, x: torch.baddbmm(BIAS[:, None], x, w.mT),
    "einsum": lambda w, x: torch.einsum("eti,eoi->eto", x, w),
    "einsum, weight first": lambda w, x: torch.einsum("eoi,eti->eto", w, x),
    "linear": lambda w, x: torch.stack([nn.functional.linear(x[i], w[i]) for i in range(4)]),
    "linear, bias": lambda w, x: torch.stack([nn.functional.linear(x[i], w[i], BIAS[i]) for i in range(4)]),
    "linear, by name": lambda w, x: torch.stack([nn.functional.linear(x[i], weight=w[i]) for i in range(4)]),
    "addmm": lambda w, x: torch.stack([torch.addmm(BIAS[i], x[i], w[i].t()) for i in range(4)]),
    "weight on the left": lambda w, x: torch.stack([(w[i] @ x[i].T).T for i in range(4)]),
    "mv": lambda w, x: torch.stack([torch.mv(w[i], x[i, 0]) for i in range(4)]),
    "inner": lambda w, x: torch.inner(x[0], w[0]),
    "tensordot": lambda w, x: torch.tensordot(x[0], w[0], ([1], [1])),
    "unbind": lambda w, x: torch.stack([a @ b.T for a, b in zip(x, w.unbind(0), strict=True)]),
    "indexed": lambda w, x: torch.bmm(x, w[torch.arange(4)].mT),
    "chunks": lambda w, x: torch.cat([torch.bmm(x, part.mT) for part in w.chunk(2, dim=1)], -1),
    "one matrix": lambda w, x: nn.functional.linear(x[0], w.reshape(-1, 64)),
    "detached": lambda w, x: torch.bmm(x, w.detach().mT),
    "cast": lambda w, x: torch.bmm(x.double(), w.double().mT).float(),
    "vmap": lambda w, x: torch.vmap(lambda a, b: a @ b.T)(x, w),
    "element by element": lambda w, x: (x[:, :, None, :] * w[:, None]).sum(-1),
}


@pytest.mark.parametrize("scheme", ["nf4", "int8_rowwise", "int4_g32"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_every_product_has_the_quantized_values_or_raises(name, scheme):
    """Of weights alone, so that the products of the dequantized weights are what is meant."""
    torch.manual_seed(0)
    module, x = nn.Module(), torch.randn(4, 5, 64)
    module.up = nn.Parameter(torch.randn(4, 48, 64))
    quantize_(module, SchemeConfig(scheme=scheme, axis=-1), lambda m, path: True)
    with torch.no_grad():
        wanted = PRODUCTS[name](module.up.dequantize(), x)
        try:
            found = PRODUCTS[name](module.up, x)
        except (NotImplementedError, ValueError) as error:
            assert scheme in str(error)  # noqa: PT017  (either answer is right)
            return
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
