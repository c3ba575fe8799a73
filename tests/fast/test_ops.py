"""Records that are made of others while a program is traced."""

import copy
import inspect
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._dynamo.exc import InternalTorchDynamoError
from torch.autograd import forward_ad

import ao_lab
import fast
import fast.layers.attention
import fast.layers.column_sums
import fast.layers.linear_gradients
import fast.quantize.rowwise_colwise
from fast.matmul.cpu_ops import linear as cpu_linear
from fast.matmul.preshuffled.grouped import grouped_linear_small
from fast.matmul.preshuffled.linear import linear_small, preshuffled
from fast.ops import LATE, constant_record, constant_result, derived
from reference import SCHEMES
from reference.schemes.schemes import RECORDS, record_of
from reference.training.recipe import recipe_of
from tests.support.examples import normals
from tests.support.runs import forks
from tests.support.traced import keys_without_origin

# Operators by themselves: torch's own checks of their schemas, fakes and gradients; results are those of the functions.

X, WIDE = normals(8, "cpu"), normals(64, "cpu", dtype=torch.bfloat16)
CODES = (torch.arange(8 * 64, dtype=torch.int32) % 100).to(torch.uint8).view(8, 64)
SCALE = torch.ones(())
STORED = fast.quantize(normals(64, "cpu"), "int4_g32", packed=True)
WEIGHT, ONE_ROW = (STORED.codes, STORED.scale, None, None), WIDE[:1].clone().requires_grad_()
MARKS = torch.full((len(WIDE), 8), 0x44, dtype=torch.uint8)
CALLS = {
    "choose_scales": (X, "nvfp4", -1),
    "encode": (X, "float8_e4m3fn", "nearest_even", "saturate", None),
    "decode": (CODES, "float8_e4m3fn"),
    "pack": (CODES, "int4"),
    "unpack": (CODES, "int3", [8, 170]),
    "quantize_both": (WIDE, "mxfp8_e4m3", False, [], False),
    "both_values": (WIDE, "mxfp8_e4m3"),
    "values_and_codes": (WIDE, "nvfp4"),
    "rms_norm": (X.clone().requires_grad_(), X.clone().requires_grad_(), X[0].clone().requires_grad_(), 1e-6),
    "rms_norm_quantize": (X, None, X[0].clone(), "int4_g32_asymmetric", 1e-6, True),
    "layer_norm_quantize": (X, X[0].clone(), X[1].clone(), "int4_g32_asymmetric", 1e-5, True),
    "swiglu": (WIDE.clone().requires_grad_(), WIDE.clone().requires_grad_()),
    "swiglu_quantize": (WIDE, WIDE.clone(), "nvfp4", True),
    "column_sums": (WIDE.clone().view(2, -1, 64).requires_grad_(), torch.float16),
    "weight_and_bias_gradients": (WIDE.clone().requires_grad_(), WIDE[:, :32].clone().requires_grad_()),
    "rms_norm_vjp": (X, X.clone(), X[0].clone(), X.clone(), 1e-6),
    "swiglu_vjp": (WIDE, WIDE.clone(), WIDE.clone()),
    "rotary": (X.clone().view(2, 2, 2, 64).requires_grad_(), X[:2].clone(), X[:2].clone(), False),
    "matmul": (X, None, None, None, X.T, None, None, None, None, '[null, null, {"out_dtype": "bfloat16"}]'),
    "cpu_linear": (ONE_ROW, *WEIGHT, None, [64, 64], "int4_g32", True),
    "linear_pair": (ONE_ROW, *WEIGHT, *WEIGHT, [64, 64], "int4_g32", True),
    "linear_swiglu": (ONE_ROW, *WEIGHT, *WEIGHT, [64, 64], "int4_g32", True, "int4_g32", True),
    "prune": (X, None, "2:4"),
    "prune_transposable": (X, None, "exact"),
    "compress": (X, None, "2:4"),
    "compress_transposable": (X,),
    "quantize_compressed": (X, None, torch.ones(8, 1), None, None, "fp8_rowwise", "2:4"),
    "arrange_sparse_metadata": (MARKS, torch.int8),
    "linear_sparse": (WIDE, WIDE[:, :32].contiguous(), MARKS, None, SCALE, None, torch.float32, True),
    "decompress": (X[:, :32].contiguous(), torch.full((8, 8), 0x44, dtype=torch.uint8)),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_operator(name):
    operator = getattr(torch.ops.ao_lab, name)
    assert set(torch.library.opcheck(operator, CALLS[name]).values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", ["both_values", "swiglu"])
def test_operators_call_their_implementation_on_gpus(name, monkeypatch):
    """Past what torch puts around it on CPUs, which compares memory: the same values."""
    operator, given = getattr(torch.ops.ao_lab, name).default, (WIDE, "mxfp8_e4m3")
    given = (WIDE, WIDE.clone()) if name == "swiglu" else given
    wanted = operator(*given)
    monkeypatch.setattr("torch._library.utils._c_check_aliasing_constraint", None)
    with pytest.raises(TypeError, match="not callable"):
        operator(*given)
    found = operator.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *given)
    pairs = zip(found, wanted, strict=True) if isinstance(wanted, list) else [(found, wanted)]
    assert all(torch.equal(one, other) for one, other in pairs)


def test_between_graphs_implementations_are_not_compiled():
    """As torch's own wrapping has it: Dynamo would look into what prepares launches."""
    operator = torch.ops.ao_lab.both_values.default
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)

    def call(x):
        torch._dynamo.graph_break()
        return operator.redispatch(keys, x, "mxfp8_e4m3")

    wanted = operator(WIDE, "mxfp8_e4m3")
    compiled = []
    found = torch.compile(call, backend=lambda graph, inputs: compiled.append(graph) or graph)(WIDE)
    assert not compiled
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_operators_that_have_no_gradient_refuse_one():
    """A gradient that was asked for is an error and no silent zero, on GPUs too; where none is, nothing is recorded."""
    x, operator = WIDE.clone().requires_grad_(), torch.ops.ao_lab.both_values.default
    plain, keys = operator(WIDE, "mxfp8_e4m3"), torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    for values in (operator(x, "mxfp8_e4m3"), operator.redispatch(keys, x, "mxfp8_e4m3")):
        assert all(torch.equal(one, other) for one, other in zip(values, plain, strict=True))
        with pytest.raises(NotImplementedError, match=r"both_values has no gradient.*ao_lab\.fake_quantize"):
            values[0].sum().backward()
    with torch.no_grad():
        assert not any(one.requires_grad for one in operator(x, "mxfp8_e4m3"))


@pytest.mark.filterwarnings("ignore:Error detected in _RefusingBackward:UserWarning")
def test_compiled_programs_refuse_a_gradient_too():
    """While they are traced, by a rule that eager calls do not see; what is detached, and no_grad, compile as ever."""
    x = WIDE.clone().requires_grad_()

    def program(x, scale):
        return torch.ops.ao_lab.both_values(x * scale, "mxfp8_e4m3")[0] + x

    compiled = torch.compile(program, backend="aot_eager")
    with pytest.raises(
        torch._dynamo.exc.BackendCompilerFailed, match=r"both_values has no gradient.*fake_quantize"
    ):
        compiled(x, 2.0)
    with torch.no_grad():
        assert torch.equal(compiled(x, 2.0), program(x, 2.0))
    torch.compile(lambda x: program(x.detach(), 2.0) + x, backend="aot_eager")(x).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.filterwarnings("ignore:Error detected in _RefusingBackward:UserWarning")
def test_what_a_compiled_program_returns_beside_is_detached():
    """A compiler differentiates all results; the message says the way out."""
    x = WIDE.clone().requires_grad_()

    def program(x, is_detached):
        y = torch.ops.ao_lab.both_values(x, "mxfp8_e4m3")[0]
        return x.sum(), y.detach() if is_detached else y

    compiled = torch.compile(program, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"or detach\(\) its results"):
        compiled(x, False)
    loss, values = compiled(x, True)
    loss.backward()
    assert torch.equal(values, program(x, True)[1])
    assert torch.equal(x.grad, torch.ones_like(x))


def test_operators_without_a_gradient_say_so():
    x = X.clone().requires_grad_()
    y = torch.ops.ao_lab.matmul(x, *CALLS["matmul"][1:])
    with pytest.raises(NotImplementedError, match="matmul has no gradient"):
        y.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_layers_are_those_of_the_formulas(dtype):
    """Against autograd through torch's own operations in float32."""
    gate, up = (normals(8, "cpu", seed, dtype).requires_grad_() for seed in (0, 1))
    wide = [t.detach().float().requires_grad_() for t in (gate, up)]
    g = normals(8, "cpu", 2, dtype)
    fast.swiglu(gate, up).backward(g)
    (torch.nn.functional.silu(wide[0]) * wide[1]).backward(g.float())
    for one, other in zip((gate, up), wide, strict=True):
        assert torch.allclose(one.grad.float(), other.grad, rtol=2e-2, atol=2e-2)


def test_the_gradient_of_rms_norm_is_that_of_the_formula():
    x, residual, weight = (
        X.clone().requires_grad_(),
        normals(8, "cpu", 1).requires_grad_(),
        X[0].clone().requires_grad_(),
    )
    others = [t.detach().clone().requires_grad_() for t in (x, residual, weight)]
    g, g2 = normals(8, "cpu", 2), normals(8, "cpu", 3)
    y, h = fast.rms_norm(x, weight, residual=residual)
    torch.autograd.backward([y, h], [g, g2])
    total = others[0] + others[1]
    wanted = torch.nn.functional.rms_norm(total, (64,), others[2], eps=1e-6)
    torch.autograd.backward([wanted, total], [g, g2])
    for one, other in zip((x, residual, weight), others, strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["pack", "unpack"])
def test_an_operator_does_not_return_its_input(name):
    """Formats of 8 bits pack to themselves; an operator's result may not share memory with an operand."""
    shape = ([8, 64],) if name == "unpack" else ()
    made = getattr(torch.ops.ao_lab, name)(CODES, "float8_e4m3fn", *shape)
    assert torch.equal(made, CODES)
    assert made.data_ptr() != CODES.data_ptr()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_forward_mode_is_an_error_and_no_silent_zero():
    with forward_ad.dual_level():
        x = forward_ad.make_dual(X, X)
        for call in (lambda: fast.fake_quantize(x, "int8_rowwise"), lambda: fast.rms_norm(x, X[0])):
            with pytest.raises(NotImplementedError):
                call()


PRESHUFFLED = preshuffled(fast.quantize(normals(64, "cpu"), "int4_g32", packed=True))
EXPERTS = preshuffled(
    fast.quantize(torch.stack([normals(64, "cpu"), normals(64, "cpu", 1)]), "int4_g32", packed=True)
)
OFFSETS = torch.tensor([3, 8], dtype=torch.int32)
TURNS = torch.ones(4, 64), torch.zeros(4, 64)
#: Functions of inputs (8, 64) and perhaps a bias.
LINEAR_IN_X = {
    "linear": lambda x, bias=None: fast.linear(x, STORED, bias),
    "cpu_linear": lambda x, bias=None: cpu_linear(x, STORED, bias),
    "linear_small": lambda x, bias=None: linear_small(x, PRESHUFFLED, bias),
    "linear_pair": lambda x: torch.cat(fast.linear_pair(x, STORED, STORED), 1),
    "grouped_linear_small": lambda x: grouped_linear_small(x, EXPERTS, OFFSETS),
    "column_sums": lambda x: fast.layers.column_sums.column_sums(x),
    "rotary": lambda x: fast.layers.attention.rotary(x.view(1, 2, 4, 64), *TURNS),
}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
@pytest.mark.parametrize("name", LINEAR_IN_X)
def test_tangents_of_what_is_linear_are_its_results(name):
    """Those of inputs, of a bias and of both, in float32 and for a program that is traced."""
    f, t = LINEAR_IN_X[name], normals(8, "cpu", 2)
    y, pushed = torch.func.jvp(f, (X,), (t,))
    assert torch.equal(y, f(X))
    assert torch.equal(pushed, f(t))
    assert torch.equal(torch.func.linearize(f, X)[1](t), f(t))
    if "bias" in inspect.signature(f).parameters:
        bias = X[0]
        assert torch.equal(torch.func.jvp(lambda b: f(X, b), (bias,), (t[0],))[1], t[0].expand(8, 64))
        assert torch.equal(torch.func.jvp(f, (X, bias), (t, t[0]))[1], f(t, t[0]))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_tangent_of_a_stored_weights_scale_is_refused():
    def of_scale(scale):
        return fast.linear(X, replace(STORED, scale=scale))

    with pytest.raises(NotImplementedError, match="linear has no forward-mode derivative in scale"):
        torch.func.jvp(of_scale, (STORED.scale,), (STORED.scale,))


def test_one_of_two_results_may_be_left_without_a_gradient():
    """torch gives an operator under a transform none for it, in place of zeros."""
    made = torch.func.grad(lambda x: fast.linear_pair(x, STORED, STORED)[0].sum())(X)
    assert torch.equal(made, torch.func.grad(lambda x: fast.linear(x, STORED).sum())(X))


@pytest.mark.parametrize("grad", [False, True])
def test_given_scales_on_another_device_are_refused(grad):
    x = X.clone().requires_grad_(grad)
    with pytest.raises(ValueError, match="takes tensors on one device, got x on cpu and scale on meta"):
        fast.fake_quantize(x, "fp8_tensorwise", scales=SCALE.to("meta"))


def test_sparse_inputs_that_require_a_gradient_are_refused():
    with pytest.raises(TypeError, match="takes dense tensors"):
        fast.fake_quantize(X.clone().requires_grad_().to_sparse(), "int8_rowwise")


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_call_of_tensors_on_two_devices_is_refused(fullgraph):
    """Beside a meta tensor the dispatcher would run the fake: a result of uninitialized memory."""
    torch._dynamo.reset()
    program = torch.compile(lambda a, b: fast.swiglu(a, b), backend="aot_eager", fullgraph=fullgraph)
    with pytest.raises((ValueError, torch._dynamo.exc.Unsupported), match=r"one device|Observed exception"):
        program(WIDE, WIDE.to("meta"))


def second_derivative(f, x, v, transform):
    """The gradient of (the gradient of f's sum at x, times v)."""
    if transform:
        return torch.func.grad(lambda x: (torch.func.grad(lambda x: f(x).sum())(x) * v).sum())(x)
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(leaf).sum(), leaf, create_graph=True)
    return torch.autograd.grad((first * v).sum(), leaf)[0]


@pytest.mark.parametrize("transform", [True, False])
def test_second_derivatives_of_layers(transform):
    """By torch.func and by create_graph they are those of torch's operations."""
    generator = torch.Generator().manual_seed(0)
    x, v, weight = (torch.randn(shape, generator=generator) for shape in ((6, 32), (6, 32), (32,)))
    norm = second_derivative(lambda x: fast.rms_norm(x, weight)[0], x, v, transform)
    wanted = second_derivative(lambda x: torch.nn.functional.rms_norm(x, (32,), weight, 1e-6), x, v, False)
    # Sums of 32 products in float32, in another order; values are below 10.
    torch.testing.assert_close(norm, wanted, rtol=0, atol=10 * 32 * 2.0**-23)
    x, v = x.bfloat16(), v.bfloat16()
    found = second_derivative(lambda x: fast.swiglu(x, x), x, v, transform).float()
    wanted = second_derivative(lambda x: torch.nn.functional.silu(x) * x, x.float(), v.float(), False)
    # bfloat16 rounds the gradients of gate and up, their products with v and their sums.
    torch.testing.assert_close(found, wanted, rtol=2.0**-6, atol=2.0**-6)


# Records that a traced program meets by several ways.

MXFP8, NVFP4 = SCHEMES["mxfp8_e4m3"], SCHEMES["nvfp4"]


def test_a_constant_record_is_no_object_that_a_program_may_meet_again():
    name = "mxfp8_e4m3"
    assert constant_record(name) == record_of(name)
    assert constant_record(name) is not record_of(name)
    assert constant_record(name).scale is not record_of(name).scale


def scaled(x):
    return fast.quantize(x, MXFP8, tiled=True).codes.float() * MXFP8.scale.block


def twice(x):
    q = fast.quantize(x, MXFP8)
    return q.codes.float() * q.scheme.scale.block * MXFP8.scale.block


def outer(x):
    return fast.choose_scales(x, NVFP4).scale.float() * len(NVFP4.outer.statistic)


@pytest.mark.parametrize("program", [scaled, twice, outer])
def test_a_program_may_read_what_a_record_holds(program):
    """A record of the program's module, of which the operators' constant record is a copy."""
    x = torch.randn(128, 128)
    torch.compiler.reset()
    assert torch.equal(torch.compile(program, backend="aot_eager")(x), program(x))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_layers_compile_where_the_table_holds_another_equal_record(monkeypatch):
    """As when an equal record was made since: the recipe's, the constant one and the table's are three objects."""
    import ao_lab
    from ao_lab.training import products

    key = recipe_of("rowwise").output.a.scheme.key
    monkeypatch.setitem(RECORDS, key, copy.copy(RECORDS[key]))
    monkeypatch.setattr(products, "_able", lambda name, a, b, fast_sums, brief=False: "codes")
    model = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16))
    ao_lab.convert_for_training_(model, "rowwise")
    torch.compiler.reset()
    model[0].compile(dynamic=False, backend="aot_eager")
    x = torch.ones(16, 64, dtype=torch.bfloat16, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    assert bool(x.grad.any())


# Layers whose gradients have none of their own.

INT8 = ao_lab.Int8WeightOnlyConfig()


def fake_quantized(model):
    model[0].register_forward_hook(lambda module, args, y: fast.fake_quantize(y, "int8_rowwise"))


CHANGES = {
    "training": lambda model: ao_lab.convert_for_training_(model, "rowwise"),
    "QAT": lambda model: ao_lab.quantize_(model, ao_lab.QATConfig(INT8, step="prepare")),
    "LoRA": lambda model: ao_lab.quantize_(
        model, ao_lab.QATConfig(INT8, step="prepare", lora=ao_lab.LoRA(rank=2))
    ),
    "sparse": lambda model: ao_lab.sparsify_(model, ao_lab.SparseTrainingConfig()),
    "fake_quantize": fake_quantized,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_gradients_of_a_linear_loss_are_no_constants(change):
    """The gradient that arrives is one: torch's own decorator would leave the weight's part out, without a word."""
    model = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64))
    change(model)
    x = torch.randn(2, 64).requires_grad_()
    (dx,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"has no second derivatives.* before quantize_"):
        dx.square().sum().backward()
    model(x).sum().backward()


def test_a_record_is_made_once():
    made = []

    @derived
    def renamed(key, number):
        """Its text."""
        made.append(number)
        return replace(record_of(key), name=f"renamed_{number}")

    assert renamed("mxfp8_e4m3", 1) is renamed("mxfp8_e4m3", 1)
    assert renamed("mxfp8_e4m3", 2).name == "renamed_2"
    assert (made, renamed.__doc__) == ([1, 2], "Its text.")


def test_constants_of_programs_are_marked_as_torch_marks_them():
    marked = [mark(lambda: 1) for mark in (constant_result, torch.compiler.assume_constant_result)]
    assert vars(marked[0]) == vars(marked[1]) != {}


SCHEMAS = "print(*(getattr(torch.ops.ao_lab, name).default._schema for name in {names}), sep='\\n')"


def test_an_operator_is_registered_when_a_program_asks_for_it():
    own = [name for name, module in LATE.items() if module.startswith("fast.")]
    names = own + [name for name in fast.__all__ if hasattr(torch.ops.ao_lab, name)]
    assert len(names) > 30
    program = f"import torch, fast; {SCHEMAS.format(names=names)}"
    found = forks.python("-c", program, server="transformers")
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == [
        str(getattr(torch.ops.ao_lab, name).default._schema) for name in names
    ]
    assert not hasattr(torch.ops.ao_lab, "quantise")


@derived
def numbered(key, number):
    return replace(record_of(key), name=f"numbered_{number}")


@torch.compiler.assume_constant_result
def length(text):
    return len(text)


def test_a_traced_program_reads_keys_of_records_that_are_made_meanwhile(monkeypatch):
    """Two of them: the second was not there yet when the program read the first."""
    read = keys_without_origin(monkeypatch)

    def program(x):
        return x + length(numbered("mxfp8_e4m3", 1).key) + length(numbered("mxfp8_e4m3", 22).key)

    made = torch.compile(program, backend="eager", fullgraph=True)(torch.zeros(()))
    keys = [numbered("mxfp8_e4m3", number).key for number in (1, 22)]
    assert (float(made), read) == (sum(map(len, keys)), [])


def test_keys_without_origin_are_seen(monkeypatch):
    read = keys_without_origin(monkeypatch)
    program = lambda x: x + length(constant_record("mxfp8_e4m3").key)  # noqa: E731
    with suppress(InternalTorchDynamoError):  # torch 2.11
        torch.compile(program, backend="eager", fullgraph=True)(torch.zeros(()))
    assert read == ["mxfp8_e4m3"]


def test_keywords_are_refused_and_types_told_apart():
    made = []
    record = derived(lambda *given: made.append(given) or SCHEMES["mxfp8_e4m3"])
    record(1)
    record(True)
    record(1)
    assert made == [(1,), (True,)]
    with pytest.raises(TypeError, match="positional arguments, got key"):
        record(key=1)
