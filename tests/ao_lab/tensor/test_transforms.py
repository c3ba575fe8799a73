"""The table of transforms and kinds of quantized layers: one stated answer each.

"right" is what the layer gives without the transform: the same bits, or within float32 rounding where torch forms other
products. Any other answer is a class of errors with words of its message. By day one scheme of each structure is walked through
what costs milliseconds; by night all schemes, and what compiles.
"""

import io

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from ao_lab import Recipe, SchemeConfig, SparsityConfig, quantize_, quantized, sparsify_
from ao_lab.tensor.transforms import shares_scales
from reference import SCHEMES, Scales

# torch's own tools call each other what they deprecate.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning"),
]

#: (weight, inputs, how): one for each structure of parts and way to a product.
KINDS = {
    "rows": ("int8_rowwise", None, ""),
    "groups, packed": ("int4_g32_asymmetric", None, ""),
    "codebook": ("nf4", None, ""),
    "dynamic rows": ("int8_rowwise", "int8_rowwise", ""),
    "dynamic asymmetric": ("int4_g32", "int8_rowwise_asymmetric", ""),
    "static": ("int8_rowwise", "int8_tensorwise", "static"),
    "float8 tensor": ("fp8_tensorwise", "fp8_tensorwise", ""),
    "float8 rows": ("fp8_rowwise", "fp8_rowwise", ""),
    "mx": ("mxfp8_e4m3", "mxfp8_e4m3", ""),
    "two levels": ("nvfp4", "nvfp4", ""),
    "2:4": ("int4_g32_asymmetric", None, "2:4"),
    "2:4 dynamic": ("int8_rowwise", "int8_rowwise", "2:4"),
}
X = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
MORE = torch.randn(7, 64, generator=torch.Generator().manual_seed(1))


def layer(weight, activation, how="", bias=True):
    made = nn.Linear(64, 32, bias=bias)
    for at, parameter in enumerate(made.parameters()):
        nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(at))
    if how == "static":
        recipe = Recipe(weight=SCHEMES[weight], activation=SCHEMES[activation])
        made.weight = nn.Parameter(
            quantized(made.weight, recipe, input_scales=Scales(torch.tensor(0.03))), requires_grad=False
        )
    else:
        if how:
            sparsify_(made, SparsityConfig("2:4"))
        quantize_(made, SchemeConfig(scheme=weight, activation_scheme=activation, sparsity=how or None))
    return made.eval().requires_grad_(False)


def close(made, wanted):
    torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-4)


def exact(made, wanted):
    assert torch.equal(made, wanted)


def functional_call(m):
    exact(torch.func.functional_call(m, dict(m.named_parameters()), (X,)), m(X))


def grad(m):
    x = X.clone().requires_grad_()
    m(x).square().sum().backward()
    close(torch.func.grad(lambda x: m(x).square().sum())(X), x.grad)


def grad_of_parameters(m):
    weights = dict(m.named_parameters())
    made = torch.func.grad(lambda p: torch.func.functional_call(m, p, (X,)).sum())(weights)
    close(made["bias"], torch.full((32,), 3.0))
    assert made["weight"].shape == m.weight.shape


def jvp(m):
    """<v, J t> is <J' v, t>: tangents are multiplied by the weight that gradients are multiplied by."""
    t, v = MORE[:3], torch.ones(3, 32)
    y, pushed = torch.func.jvp(m, (X,), (t,))
    exact(y, m(X))
    close((v * pushed).sum(), (torch.func.vjp(m, X)[1](v)[0] * t).sum())


def jacobians(m):
    close(torch.func.jacfwd(m)(X[0]), torch.func.jacrev(m)(X[0]))


def linearize(m):
    y, push = torch.func.linearize(m, X)
    exact(y, m(X))
    close(push(MORE[:3]), torch.func.jvp(m, (X,), (MORE[:3],))[1])


def duals(m):
    """Tangents that no transform of torch.func wraps."""
    with forward_ad.dual_level():
        y, pushed = forward_ad.unpack_dual(m(forward_ad.make_dual(X, MORE[:3])))
    exact(y, m(X))
    close(pushed, torch.func.jvp(m, (X,), (MORE[:3],))[1])


def vmap(m):
    xs = torch.stack([X * 100, X, -X])
    close(torch.vmap(m)(xs), torch.stack([m(x) for x in xs]))


def ensemble(m):
    torch.func.stack_module_state([m, m])


def fake(m):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y = m(mode.from_tensor(X))
    assert (tuple(y.shape), y.dtype) == ((3, 32), torch.float32)


def meta(m):
    assert m.to("meta")(X.to("meta")).shape == (3, 32)


def graph(m):
    exact(make_fx(m)(X)(X), m(X))


def symbolic_trace(m):
    exact(torch.fx.symbolic_trace(m)(MORE), m(MORE))


def jit_trace(m):
    """For any number of rows, with gradients and without."""
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            traced = torch.jit.trace(m, (X,))
            exact(traced(MORE), m(MORE))
            exact(traced(MORE[None]), m(MORE[None]))


def jit_script(m):
    exact(torch.jit.script(m)(MORE), m(MORE))


def jit_save(m):
    torch.jit.save(torch.jit.trace(m, (X,)), io.BytesIO())


def no_rows(m):
    assert m(X[:0]).shape == (0, 32)
    assert m(X[:0][None]).shape == (1, 0, 32)


def no_axis(m):
    m(torch.tensor(1.0))


def nan_input(m):
    bad = X.clone()
    bad[1, 5] = float("nan")
    assert m(bad)[1].isnan().all()


def fast_path(m):
    """torch's fast path of encoder layers, which reads weights as plain memory, is left to dense weights."""
    torch.manual_seed(0)
    encoder = (
        nn.TransformerEncoderLayer(64, 4, 32, batch_first=True, dropout=0.0).eval().requires_grad_(False)
    )
    encoder.linear1 = m
    x = torch.stack([X, X])
    with torch.no_grad():
        made = encoder(x)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            wanted = encoder(x)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    # Attention's last bits differ, and with them a code of an input now and then, which of 2 bits is a third of a row's range;
    # a weight that is read as plain memory is as far away as another weight.
    assert (made - wanted).norm() < 0.1 * wanted.norm()


def unbacked(m):
    torch.compiler.reset()
    x = MORE.clone()
    torch._dynamo.decorators.mark_unbacked(x, 0)
    compiled = torch.compile(m, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for rows in (x, X, X[:1]):
            close(compiled(rows), m(rows))
        assert compiled(X[:0]).shape == (0, 32)


def one_program(m):
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(m, fullgraph=True, dynamic=True, backend=counter)
    with torch.no_grad():
        for rows in (MORE, X, MORE[:5]):
            exact(compiled(rows), m(rows))
    assert counter.frame_count == 1


def export(m):
    shapes = ({0: torch.export.Dim("rows", min=1, max=64)},)
    program = torch.export.export(m, (X,), dynamic_shapes=shapes)
    exact(program.module()(MORE), m(MORE))
    close(program.run_decompositions().module()(MORE), m(MORE))


BY_DAY = (
    functional_call, grad, grad_of_parameters, jvp, duals, linearize, jacobians, vmap, ensemble, fake, meta, graph,
    symbolic_trace, no_rows, no_axis, nan_input, fast_path, jit_trace, jit_script, jit_save,
)  # fmt: skip
COMPILED = (unbacked, one_program, export)
#: By transform, for every kind: what is not right.
ANSWERS = {
    ensemble: (NotImplementedError, r"stack.* of a QuantizedTensor .*dequantize\(\) it first"),
    jit_save: (ValueError, r"is a QuantizedTensor, .*torch\.export\.save"),
    no_axis: (RuntimeError, "both arguments to linear need to be at least 1D"),
}


def walk(transform, kind):
    m = layer(*kind)
    if transform not in ANSWERS:
        transform(m)
        return
    error, words = ANSWERS[transform]
    with pytest.raises(error, match=words):
        transform(m)


@pytest.mark.parametrize("kind", KINDS)
def test_by_day(kind):
    for transform in BY_DAY:
        walk(transform, KINDS[kind])


def test_unbacked_rows():
    walk(unbacked, KINDS["float8 tensor"])


@pytest.mark.nightly
@pytest.mark.parametrize("transform", COMPILED)
@pytest.mark.parametrize("kind", KINDS)
def test_compiled(kind, transform):
    walk(transform, KINDS[kind])


def takes(scheme, activation):
    """Whether a layer of the table's size can have the schemes, and its inputs any number of rows."""
    try:
        layer(scheme, activation)(X)
    except (ValueError, TypeError):
        return False
    return True


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme(scheme):
    for activation in (None, scheme):
        if takes(scheme, activation):
            for transform in BY_DAY:
                walk(transform, (scheme, activation))


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_with_unbacked_rows(scheme):
    for activation in (None, scheme):
        if takes(scheme, activation):
            walk(unbacked, (scheme, activation))


# torch.vmap over layers whose inputs share a scale: what an example gives does not depend on the others.

#: One scale for the tensor, one outer scale, and one that is given: with the first two rows depend on each other.
SHARED = [("fp8_tensorwise", "fp8_tensorwise"), ("nvfp4", "nvfp4"), ("int8_rowwise", "int8_tensorwise")]
OWN = [("int8_rowwise", "int8_rowwise"), ("mxfp8_e4m3", "mxfp8_e4m3"), ("nf4", None)]


def examples(*shape):
    xs = torch.randn(*shape, 64, generator=torch.Generator().manual_seed(3))
    xs[0] *= 100
    return xs


@pytest.mark.parametrize(("scheme", "activation"), SHARED)
@pytest.mark.parametrize("bias", [True, False])
def test_an_example_gives_what_it_gives_alone(scheme, activation, bias):
    m = layer(scheme, activation, bias=bias)
    assert shares_scales(m.weight)
    for xs in (examples(4, 3), examples(4), examples(2, 2, 3)):
        wanted = torch.stack([m(x) for x in xs])
        assert torch.equal(torch.vmap(m)(xs), wanted)
        assert torch.equal(torch.vmap(m, in_dims=1)(xs.transpose(0, 1)), wanted) or xs.dim() == 2
    nested = torch.vmap(torch.vmap(m))(examples(2, 2, 3))
    assert torch.equal(nested, torch.stack([torch.stack([m(x) for x in xs]) for xs in examples(2, 2, 3)]))


@pytest.mark.parametrize(("scheme", "activation"), [*SHARED, OWN[0]])
def test_gradients_of_each_example(scheme, activation):
    m, xs = layer(scheme, activation), examples(4, 3)

    def loss(x, bias):
        return F.linear(x, m.weight, bias).square().sum()

    wanted = [torch.func.grad(loss, argnums=(0, 1))(x, m.bias) for x in xs]
    made = torch.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(0, None))(xs, m.bias)
    for at in (0, 1):
        torch.testing.assert_close(made[at], torch.stack([one[at] for one in wanted]))
    tangents = torch.ones_like(xs)
    pushed = torch.vmap(lambda x, t: torch.func.jvp(m, (x,), (t,)))(xs, tangents)
    alone = [torch.func.jvp(m, (x,), (t,)) for x, t in zip(xs, tangents, strict=True)]
    for at in (0, 1):
        torch.testing.assert_close(pushed[at], torch.stack([one[at] for one in alone]))


@pytest.mark.parametrize("of", [torch.func.jacrev, torch.func.jacfwd])
def test_jacobians_of_each_example(of):
    m, xs = layer("nvfp4", "nvfp4"), examples(3)
    torch.testing.assert_close(torch.vmap(of(m))(xs), torch.stack([of(m)(x) for x in xs]))


@pytest.mark.parametrize(("scheme", "activation"), OWN)
def test_rows_with_scales_of_their_own_go_together(scheme, activation):
    m, xs = layer(scheme, activation), examples(4, 3)
    assert not shares_scales(m.weight)
    torch.testing.assert_close(torch.vmap(m)(xs), torch.stack([m(x) for x in xs]), rtol=1e-4, atol=1e-4)


def test_given_scales_are_shared_by_right():
    recipe = Recipe(weight=SCHEMES["int8_rowwise"], activation=SCHEMES["int8_tensorwise"])
    weight = quantized(torch.ones(32, 64), recipe, input_scales=Scales(torch.tensor(0.03)))
    assert not shares_scales(weight)


def test_other_products_and_stacked_weights_are_refused():
    recipe = Recipe(weight=SCHEMES["fp8_tensorwise"], activation=SCHEMES["fp8_tensorwise"])
    weights, xs = quantized(torch.ones(4, 32, 64), recipe), examples(4, 3)
    for call in (
        lambda: torch.vmap(lambda x: x @ weights[0].t())(xs),
        lambda: torch.vmap(F.linear)(xs, weights),
    ):
        with pytest.raises(ValueError, match=r"one scale for all tokens.* one example at a time"):
            call()
    own = quantized(
        torch.ones(4, 32, 64), Recipe(weight=SCHEMES["int8_rowwise"], activation=SCHEMES["int8_rowwise"])
    )
    torch.testing.assert_close(
        torch.vmap(F.linear)(xs, own), torch.stack([F.linear(x, w) for x, w in zip(xs, own, strict=True)])
    )
