"""A captured graph is the eager forward: same values, gradients, draws and types, and guards for what it hangs on."""

from __future__ import annotations

import copy
import os
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree

import ckpt_planner
from benchmarks.families import build
from ckpt_planner import CaptureError, GuardError, capture, optimize
from ckpt_planner.profiling.measure import measure_profile
from tests.helpers import differences, generators, one_step, seed
from tests.random_models import ROWS, WIDTH, RandomModel, programs

EXAMPLES = int(os.environ.get("CKPT_PLANNER_EXAMPLES", "40"))
FAMILIES = ("gpt2", "bert", "vit", "resnet", "unet", "t5", "lstm_stack", "swin", "torch_encoder")


def state(model: nn.Module) -> list[Any]:
    buffers = [b.clone() for b in model.buffers()]
    return [*buffers, *generators(), [p.grad for p in model.parameters()], [m.training for m in model.modules()]]


def assert_graph_is_eager(model: nn.Module, args: Any = (), kwargs: Any = None, loss_fn: Any = None) -> Any:
    kwargs = kwargs or {}
    twin = copy.deepcopy(model)
    seed(3)
    before = state(model)
    graph = capture(model, args, kwargs)
    assert pytree.tree_all(
        lambda x: x,
        pytree.tree_map(
            lambda a, b: bool(torch.equal(a, b)) if isinstance(a, torch.Tensor) else a == b, before, state(model)
        ),
    ), "capturing left a trace"
    for number in range(2):
        expected = one_step(twin, twin, args, kwargs, loss_fn, number)
        assert differences(expected, one_step(graph, model, args, kwargs, loss_fn, number)) == []
    return graph


@pytest.mark.parametrize("name", FAMILIES)
def test_graph_gives_the_values_gradients_and_draws_of_eager(name: str) -> None:
    made = build(name, small=True)
    graph = assert_graph_is_eager(*made)
    graph.graph.lint()
    calls = [node for node in graph.graph.nodes if "op" in node.meta]
    assert all(node.op == "call_function" and ".py:" in node.meta["place"] for node in calls)
    made_in_forward = {"CrossEntropyLoss"}
    assert {node.meta["module"] for node in calls} <= {*dict(made.model.named_modules()), *made_in_forward}


@pytest.mark.parametrize("name", FAMILIES)
def test_nodes_are_the_operations_of_the_profile(name: str) -> None:
    made = build(name, small=True)
    profile = measure_profile(made.model, made.args, made.kwargs, loss_fn=made.loss_fn)
    graph = capture(made.model, made.args, made.kwargs)
    found = [node.meta for node in graph.graph.nodes if "op" in node.meta]
    assert [(m["name"], m["module"], m["place"]) for m in found] == [
        (op.name, op.module, op.place) for op in profile.ops if op.inside
    ]
    assert [m["op"] for m in found] == list(range(len(found)))


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(program=programs(), number=st.integers(0, 99), leaf=st.booleans())
def test_graphs_that_nobody_thought_of(program: list, number: int, leaf: bool) -> None:
    assert_graph_is_eager(RandomModel(program, number), (torch.randn(ROWS, WIDTH, requires_grad=leaf),))


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


class Holder:
    def __init__(self, value: torch.Tensor, name: str) -> None:
        self.value, self.name = value, name


class Shapes(nn.Module):
    """Takes and gives tensors in structures of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.extra = [torch.arange(4.0)]
        self.plain = torch.full((4,), 0.5)

    def forward(self, batch: Any, pair: Pair, flag: bool = True) -> Any:
        x = self.lin(batch["x"][0]) + self.extra[0] + self.plain
        with torch.no_grad():
            still = x * 2
        return {"pair": Pair(x + pair.left, [still, 3]), "held": Holder(x.T, "t"), "none": None, "n": x.shape[0]}


def test_structures_and_types_are_kept() -> None:
    model, pair = Shapes(), Pair(torch.ones(4), None)
    graph = capture(model, ({"x": [torch.randn(3, 4)]}, pair), {"flag": False})
    x = torch.randn(3, 4)
    found, expected = (f({"x": [x]}, pair, flag=False) for f in (graph, model))
    assert type(found["pair"]) is Pair and type(found["held"]) is Holder and found["held"].name == "t"
    assert found["none"] is None and found["n"] == 3 and found["pair"].right[1] == 3
    for a, b in ((found["pair"].left, expected["pair"].left), (found["held"].value, expected["held"].value)):
        assert torch.equal(a, b) and a.requires_grad
    assert not found["pair"].right[0].requires_grad
    with torch.no_grad():
        model.plain.add_(1)
        model.extra[0].add_(1)
    with pytest.raises(GuardError, match="arguments differ"):
        graph({"x": [x]}, pair, flag=True)
    assert torch.equal(graph({"x": [x]}, pair, flag=False)["pair"].left, model({"x": [x]}, pair)["pair"].left)


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.scale, self.limit = 2.0, (1, "a")
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        x = self.drop(self.norm(self.lin(x))) * self.scale
        if x.detach().abs().sum().item() > -1 and bool(self.count < 3):
            return x
        return x[x > 0]


def test_a_value_that_forward_reads_is_read_again_and_named() -> None:
    model = Reads()
    graph, x = capture(model, (torch.randn(8, 4),)), torch.randn(8, 4)
    guard = next(g for g in graph.meta["guards"] if g.name == "Tensor.__bool__")
    assert guard.expected is True and guard.place.startswith("test_capture.py:")
    with pytest.raises(GuardError, match=r"Tensor.item gave .* test_capture.py:\d+"):
        graph(x)  # another sum


class Counts(Reads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        x = self.drop(self.norm(self.lin(x))) * self.scale
        with torch.no_grad():
            late = bool(self.count > 2)
        return x[x > 0] if late else x


def test_a_call_whose_guard_fails_leaves_generators_and_buffers_alone() -> None:
    model = Counts()
    graph, x = capture(model, (torch.randn(8, 4),)), torch.randn(8, 4)
    graph(x)
    graph(x)
    before = [b.clone() for b in model.buffers()] + generators()
    with pytest.raises(GuardError, match="__bool__"):
        graph(x)
    assert all(map(torch.equal, before, [*model.buffers(), *generators()]))
    assert torch.is_grad_enabled()


class Drawn(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (torch.rand(len(x)) > 0.5).nonzero().flatten()
        return super().forward(x[chosen]).view(chosen.shape[0], -1)


def test_a_shape_that_hangs_on_a_draw_is_a_guard_and_leaves_the_generator_alone() -> None:
    model, x = Drawn(4, 4), torch.randn(64, 4)
    seed(1)
    graph = capture(model, (x,))
    assert torch.equal(graph(x), (seed(1), model(x))[1])
    seed(2)
    before = generators()
    with pytest.raises(GuardError, match="shape"):
        graph(x)
    assert all(map(torch.equal, before, generators()))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "scale", 3.0),
        lambda m: setattr(m, "limit", (1, "b")),
        lambda m: setattr(m.drop, "p", 0.1),
        lambda m: m.eval(),
        lambda m: setattr(m.lin, "weight", nn.Parameter(torch.ones(4, 4))),
        lambda m: m.lin.register_forward_hook(lambda *_: None),
        lambda m: setattr(m, "lin", nn.Linear(4, 4)),
        lambda m: setattr(m, "forward", m.forward),
    ],
)
def test_python_state_that_changes_is_noticed(change: Any) -> None:
    model = Counts()
    x = torch.randn(8, 4)
    graph = capture(model, (x,))
    graph(x)
    change(model)
    with pytest.raises(GuardError):
        graph(x)


FLAG = {"double": False}


def by_flag(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if FLAG["double"] else x


def test_globals_and_closures_that_change_are_noticed() -> None:
    factor = 1.0

    class Steered(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return by_flag(super().forward(x)) * factor

    model, x = Steered(3, 3), torch.ones(2, 3)
    graph = capture(model, (x,))
    graph(x)
    FLAG["double"] = True
    with pytest.raises(GuardError, match="FLAG"):
        graph(x)
    FLAG["double"] = False
    graph(x)
    factor = 2.0
    with pytest.raises(GuardError, match="factor"):
        graph(x)


def test_another_kind_of_call_is_refused() -> None:
    model = nn.Linear(3, 3)
    graph = capture(model, (torch.ones(2, 3),))
    for other in (torch.ones(4, 3), torch.ones(2, 3, requires_grad=True)):
        with pytest.raises(GuardError, match="tensors differ"):
            graph(other)
    with pytest.raises(GuardError, match="autocast"), torch.autocast("cpu"):
        graph(torch.ones(2, 3))


class Casting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.a(self.a(x))
            with torch.autocast("cpu", enabled=False):
                x = self.b(x.float())
            x = self.b(x)
        return self.a(x.float())


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 4 * ctx.saved_tensors[0] * gradient  # unlike the true one, so that losing it shows


class Cubing(Casting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(Cube.apply(self.a(x)).relu())


def test_autocast_within_the_model_and_functions_of_its_own() -> None:
    assert_graph_is_eager(Casting(), (torch.randn(4, 8),))
    graph = assert_graph_is_eager(Cubing(), (torch.randn(4, 8),))
    profile = measure_profile(Cubing(), (torch.randn(4, 8),))
    assert sum(n.meta["ops"] for n in graph.graph.nodes if "op" in n.meta) == sum(op.inside for op in profile.ops)


class Unrepeated(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)


class ByNumPy(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.from_numpy(x.detach().numpy() * 2)


def test_what_no_graph_repeats_is_said() -> None:
    x = torch.ones(2, 3)
    assert "Python state" in capture(Unrepeated(3, 3), (x,)).meta["limits"][0]
    assert "tensor" in capture(ByNumPy(3, 3), (x,)).meta["limits"][0]
    assert capture(nn.Linear(3, 3), (x,)).meta["limits"] == ()
    with pytest.raises(CaptureError, match="failed while it was captured"):
        capture(nn.Linear(3, 3), (torch.ones(5),))


def test_the_plan_has_the_graph_with_what_was_measured_and_decided() -> None:
    made = build("gpt2", small=True)
    plan = optimize(made.model, "60%", made.args, made.kwargs)
    graph = plan.graph
    metas = [node.meta for node in graph.graph.nodes if "op" in node.meta]
    ops = [op for op in plan.profile.ops if op.inside]
    assert [m["name"] for m in metas] == [op.name for op in ops]
    assert [m["seconds"] for m in metas] == [op.seconds for op in ops]
    again = {m["op"] for m in metas if m["recomputed"]}
    assert again and {m["segment"] for m in metas if m["recomputed"]} == set(range(len(plan.segments)))
    for number, segment in enumerate(plan.segments):
        assert sum(m["segment"] == number for m in metas) == segment.nodes
    assert all(m["segment"] is None for m in metas if not m["recomputed"])
    saved = sum(m["saved_bytes"] for m in metas)
    kept = {s.storage for s in plan.profile.slots}
    storages = [plan.profile.storages[s] for s in kept]
    assert saved == sum(s.bytes for s in storages if 0 <= s.birth < len(ops))
    assert sum(m["output_bytes"] for m in metas) > 0
    assert_same = graph(*made.args, **made.kwargs)
    assert type(assert_same) is type(made.model(*made.args, **made.kwargs))


def test_capture_is_part_of_the_package() -> None:
    assert ckpt_planner.capture is capture
