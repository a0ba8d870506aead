"""Layers of LoRA compute what PEFT's do: in one matrix with frozen weights, and with their scale in matrix B."""

from __future__ import annotations

import ast
import builtins
import inspect
from typing import Any

import pytest
import torch
from support.models.adapted import Layer, adapted, assert_close, computed
from torch import nn

from lookonce.train.model import compile, lora_joined
from lookonce.train.model.compile import fewer_passes

INPUT = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def the_model_is_its_language_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "text_model", lambda model: model)


def linear() -> tuple[nn.Module, ...]:
    return nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 9, bias=False)


def results(model: Any) -> list[torch.Tensor]:
    return computed(model, model, INPUT)


def fused(model: Any) -> list[bool]:
    """For each layer of a model, whether its MLP is computed as a whole."""
    return ["forward" in vars(layer.mlp) for layer in model.base_model.model]


@pytest.mark.guarantee(
    "LoRA in one matrix with frozen weights, and within an MLP, gives PEFT's results to rounding, in each family."
)
@pytest.mark.parametrize("rank", [1, 4, 64])
def test_outputs_and_gradients_are_those_of_peft(rank):
    model = adapted(*linear(), r=rank)
    expected = results(model)
    with fewer_passes(model, joins=True):
        assert all(hasattr(model.base_model.model[number], "joined") for number in (0, 2))
        assert_close(results(model), expected, 1e-6)


@pytest.mark.parametrize(
    ("options", "num_matrices", "is_fused"),
    [
        ({"r": 4}, 4, True),
        ({"r": 21}, 4, True),
        ({"r": 22}, 6, True),
        ({"r": 33}, 7, False),
        ({"rank_pattern": {"up_proj": 2}}, 5, False),
        ({"alpha_pattern": {"down_proj": 4, "k_proj": 20}}, 6, False),
        ({"target_modules": ["q_proj", "v_proj", "up_proj"]}, 3, False),
    ],
)
def test_layers_with_the_same_input_share_a_matrix_if_they_can(options, num_matrices, is_fused):
    model = adapted(Layer(), Layer(), **options)
    expected = results(model)
    with fewer_passes(model, joins=True):
        matrices = [name for name, _ in model.named_buffers() if name.endswith(".joined")]
        assert len(matrices) == 2 * num_matrices and fused(model) == [is_fused] * 2
        assert_close(results(model), expected, 1e-5)
    assert fused(model) == [False] * 2
    assert_close(results(model), expected, 0)


def test_a_layer_that_is_called_with_another_input_computes_its_own():
    class Crossed(Layer):
        """Queries of some tokens, keys and values of all, as in a short last layer."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            part, attention = x[:, :2], self.self_attn
            queries, keys, values = attention.q_proj(part), attention.k_proj(x), attention.v_proj(x.cos())
            return queries.sum() + keys.sin() + values.exp()

    model = adapted(Crossed())
    trained = {"q_proj", "k_proj", "v_proj"}
    for name, weight in model.named_parameters():
        weight.requires_grad_("lora" in name and any(part in name for part in trained))
    expected = results(model)
    with fewer_passes(model, joins=True):
        assert_close(results(model), expected, 1e-5)


def test_an_mlp_with_another_activation_an_additional_layer_or_a_bias_is_computed_as_it_is():
    layers = [Layer(), Layer(), Layer(), Layer()]
    layers[0].mlp.norm = nn.LayerNorm(24)
    layers[1].mlp.down_proj = nn.Linear(24, 8)
    layers[2].mlp.act_fn = nn.GELU()
    with fewer_passes(model := adapted(*layers), joins=True):
        assert fused(model) == [False, False, False, True]


def test_operators_stand_after_what_they_call_so_that_pytorch_finds_their_kernels():
    functions = [node for node in ast.parse(inspect.getsource(lora_joined)).body if isinstance(node, ast.FunctionDef)]
    lines = {function.name: function.lineno for function in functions}
    operators = [function for function in functions if "triton_op" in map(_name, function.decorator_list)]
    assert len(operators) == 4
    for operator in operators:
        calls = {node.func.id for node in ast.walk(operator) if isinstance(node, ast.Call) and _is_name(node.func)}
        calls -= vars(builtins).keys()
        assert calls and all(lines[name] < operator.lineno for name in calls), operator.name


def _is_name(node):
    return isinstance(node, ast.Name)


def _name(decorator):
    return decorator.func.attr if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Attribute) else ""


@pytest.mark.parametrize("layers", [linear(), (Layer(),)])
def test_changed_lora_weights_are_used_in_the_next_pass(layers):
    model = adapted(*layers)
    with fewer_passes(model, joins=True):
        before = results(model)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.requires_grad:
                    weight += 0.1
        found = results(model)
    assert not torch.allclose(found[0], before[0])
    assert_close(found, results(model), 1e-6)


@pytest.mark.parametrize("broken", [lora_joined.FIRST, ("up_proj", "gate_proj")])
def test_the_order_of_the_first_layers_matters(monkeypatch, broken):
    monkeypatch.setattr(lora_joined, "SAME_INPUT", (broken,))
    monkeypatch.setattr(lora_joined, "FIRST", broken)
    model = adapted(Layer())
    expected = results(model)
    with fewer_passes(model, joins=True):
        is_close = torch.allclose(results(model)[0], expected[0], rtol=1e-4)
    assert is_close == (broken == ("gate_proj", "up_proj"))


@pytest.mark.parametrize(
    "options", [{"r": 65}, {"lora_dropout": 0.1}, {"use_dora": True}, {"lora_bias": True, "target_modules": ["0"]}]
)
def test_what_cannot_be_joined_is_computed_as_before(options):
    model = adapted(*linear(), **{"target_modules": ["0", "2"]} | options).eval()
    expected = results(model)
    with fewer_passes(model, joins=True):
        assert_close(results(model), expected, 1e-6)
        with model.disable_adapter(), torch.no_grad():
            assert torch.equal(model(INPUT), model.base_model.model(INPUT))


def test_a_disabled_adapter_leaves_the_stock_layers():
    model = adapted(Layer())
    with model.disable_adapter(), torch.no_grad():
        expected = model(INPUT)
    with fewer_passes(model, joins=True), model.disable_adapter(), torch.no_grad():
        assert torch.equal(model(INPUT), expected)


def test_an_adapter_in_another_precision_is_not_joined():
    model = adapted(*linear()).to(torch.bfloat16)
    with fewer_passes(model, joins=True):
        assert not hasattr(model.base_model.model[0], "joined")


def test_without_memory_for_copies_the_reason_for_the_end_is_not_hidden(monkeypatch):
    model = adapted(*linear())
    expected = results(model)

    def full(weight: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("of the copy")

    with pytest.raises(ValueError, match="why it ended"), fewer_passes(model, joins=True):
        monkeypatch.setattr(torch.Tensor, "contiguous", full)
        raise ValueError("why it ended")
    monkeypatch.undo()
    monkeypatch.setattr(compile, "text_model", lambda model: model)
    assert_close(results(model), expected, 1e-6)
    with fewer_passes(model, joins=True):
        assert_close(results(model), expected, 1e-6)
    assert all(model.base_model.model[number].base_layer.weight.is_contiguous() for number in (0, 2))


def seeded(model: Any, *, bf16: bool = False) -> list[torch.Tensor]:
    """The output, and the gradients of the input and of the adapter."""

    def call(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return model(x)

    return computed(call, model, INPUT)


def one_layer(**options: Any) -> Any:
    return adapted(nn.Linear(8, 6), target_modules=["0"], **options)


@pytest.mark.guarantee(
    "LoRA with its scale in matrix B gives PEFT's results, to the last bit if the scale is a power of two, in "
    "each family."
)
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_with_a_scale_that_is_a_power_of_two_no_bit_changes(bf16, dropout):
    model = one_layer(lora_alpha=8, lora_dropout=dropout)
    expected = seeded(model, bf16=bf16)
    with fewer_passes(model, joins=False):
        found = seeded(model, bf16=bf16)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.guarantee(
    "LoRA with its scale in matrix B gives PEFT's results, to the last bit if the scale is a power of two, in "
    "each family."
)
def test_another_scale_changes_the_rounding_alone():
    model = one_layer(lora_alpha=10, use_rslora=True, bias="lora_only")
    expected = seeded(model)
    with fewer_passes(model, joins=False):
        found = seeded(model)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}])
def test_what_peft_does_besides_is_left_to_it(options):
    model = one_layer(lora_alpha=10, **options)
    with torch.no_grad():
        expected = model(INPUT)
        with fewer_passes(model, joins=False):
            assert torch.equal(model(INPUT), expected)
            with model.disable_adapter():
                without = model(INPUT)
            model.merge_adapter()
            merged = model(INPUT)
    torch.testing.assert_close(merged, expected)
    assert not torch.allclose(without, expected, atol=0.1)


def test_a_model_in_another_precision_without_autocast_is_left_to_peft():
    model = one_layer(lora_alpha=8)
    model.base_model.model[0].base_layer.to(torch.bfloat16)
    x = INPUT.bfloat16()
    with torch.no_grad():
        expected = model(x)
        with fewer_passes(model, joins=False):
            found = model(x)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("joins", [False, True])
def test_it_is_undone_and_may_be_nested(joins):
    model = one_layer()
    layer = model.base_model.model[0]
    before, state = layer.base_layer.weight.clone(), set(model.state_dict())
    with fewer_passes(model, joins=joins):
        with fewer_passes(model, joins=joins):
            pass
        assert "forward" in vars(layer) and set(model.state_dict()) == state
    assert "forward" not in vars(layer) and not hasattr(layer, "joined") and not model._forward_pre_hooks
    assert torch.equal(layer.base_layer.weight, before) and layer.base_layer.weight.is_contiguous()
