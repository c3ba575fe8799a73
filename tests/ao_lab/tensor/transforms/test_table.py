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
from torch.fx.experimental.proxy_tensor import make_fx

from ao_lab import Recipe, SchemeConfig, SparsityConfig, quantize_, quantized, sparsify_
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


def layer(weight, activation, how=""):
    made = nn.Linear(64, 32)
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


def same(made, wanted):
    torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-4)


def exact(made, wanted):
    assert torch.equal(made, wanted)


def functional_call(m):
    exact(torch.func.functional_call(m, dict(m.named_parameters()), (X,)), m(X))


def grad(m):
    x = X.clone().requires_grad_()
    m(x).square().sum().backward()
    same(torch.func.grad(lambda x: m(x).square().sum())(X), x.grad)


def grad_of_parameters(m):
    weights = dict(m.named_parameters())
    made = torch.func.grad(lambda p: torch.func.functional_call(m, p, (X,)).sum())(weights)
    same(made["bias"], torch.full((32,), 3.0))
    assert made["weight"].shape == m.weight.shape


def jvp(m):
    """<v, J t> is <J' v, t>: tangents are multiplied by the weight that gradients are multiplied by."""
    t, v = MORE[:3], torch.ones(3, 32)
    y, pushed = torch.func.jvp(m, (X,), (t,))
    exact(y, m(X))
    same((v * pushed).sum(), (torch.func.vjp(m, X)[1](v)[0] * t).sum())


def jacobians(m):
    same(torch.func.jacfwd(m)(X[0]), torch.func.jacrev(m)(X[0]))


def linearize(m):
    exact(torch.func.linearize(m, X)[0], m(X))


def vmap(m):
    xs = torch.stack([X * 100, X, -X])
    same(torch.vmap(m)(xs), torch.stack([m(x) for x in xs]))


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
    exact(torch.jit.trace(m, (X,))(MORE), m(MORE))


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
            same(compiled(rows), m(rows))
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
    same(program.run_decompositions().module()(MORE), m(MORE))


BY_DAY = (
    functional_call, grad, grad_of_parameters, jvp, jacobians, vmap, ensemble, fake, meta, graph, symbolic_trace, no_rows,
    no_axis, nan_input, fast_path,
)  # fmt: skip
EAGER = (*BY_DAY, linearize, jit_trace, jit_script, jit_save)
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
@pytest.mark.parametrize("kind", KINDS)
def test_by_night(kind):
    for transform in EAGER:
        walk(transform, KINDS[kind])


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
            for transform in EAGER:
                walk(transform, (scheme, activation))


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_with_unbacked_rows(scheme):
    for activation in (None, scheme):
        if takes(scheme, activation):
            walk(unbacked, (scheme, activation))
