"""What the report adds up: the memory over the step, what is alive at the peak, and the model's tree."""

from __future__ import annotations

from functools import cache

import msgspec
import pages
import plans
import profiles
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt_planner import labels, report
from ckpt_planner.alive import KINDS, NO_MODULE, alive
from ckpt_planner.decision import Decision, decide
from ckpt_planner.moduletree import tree
from ckpt_planner.moments import moments
from ckpt_planner.regional import RegionDecision, decide_regions, minimum_regions
from ckpt_planner.regions import REGION_SECONDS
from ckpt_planner.schedule import EXTERNAL

STRATEGIES = ("none", "sqrt", "all", "minimum")


@cache
def decided(seed: int, strategy: str) -> Decision:
    """A random graph's decision; "minimum" is the one under the smallest budget."""
    profile = profiles.layered(seed, 24)
    if strategy != "minimum":
        return decide(profile, 10**12, strategy)
    from ckpt_planner.solve import minimum

    solution = minimum(profile)
    return Decision(profile, solution, solution.peak_bytes, "budget")


@cache
def in_regions(seed: int, strategy: str) -> RegionDecision:
    """The same for mechanism "torch"; "between" is a budget that some regions, and not all, are needed for."""
    profile = profiles.layered(seed, 24)
    smallest = minimum_regions(profile, 10**12, "budget")
    if strategy == "minimum":
        return smallest
    if strategy == "between":
        return decide_regions(profile, (smallest.timeline.peak_bytes + smallest.plain.peak_bytes) // 2)
    return decide_regions(profile, 10**12, strategy)


some_regions = st.builds(in_regions, st.integers(0, 15), st.sampled_from((*STRATEGIES, "between")))
slowly = settings(suppress_health_check=[HealthCheck.too_slow])  # decisions are made while they are drawn
some_decision = st.builds(decided, st.integers(0, 15), st.sampled_from(STRATEGIES)) | some_regions


@slowly
@given(some_decision, st.integers(1, 80))
def test_no_peak_is_lost_and_nothing_is_made_up(decision: Decision, most: int) -> None:
    found = moments(decision, most)
    n, m = len(decision.profile.ops), len(decision.profile.steps)
    assert found.moments == n + m + 1
    assert len(found.first) <= most + 3  # a phase may end within a point
    ends = (*found.first[1:], found.moments)
    assert max(b - a for a, b in zip(found.first, ends, strict=True)) == found.per_point
    assert {0, n, n + m} <= set(found.first)
    for name, timeline in (("plain", decision.plain), ("planned", decision.timeline)):
        every = (*timeline.forward, *timeline.backward, timeline.optimizer_bytes)
        high, low = getattr(found, f"{name}_high_bytes"), getattr(found, f"{name}_low_bytes")
        assert [max(every[a:b]) for a, b in zip(found.first, ends, strict=True)] == list(high)
        assert [min(every[a:b]) for a, b in zip(found.first, ends, strict=True)] == list(low)
        assert max(high) == timeline.peak_bytes == every[getattr(found, f"{name}_peak_moment")]
        assert max(getattr(phase, f"{name}_bytes") for phase in found.phases) == timeline.peak_bytes


@settings(slowly, max_examples=60)
@given(some_decision, st.integers(1, 20))
def test_what_is_alive_adds_up_to_the_peak_by_kind(decision: Decision, most: int) -> None:
    rows = alive(decision, most)
    for kind in KINDS:
        assert sum(row.planned.get(kind, 0) for row in rows) == getattr(decision.memory, kind)
        assert sum(row.plain.get(kind, 0) for row in rows) == getattr(decision.baseline_memory, kind)
    assert sum(row.planned_bytes for row in rows) == decision.timeline.peak_bytes
    assert len({row.label for row in rows}) == len(rows)


@slowly
@given(some_decision)
def test_activations_at_the_peak_are_known_by_module(decision: Decision) -> None:
    """All but the generators' states, and copies of buffers, which belong to no module."""
    states = decision.profile.rng_state_bytes * sum(op.random for op in decision.profile.ops)
    if isinstance(decision, RegionDecision):
        states = sum(decision.regional.state_bytes(region) for region in decision.regions)
    assert not any(op.snapshot for op in decision.profile.ops)  # copies from before a call belong to none either
    for row in alive(decision, 1):
        if row.label == NO_MODULE:
            assert row.plain.get("activations", 0) == 0
            assert row.planned.get("activations", 0) <= states


@pytest.mark.parametrize("layers", [1, 4])
def test_alike_layers_share_a_row(layers: int) -> None:
    rows = alive(pages.decision(layers, "none"))
    row = next(row for row in rows if row.label.endswith("mlp.act"))
    assert row.label == labels.of_labels([f"h.{i}.mlp.act" for i in range(layers)])
    assert row.modules == layers


@slowly
@given(some_decision)
def test_the_tree_adds_up(decision: Decision) -> None:
    nodes, profile = tree(decision), decision.profile
    root, ops = nodes[0], [node for node in nodes if node.kind == "op"]
    assert root.parent == -1
    assert all(0 <= node.parent < i for i, node in enumerate(nodes) if i)
    assert [op.name for op in ops] == [op.name for op in profile.ops]
    for i, node in enumerate(nodes):
        inside = [child for child in nodes if child.parent == i]
        if node.kind == "module":
            for part in ("ops", "ops_again", "kept_bytes", "freed_bytes"):
                assert getattr(node, part) == sum(getattr(child, part) for child in inside)
            assert node.again_seconds == pytest.approx(sum(child.again_seconds for child in inside))
    assert root.forward_seconds == pytest.approx(profile.forward_seconds)
    assert root.backward_seconds <= sum(step.seconds for step in profile.steps) * (1 + 1e-9)
    assert root.ops_again == len(decision.again_seconds)  # some of them in two segments
    assert root.freed_bytes == sum(segment.bytes_freed for segment in decision.segments)
    assert [node.again_seconds for node in ops] == [decision.again_seconds.get(i, 0.0) for i in range(len(ops))]
    starts = profile.replay_group_seconds * len(decision.segments)
    if isinstance(decision, RegionDecision):
        starts = decision.solution.recompute_seconds - root.again_seconds
        assert starts >= REGION_SECONDS * len(decision.regions) * (1 - 1e-9)
    assert root.again_seconds + starts == pytest.approx(sum(s.recompute_seconds for s in decision.segments))


@slowly
@given(some_regions)
def test_operations_and_bytes_of_the_tree_are_those_of_the_regions(decision: RegionDecision) -> None:
    again = [i for region in decision.regions for i in decision.regional.again(region)]
    ops = [node for node in tree(decision) if node.kind == "op"]
    assert [i for i, node in enumerate(ops) if node.ops_again] == again
    storages, n = decision.profile.storages, len(decision.profile.ops)
    unsaved = [x for s, x in enumerate(storages) if decision.needed_until.get(s, -1) < 0 and x.kind not in EXTERNAL]
    held = sum(x.bytes for x in unsaved if x.death > n)
    states = sum(map(decision.regional.state_bytes, decision.regions))
    assert sum(node.kept_bytes for node in ops) + held + states == decision.timeline.saved


def test_the_report_says_what_starting_the_replays_takes() -> None:
    made = pages.described()
    assert made.starting_seconds == pytest.approx(3 * pages.decision().profile.replay_group_seconds)
    assert made.tree[0].again_seconds + made.starting_seconds == pytest.approx(made.recompute_seconds)


def test_the_report_of_regions_names_the_mechanism_and_adds_up() -> None:
    decision = decide_regions(pages.decision().profile, 10**12, "all")
    made = pages.described(decision)
    assert (made.mechanism, made.mechanism_reason) == ("torch", plans.plan_of(decision).mechanism_reason)
    assert decision.regions and made.tree[0].ops_again == sum(segment.nodes for segment in made.segments)
    assert made.tree[0].freed_bytes == sum(segment.bytes_freed for segment in made.segments) > 0
    assert made.tree[0].again_seconds + made.starting_seconds == pytest.approx(made.recompute_seconds)
    assert sum(row.planned_bytes for row in made.alive) == made.peak_bytes < made.baseline_peak_bytes
    assert max(made.timeline.planned_high_bytes) == made.peak_bytes
    for shown in (report.text(made), report.html(made)):
        assert f"Mechanism torch. {made.mechanism_reason}" in " ".join(shown.split())


def test_a_parameters_gradient_belongs_to_the_module_whose_backward_made_it() -> None:
    profile = pages.decision().profile
    # Autograd adds a gradient up in a step of its own, right after the one that computed it.
    steps = [msgspec.structs.replace(step, op=-1 if at == 5 else step.op) for at, step in enumerate(profile.steps)]
    steps[5] = msgspec.structs.replace(steps[5], gradient_bytes=profile.gradient_bytes)
    changed = msgspec.structs.replace(profile, steps=tuple(steps), optimizer_workspace_bytes=10**9)
    found = [row for row in alive(decide(changed, 10**12, "none"), 100) if row.plain.get("gradients")]
    assert [row.plain["gradients"] for row in found] == [profile.gradient_bytes]
    assert found[0].label == profile.ops[profile.steps[4].op].module == "h.2.mlp.dropout"


def test_what_no_backward_step_asks_for_does_not_run_again() -> None:
    made = pages.decision()
    unread = tuple(msgspec.structs.replace(slot, step=-1) for slot in made.profile.slots)
    profile = msgspec.structs.replace(made.profile, slots=unread)
    decision = Decision(profile, made.solution, made.budget_bytes, "all")
    assert tree(made)[0].ops_again > 0
    assert decision.segments == ()
    assert tree(decision)[0].ops_again == 0
