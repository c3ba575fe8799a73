"""Modules of experts train by a recipe: those of transformers by a forward of ours that sorts tokens, others by their own,
whose products are taken over, or an error."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, silu

import ao_lab
from ao_lab.training.grouped.autograd import grouped_linear
from ao_lab.training.grouped.experts import LowPrecisionExperts, combine, sort_by_expert
from reference.training.recipe import RECIPES
from tests.support.refusals import refused


def test_pairs_stand_by_expert_in_the_order_of_tokens():
    indices = torch.tensor([[2, 0], [0, 5], [2, 2], [-1, 0]])
    order, offsets, counts = sort_by_expert(indices, 4)
    assert order.tolist() == [1, 2, 7, 0, 4, 5, 3, 6]
    assert offsets.tolist() == [3, 3, 6, 6]
    assert counts.tolist() == [3, 0, 3, 0]
    assert offsets.dtype == counts.dtype == torch.int32


def test_no_tokens():
    order, offsets, counts = sort_by_expert(torch.empty(0, 2, dtype=torch.int64), 3)
    assert order.shape == (0,)
    assert offsets.tolist() == counts.tolist() == [0, 0, 0]
    assert combine(torch.empty(0, 5), order, torch.empty(0, 2)).shape == (0, 5)


def test_values_are_no_indices():
    refused(TypeError, "topk's indices", sort_by_expert, torch.rand(3, 2), 4)


def test_results_come_back_to_their_tokens():
    """The weighted sum that a loop over tokens gives, rounded once, and its gradients."""
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(4, (9, 3), generator=generator)
    weights = torch.rand(9, 3, generator=generator).requires_grad_()
    table = torch.randn(4, 9, 6, generator=generator).bfloat16()
    order, _, _ = sort_by_expert(indices, 4)
    rows = table[indices.reshape(-1)[order], order // 3].requires_grad_()
    found = combine(rows, order, weights)
    truth = sum(table[indices[:, c], torch.arange(9)].float() * weights[:, c : c + 1] for c in range(3))
    assert torch.equal(found, truth.bfloat16())
    found.float().sum().backward()
    torch.testing.assert_close(weights.grad, table[indices, torch.arange(9)[:, None]].float().sum(-1))
    assert torch.equal(rows.grad, weights.detach().reshape(-1)[order, None].expand(-1, 6).bfloat16())


# Products with experts in a forward of a module's own: taken over, or an error, never in high precision unseen.

SIZES = (9, 0, 1, 14)


class Experts(nn.Module):
    """A first product that every recipe takes over, and a second one of a test's own."""

    def __init__(self, second):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(E, F, K) / 8)
        self.w2 = nn.Parameter(torch.randn(E, K, F) / 8)
        self.b2 = nn.Parameter(torch.randn(E, 1, K))
        self.second = second

    def forward(self, *, x):
        parts = [(e, silu(linear(part, self.w1[e]))) for e, part in enumerate(torch.split(x, SIZES))]
        return torch.cat([self.second(self, h, e) for e, h in parts])


def converted(second, seed=0):
    torch.manual_seed(seed)
    plain = Experts(second).bfloat16()
    net = copy.deepcopy(plain)
    ao_lab.convert_for_training_(net, "rowwise")
    return net, plain, torch.randn(T, K).bfloat16()


TAKEN = {
    "bias": lambda m, h, e: linear(h, m.w2[e], m.b2[e, 0]) - m.b2[e, 0],
    "keywords": lambda m, h, e: linear(h, weight=m.w2[e]),
    "all keywords": lambda m, h, e: linear(input=h, weight=m.w2[e], bias=None),
    "three axes": lambda m, h, e: linear(h[None], m.w2[e])[0],
    "matmul of three axes": lambda m, h, e: torch.matmul(h[:, None], m.w2[e].T)[:, 0],
    "matmul by keyword": lambda m, h, e: torch.matmul(h, other=m.w2[e].mT),
    "cast before": lambda m, h, e: linear(h, m.w2.float().bfloat16()[e]),
    "contiguous": lambda m, h, e: h @ m.w2[e].T.contiguous(),
    "rows one by one": lambda m, h, e: torch.stack([one @ m.w2[e].T for one in h]) if len(h) else h[:, :K],
}


@pytest.mark.parametrize("second", TAKEN)
def test_taken_over(second):
    """By the recipe, as `grouped_linear` of the same rows."""
    net, plain, x = converted(TAKEN[second])
    offsets = torch.tensor(SIZES).cumsum(0)
    h = silu(grouped_linear(x, plain.w1, offsets, RECIPES["rowwise"]))
    wanted = grouped_linear(h, plain.w2, offsets, RECIPES["rowwise"])
    found = net(x=x)
    if second == "bias":
        bias = plain.b2[:, 0].repeat_interleave(torch.tensor(SIZES), 0)
        wanted = wanted + bias - bias
    assert torch.equal(found, wanted)
    for y in (found, wanted):
        y.float().square().sum().backward()
    if second != "rows one by one":
        assert torch.equal(net.w2.grad, plain.w2.grad)


REFUSED = {
    "einsum": lambda m, h, e: torch.einsum("tf,kf->tk", h, m.w2[e]),
    "addmm": lambda m, h, e: torch.addmm(m.b2[e], h, m.w2[e].T),
    "baddbmm": lambda m, h, e: torch.baddbmm(m.b2[e][None], h[None], m.w2[e].T[None])[0],
    "matmul": lambda m, h, e: (m.w2[e] @ h.T).T,
    "mv": lambda m, h, e: torch.stack([torch.mv(m.w2[e], one) for one in h]) if len(h) else h[:, :K],
    "einsum of a cast": lambda m, h, e: torch.einsum("tf,kf->tk", h, m.w2[e].float().bfloat16()),
    "grouped_mm": lambda m, h, e: nn.functional.grouped_mm(
        h, m.w2.transpose(1, 2), offs=torch.full((E,), len(h), dtype=torch.int32), out_dtype=torch.float32
    ),
}


@pytest.mark.parametrize("second", REFUSED)
def test_refused(second):
    """By name of the parameter and of the function, before it is computed in high precision."""
    net, _, x = converted(REFUSED[second])
    refused(RuntimeError, f"Experts multiplies .*w2 by _*{second.partition(' ')[0]} in a way", net, x=x)


def test_parameters_without_a_product():
    """One that is summed over, and one that no function takes."""
    for second in (lambda m, h, e: h @ h.new_zeros(F, K), lambda m, h, e: (h[:, None] * m.w2[e]).sum(2)):
        net, _, x = converted(second)
        refused(RuntimeError, r"called no matmul with its experts .*, of w2; exclude it", net, x=x)


T, K, F, E = 24, 32, 64, 4


class TransformersLike(nn.Module):
    """Experts that say of themselves what transformers' decorator lets them say; forward as its eager one."""

    def __init__(self, *, transposed=False, bias=False, gate=True, norm=False):
        super().__init__()
        self.has_gate, self.has_bias, self.is_transposed = gate, bias, transposed
        self.has_post_expert_norm, self.num_experts = norm, E
        first, wide = ("gate_up_proj", 2 * F) if gate else ("up_proj", F)
        for name, shape in ((first, (wide, K)), ("down_proj", (K, F))):
            self.register_parameter(
                name, nn.Parameter(torch.randn(E, *shape[:: -1 if transposed else 1]) / 8)
            )
            if bias:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(E, shape[0])))
        self.act_fn = nn.SiLU()
        if norm:
            self.post_expert_norm = nn.RMSNorm(K)

    def _apply_gate(self, x):
        gate, up = x.chunk(2, -1)
        return self.act_fn(gate) * up

    def _one(self, name, x, expert):
        w = getattr(self, name)[expert]
        y = x @ (w if self.is_transposed else w.T)
        return y + getattr(self, f"{name}_bias")[expert] if self.has_bias else y

    def forward(self, hidden_states, top_k_index, top_k_weights):
        result = torch.zeros_like(hidden_states)
        for expert in range(E):
            token, choice = torch.where(top_k_index == expert)
            y = self._one("gate_up_proj" if self.has_gate else "up_proj", hidden_states[token], expert)
            y = self._one("down_proj", self._apply_gate(y) if self.has_gate else self.act_fn(y), expert)
            y = self.post_expert_norm(y) if self.has_post_expert_norm else y
            result = result.index_add(0, token, y * top_k_weights[token, choice, None])
        return result


class GroupedExperts(nn.Module):
    """As torchtitan's: rows sorted by expert, products in functions of the module's file."""

    def __init__(self, function):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(E, F, K) / 8)
        self.w2 = nn.Parameter(torch.randn(E, K, F) / 8)
        self.mixer = nn.Parameter(torch.randn(K, K) / 8)
        self.shared = nn.Linear(K, K)
        self.function = function

    def forward(self, x, counts):
        return run_experts(self.w1, self.w2, x, counts, self.function) + self.shared(x @ self.mixer)


def run_experts(w1, w2, x, counts, function):
    if function == "grouped_mm":
        return by_grouped_mm(w1, w2, x, counts)
    if function == "loop":
        return by_loop(w1, w2, x, counts)
    return by_batch(w1, w2, x, counts) if function == "batch" else x


def by_grouped_mm(w1, w2, x, counts):
    offsets = counts.cumsum(0).to(torch.int32)
    h = nn.functional.silu(torch._grouped_mm(x, w1.transpose(-2, -1), offs=offsets))
    return nn.functional.grouped_mm(h, w2.transpose(-2, -1), offs=offsets)


def by_loop(w1, w2, x, counts):
    parts = torch.split(x, counts.tolist())
    return torch.cat([
        torch.matmul(nn.functional.silu(nn.functional.linear(part, w1[e])), w2[e].transpose(-2, -1))
        for e, part in enumerate(parts)
    ])  # fmt: skip


def by_batch(w1, w2, x, counts):
    h = nn.functional.silu(torch.bmm(x.view(E, -1, K), w1.transpose(1, 2)))
    return (h @ w2.transpose(1, 2)).reshape(-1, K)


def routed(dtype=torch.float32, seed=0):
    """Hidden states, experts and weights; the second expert has no token."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.tensor([0, 2, 3])[
        torch.stack([torch.randperm(3, generator=generator)[:2] for _ in range(T)])
    ]
    x = torch.randn(T, K, generator=generator).to(dtype)
    return x, index, torch.rand(T, 2, generator=generator).to(dtype)


def results(module, x, index, weights):
    """Output, and gradients of the hidden states, the weights of the choices and all parameters."""
    module.zero_grad()
    leaves = [t.clone().requires_grad_() for t in (x, weights)]
    y = module(leaves[0], index, leaves[1])
    (y * torch.linspace(-1, 1, K).to(y.dtype)).sum().backward()
    return [y.detach(), *(leaf.grad for leaf in leaves), *(p.grad.clone() for p in module.parameters())]


OPTIONS = [
    {},
    {"transposed": True, "bias": True},
    {"gate": False, "bias": True},
    {"norm": True, "bias": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_forward_of_transformers(options):
    """Unquantized, in float32, the module's own results; tokens of no expert add nothing."""
    torch.manual_seed(0)
    plain = TransformersLike(**options)
    net = copy.deepcopy(plain)
    assert ao_lab.convert_for_training_(net, "bf16").changed == ("",)
    x, index, weights = routed()
    for marks in ([], [3, 7]):
        index[marks, 0] = E
        for found, truth in zip(
            results(net, x, index, weights), results(plain, x, index, weights), strict=True
        ):
            torch.testing.assert_close(found, truth)


@pytest.mark.parametrize("name", ["rowwise", "mxfp8"])
@pytest.mark.parametrize("transposed", [False, True])
def test_its_products_are_those_of_the_recipe(name, transposed):
    torch.manual_seed(0)
    net = TransformersLike(transposed=transposed).bfloat16()
    ao_lab.convert_for_training_(net, name)
    x, index, _ = routed(torch.bfloat16)
    order = index.reshape(-1).argsort(stable=True)
    offsets = torch.bincount(index.reshape(-1), minlength=E).cumsum(0)
    first, second = (w.transpose(1, 2) if transposed else w for w in (net.gate_up_proj, net.down_proj))
    h = net._apply_gate(grouped_linear(x[order // 2], first, offsets, RECIPES[name]))
    y = grouped_linear(h, second, offsets, RECIPES[name])
    wanted = torch.zeros(2 * T, K).index_copy(0, order, y.float()).view(T, 2, K).sum(1).bfloat16()
    assert torch.equal(net(x, index, torch.ones(T, 2).bfloat16()), wanted)


@pytest.mark.parametrize("function", ["grouped_mm", "loop", "batch"])
def test_products_of_a_forward_of_its_own(function):
    """Those with experts by the recipe, those of other parameters and layers inside as before."""
    torch.manual_seed(0)
    net = GroupedExperts(function).bfloat16()
    plain = copy.deepcopy(net)
    report = ao_lab.convert_for_training_(net, "rowwise", lambda module, name: name != "shared")
    assert report.changed == ("",)
    x = routed(torch.bfloat16)[0]
    counts = torch.full((E,), T // E) if function == "batch" else torch.tensor([9, 0, 1, 14])
    h = nn.functional.silu(grouped_linear(x, plain.w1, counts.cumsum(0), RECIPES["rowwise"]))
    wanted = grouped_linear(h, plain.w2, counts.cumsum(0), RECIPES["rowwise"]) + plain.shared(x @ plain.mixer)
    made = net(x, counts)
    for y in (made, wanted):
        y.float().square().sum().backward()
    assert torch.equal(made, wanted)
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_a_forward_without_such_products_says_so():
    net = GroupedExperts("grouped_mm")
    ao_lab.convert_for_training_(net, "rowwise")
    net.function = "nothing"
    refused(RuntimeError, "called no matmul with its experts", net, routed()[0], torch.tensor([24, 0, 0, 0]))

    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(4, 32, 32))

        def forward(self, x):
            return x + self.w.sum(0)

    with pytest.raises(ValueError, match=r"forward of Sums uses none of .*grouped_mm"):
        ao_lab.convert_for_training_(Sums(), "rowwise")


class Layer(nn.Module):
    """A router and experts, beside what stays."""

    def __init__(self, **options):
        super().__init__()
        self.gate, self.experts = nn.Linear(K, E, bias=False), TransformersLike(**options)

    def forward(self, x):
        weights, index = self.gate(x).float().softmax(-1).topk(2)
        return x + self.experts(x, index, weights.to(x.dtype))


def test_modules_parameters_and_checkpoints_stay():
    net, plain = Layer(), Layer()
    experts, weight = net.experts, net.experts.down_proj
    report = ao_lab.convert_for_training_(net, "rowwise")
    assert report.changed == ("experts",)
    assert report.left == {"gate": "it routes tokens to experts"}
    assert net.experts is experts
    assert experts.down_proj is weight
    assert isinstance(experts, TransformersLike)
    assert "recipe=rowwise" in repr(net)
    assert "trains by recipe 'rowwise'" in str(ao_lab.explain(net))
    plain.load_state_dict(net.state_dict())
    net.load_state_dict(plain.state_dict())
    x = torch.randn(T, K)
    assert torch.equal(pickle.loads(pickle.dumps(copy.deepcopy(net)))(x), net(x))
    torch.save(net, io.BytesIO())
    refused(ValueError, "'rowwise' already", ao_lab.convert_for_training_, net, "mxfp8")
    assert ao_lab.convert_from_training_(net) == ("experts",)
    assert type(net.experts) is TransformersLike
    assert not hasattr(net.experts, "low_precision")


def test_who_is_left_and_who_is_filled_up():
    net = Layer()
    net.experts.down_proj = nn.Parameter(torch.randn(E, 24, F))
    with pytest.raises(ValueError, match=r"down_proj has matrices of \(24, 64\), no multiples of 16"):
        ao_lab.convert_for_training_(net, "rowwise")
    ao_lab.convert_for_training_(net, "rowwise", pad=True)
    x, index, weights = routed()
    assert net.experts(x, index, weights).shape == (T, 24)
    net = nn.Sequential(Layer(), nn.Linear(K, K))
    assert ao_lab.convert_for_training_(net, "rowwise", experts=False).changed == ("1",)
    assert not isinstance(net[0].experts, LowPrecisionExperts)
    ao_lab.convert_from_training_(net)
    ao_lab.convert_to_float8_training(net)
    assert not isinstance(net[0].experts, LowPrecisionExperts)


def test_autocast():
    net = TransformersLike()
    ao_lab.convert_for_training_(net, "rowwise")
    with torch.autocast("cpu", torch.bfloat16):
        assert net(*routed()).dtype == torch.float32
        found = net(*routed())
    narrow = TransformersLike().bfloat16()
    narrow.load_state_dict(net.state_dict())
    ao_lab.convert_for_training_(narrow, "rowwise")
    x, index, weights = routed()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(found.bfloat16(), narrow(x.bfloat16(), index, weights))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_in_one_graph():
    """One graph for every routing."""
    torch.manual_seed(0)
    net = TransformersLike(bias=True).bfloat16()
    ao_lab.convert_for_training_(net, "rowwise")
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    for seed in (0, 1):
        given = routed(torch.bfloat16, seed)
        for found, truth in zip(results(compiled, *given), results(net, *given), strict=True):
            assert torch.equal(found, truth)


def test_training_learns():
    """Thirty steps: the loss falls to a third, as bfloat16's does."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(48, K, generator=generator).bfloat16()
    y = torch.randint(8, (48,), generator=generator)
    for name in ("bf16", "rowwise", "mxfp8", "nvfp4"):
        torch.manual_seed(0)
        net = nn.Sequential(Layer(), nn.Linear(K, 8)).bfloat16()
        ao_lab.convert_for_training_(net, name, lambda module, _: isinstance(module, TransformersLike))
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
        losses = []
        for _ in range(30):
            loss = nn.functional.cross_entropy(net(x).float(), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0] / 3, name


def test_experts_of_transformers():
    """Mixtral's (out, in) and gpt-oss's (in, out) with biases and gates of their own: unquantized, their own results."""
    from transformers import GptOssConfig, MixtralConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    for kind, config in ((MixtralExperts, MixtralConfig), (GptOssExperts, GptOssConfig)):
        torch.manual_seed(0)
        net = kind(
            config(hidden_size=K, intermediate_size=F, num_local_experts=E, experts_implementation="eager")
        )
        for parameter in net.parameters():
            nn.init.normal_(parameter, std=0.1)
        plain = copy.deepcopy(net)
        ao_lab.convert_for_training_(net, "bf16")
        assert type(net).__name__ == f"LowPrecision{kind.__name__}"
        x, index, weights = routed()
        for found, truth in zip(
            results(net, x, index, weights), results(plain, x, index, weights), strict=True
        ):
            torch.testing.assert_close(found, truth)
