"""Hooks, checkpoints already in the model, names and copies."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.helpers import assert_same_step, default_loss, differences, dropping_all, one_step, planned

WIDTH = 16


def rows(count: int = 512) -> tuple[torch.Tensor]:
    torch.manual_seed(0)
    return (torch.randn(count, WIDTH),)


class Hooked(nn.Module):
    """Every layer has the hooks that `attach` gives it; each call is noted in `noted`."""

    attach: Any

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[p for _ in range(4) for p in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])
        self.noted: dict[str, int] = {}
        for layer in self.layers:
            self.attach(layer)

    def note(self, name: str) -> None:
        self.noted[name] = self.noted.get(name, 0) + 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).sum()

    def forward_hook(self, layer: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        self.note("forward")
        return output * 1.5

    def pre_hook(self, layer: nn.Module, args: Any) -> Any:
        self.note("forward pre")
        return (args[0].sin(),)

    def backward_hook(self, layer: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        self.note("full backward")
        return tuple(g * 0.5 if g is not None else None for g in grad_input)

    def backward_pre_hook(self, layer: nn.Module, grad_output: Any) -> Any:
        self.note("full backward pre")
        return (grad_output[0] * 2,)

    def gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        self.note("tensor")
        return gradient * 0.9

    def tensor_hook(self, layer: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(self.gradient)
        output.retain_grad()

    def node_hook(self, layer: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.grad_fn.register_hook(lambda *_: self.note("node"))
        output.grad_fn.register_prehook(lambda *_: self.note("node pre"))


HOOKS = {
    "forward": lambda m, layer: layer.register_forward_hook(m.forward_hook),
    "forward pre": lambda m, layer: layer.register_forward_pre_hook(m.pre_hook),
    "full backward": lambda m, layer: layer.register_full_backward_hook(m.backward_hook),
    "full backward pre": lambda m, layer: layer.register_full_backward_pre_hook(m.backward_pre_hook),
    "tensor": lambda m, layer: layer.register_forward_hook(m.tensor_hook),
    "node": lambda m, layer: layer.register_forward_hook(m.node_hook),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_are_called_as_often_as_in_eager(name: str) -> None:
    make = type("Hooked", (Hooked,), {"attach": HOOKS[name]})
    plan = assert_same_step(make, rows(), observe=lambda m: dict(m.noted), tight=name == "full backward")
    assert plan.model.noted[name] == 8 * 3


def test_hooks_on_parameters() -> None:
    def attach(self, layer):
        for p in layer.parameters():
            p.register_hook(self.gradient)
            p.register_post_accumulate_grad_hook(lambda p: self.note("accumulated"))

    make = type("Hooked", (Hooked,), {"attach": attach})
    torch.manual_seed(0)
    plain, model = make(), make()
    model.load_state_dict(plain.state_dict())
    plan = dropping_all(model, rows(), loss_fn=default_loss)
    model.noted.clear()
    for call, m in ((plain, plain), (plan.model, model)):
        one_step(call, m, rows(), {})
    assert plain.noted == {"tensor": 8, "accumulated": 8} == model.noted


def test_hooks_on_the_whole_model_and_global_ones() -> None:
    noted: list[str] = []
    torch.manual_seed(0)
    model = type("Hooked", (Hooked,), {"attach": lambda m, layer: None})()
    plan = dropping_all(model, rows(), loss_fn=default_loss)
    handles = [
        model.register_forward_hook(lambda *a: noted.append("forward")),
        plan.model.register_forward_pre_hook(lambda *a: noted.append("pre")),
        plan.model.register_full_backward_hook(lambda *a: noted.append("backward")),
        nn.modules.module.register_module_forward_hook(lambda *a: noted.append("global")),
    ]
    counts = []
    for call in (model, plan.model):
        noted.clear()
        one_step(call, model, rows(), {})
        counts.append(sorted(noted))
    for handle in handles:
        handle.remove()
    assert counts[0] == counts[1]
    assert counts[0].count("global") == 10


def test_saved_tensor_hooks_of_the_user() -> None:
    """Offloading within the model, and around it."""

    class Offloads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (
                nn.Sequential(*[p for _ in range(3) for p in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]) for _ in range(2)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autograd.graph.save_on_cpu():
                x = self.a(x)
            return self.b(x).sum()

    plan = assert_same_step(Offloads, rows())
    packed: list[int] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        packed.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        one_step(plan.model, plan.model, rows(), {})


# -- checkpoint in the model ----------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """`reentrant`: True, False, or "sequential"."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Tanh(), nn.BatchNorm1d(WIDTH))
                for _ in range(5)
            ]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "sequential":
            x = checkpoint_sequential(list(self.blocks), 2, x, use_reentrant=False)
            return torch.tanh(x).sum()
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=self.how) if number % 2 else block(x)
        return x.sum()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", [False, True, "sequential"])
def test_checkpoints_already_in_the_model(how: Any) -> None:
    x = rows()[0].requires_grad_()
    assert_same_step(lambda: Checkpointed(how), (x,), tight=how is False)


# -- names ----------------------------------------------------------------------------------------------------------


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[p for _ in range(4) for p in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])
        self.norm, self.extra = nn.BatchNorm1d(WIDTH), "an attribute"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(x)).pow(2).sum()

    def own_method(self) -> str:
        return self.extra


class Listening(nn.Module):
    """Functions that hold on to the model in a closure: a hook through another function, an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.heard: list[torch.Tensor] = []
        self.scale = 1.5

        def keep(value: torch.Tensor) -> None:
            self.heard.append(value)

        self.linears[1].register_forward_hook(lambda module, args, output: keep(output))
        self.activation = lambda x: x.tanh() * self.scale

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.heard.clear()
        for linear in self.linears:
            x = self.activation(linear(x)).sin()
        return x, *self.heard


def test_hooks_and_functions_that_hold_the_model_in_a_closure() -> None:
    assert_same_step(Listening, rows(), observe=lambda model: len(model.heard))


def test_names_are_the_originals() -> None:
    torch.manual_seed(0)
    model = Named()
    plan = planned(model, rows(), share=0.7)
    made = plan.model
    for view in ("state_dict", "named_parameters", "named_buffers", "named_modules"):
        assert [n for n, *_ in _pairs(getattr(made, view)())] == [n for n, *_ in _pairs(getattr(model, view)())]
    assert isinstance(made, Named)
    assert type(made).__name__ == "Named"
    assert made.own_method() == "an attribute"
    assert all(a is b for a, b in zip(made.parameters(), model.parameters(), strict=True))
    made.load_state_dict(model.state_dict())
    assert repr(made) == repr(model)


def _pairs(items: Any) -> list[Any]:
    return list(items.items() if isinstance(items, dict) else items)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save", "copy of the original"])
def test_copies_train_alike(how: str) -> None:
    torch.manual_seed(0)
    model = Named()
    plan = dropping_all(model, rows(), loss_fn=default_loss)
    one_step(plan.model, model, rows(), {})
    match how:
        case "deepcopy":
            other = copy.deepcopy(plan.model)
        case "pickle":
            other = pickle.loads(pickle.dumps(plan.model))
        case "torch.save":
            file = io.BytesIO()
            torch.save(plan.model, file)
            file.seek(0)
            other = torch.load(file, weights_only=False)
        case _:
            other = copy.deepcopy(model)
    assert list(other.state_dict()) == list(model.state_dict())
    assert not any(a is b for a, b in zip(other.parameters(), model.parameters(), strict=True))
    assert not differences(one_step(plan.model, model, rows(), {}), one_step(other, other, rows(), {}))
