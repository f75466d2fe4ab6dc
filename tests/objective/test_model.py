"""The flat-buffer core against its naive twin: autograd through stacked checkpoints."""

import copy

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.func import functional_call

from sewa_cli.errors import TaskError
from sewa_cli.objective.model import FlatModel
from sewa_cli.objective.objective import Objective
from sewa_cli.trajectory import fill_row
from sewa_cli.trajectory.tiers import Dense

CPU = torch.device("cpu")


class Tied(nn.Module):
    """An embedding used twice, a frozen layer, an integer and a float buffer."""

    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.mix = nn.Linear(width, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.rand(width) + 0.5)
        self.register_buffer("count", torch.tensor(3))

    def forward(self, tokens):
        scale = self.get_buffer("scale")
        hidden = torch.tanh(self.frozen(torch.tanh(self.mix(self.embed(tokens)))) * scale)
        return self.head(hidden)


def random_model(kind, width):
    if kind == "mlp":
        mlp = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 7))
        return mlp, torch.randn(9, 5)
    if kind == "conv":
        conv = nn.Sequential(
            nn.Conv1d(2, width, 3), nn.BatchNorm1d(width), nn.Flatten(), nn.Linear(3 * width, 7)
        )
        return conv, torch.randn(9, 2, 5)
    return Tied(width), torch.randint(7, (9,))


def perturbed(model):
    state = {n: t.detach().clone() for n, t in model.state_dict().items()}
    tied = {id(t): n for n, t in model.state_dict(keep_vars=True).items()}
    for name in tied.values():
        if state[name].is_floating_point():
            state[name] += 0.1 * torch.rand_like(state[name])
    if "head.weight" in state:
        state["embed.weight"] = state["head.weight"]
    return state


def objective_of(model, target):
    def loss(outputs, _batch):
        return nn.functional.cross_entropy(outputs, target)

    return Objective(model, lambda m, x: m(x), loss, lambda value: torch.autograd.backward(value))


def naive_twin(model, states, a, x, target):
    """Loss at Σ a_i w_i and its gradient in a, by autograd through the stacked tensors."""
    a = a.clone().requires_grad_(True)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    mixed = {}
    for name, first in states[0].items():
        if first.is_floating_point():
            stacked = torch.stack([state[name] for state in states])
            # buffers move along with the mask, but carry no gradient: native BatchNorm has none
            weights = a if name in parameters else a.detach()
            mixed[name] = torch.einsum("k,k...->...", weights.float(), stacked)
        else:
            mixed[name] = first
    outputs = functional_call(model.eval(), mixed, (x,), tie_weights=False)
    loss = nn.functional.cross_entropy(outputs, target)
    (gradient,) = torch.autograd.grad(loss, a)
    return loss.detach(), gradient


@settings(max_examples=30)
@given(
    st.sampled_from(["mlp", "conv", "tied"]),
    st.integers(1, 12),
    st.integers(2, 9),
    st.integers(1, 3),
    st.integers(0, 2**31),
)
def test_mixing_and_its_gradient_equal_autograd_through_the_stacked_checkpoints(
    kind, width, k, samples, seed
):
    torch.manual_seed(seed)
    model, x = random_model(kind, width)
    target = torch.randint(7, (9,))
    states = [perturbed(model) for _ in range(k)]
    a = torch.rand(samples, k, dtype=torch.float64)
    expected = [naive_twin(copy.deepcopy(model), states, row, x, target) for row in a]

    flat = FlatModel(model, CPU)
    W = torch.empty(k, flat.layout.size)
    for row, state in zip(W, states, strict=True):
        assert fill_row(row, [(n, state[n]) for n in flat.layout.slices], flat.layout) is None
    trajectory = Dense(W, flat.layout)
    objective = objective_of(flat, target)
    gradients = []
    for mixed, (loss, _) in zip(trajectory.mix(a), expected, strict=True):
        found, gradient = objective.gradient(mixed, [x])
        assert float(found) == pytest.approx(float(loss), rel=2e-6)
        gradients.append(gradient.clone())
    G = torch.stack(gradients)
    pulled = trajectory.pull_back(G)
    # float32 precision of a dot product: relative to the sum of its terms' sizes, not to its value
    terms = G.abs() @ trajectory.W[:, : G.shape[1]].abs().T
    for own, size, (_, gradient) in zip(pulled, terms, expected, strict=True):
        assert ((own - gradient).abs() <= 2e-5 * size.max() + 1e-8).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_in_another_dtype_computes_in_it(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 7)).to(dtype)
    model[2].float()  # mixed: the last layer stays float32
    twin = copy.deepcopy(model)
    flat = FlatModel(model, CPU)
    x, target = torch.randn(9, 5, dtype=dtype), torch.randint(7, (9,))

    def predict(module, batch):
        assert isinstance(module, nn.Sequential)
        return module[2](module[1](module[0](batch)).float())

    objective = objective_of(flat, target)
    objective.predict = predict
    loss, gradient = objective.gradient(flat.flat.clone(), [x])
    expected = nn.functional.cross_entropy(predict(twin, x), target)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), check_dtype=False)
    for name, parameter in twin.named_parameters():
        own = gradient[flat.layout.slices[name]].view(parameter.shape)
        torch.testing.assert_close(own, parameter.grad.float())
    assert model[0].weight.dtype == dtype


@pytest.mark.parametrize(
    ("tensor", "word"),
    [(torch.empty(2, device="meta"), "meta"), (torch.zeros(2, dtype=torch.complex64), "complex")],
)
def test_weights_that_cannot_be_averaged_are_refused_by_name(tensor, word):
    model = nn.Module()
    model.register_parameter("odd", nn.Parameter(tensor))
    with pytest.raises(TaskError, match=f"odd is .*{word}"):
        FlatModel(model, CPU)
