"""Equal blocks are recognised by what they do, decided once, and composed within the budget."""

from __future__ import annotations

import itertools
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import MB, Builder, layered, transformer

from ckpt_planner.problem import Problem, make_problem
from ckpt_planner.profile import Profile
from ckpt_planner.solve import solve
from ckpt_planner.solve.alone import alone
from ckpt_planner.solve.budget import Search
from ckpt_planner.solve.compose import Composer, composed
from ckpt_planner.solve.options import effects, options
from ckpt_planner.solve.repeats import Block, Run, block_of, blocks, runs, symbols
from ckpt_planner.solve.state import State


def kinds(found: list[Block]) -> list[int]:
    """For each block, the number of its kind."""
    number: dict[object, int] = {}
    return [number.setdefault(block.form, len(number)) for block in found]


def chain(pattern: str, seed: int = 0) -> Profile:
    """A chain of blocks on a residual stream; each letter is a kind of block, made by lot from the letter."""
    b = Builder()
    x = b.op("start", "", [b.external(MB, "input")], 4 * MB, 1e-3, saves_output=True)
    for place, letter in enumerate(pattern):
        rng, values = random.Random(f"{letter}{seed}"), [x]
        for i in range(rng.randint(5, 9)):
            module, weight = f"block.{place}.{i}", b.external(MB)
            reads = [rng.choice(values[-2:]), weight]
            values.append(
                b.op(f"{letter}{i}", module, reads, rng.randint(2, 9) * MB, rng.randint(1, 20) * 1e-3,
                     saves=[reads[0]], saves_output=rng.random() < 0.3, random=rng.random() < 0.2,
                     hides=(MB,) if rng.random() < 0.3 else ())
            )  # fmt: skip
            if rng.random() < 0.3:
                values.append(b.view("view", module, values[-1]))
        x = b.op("add", f"block.{place}", [x, values[-1]], 4 * MB, 1e-3)
    loss = b.op("loss", "", [x], 4, 1e-4, inside=False)
    b.hold(loss, len(b.ops) + 1)
    return b.build(op_seconds=1e-5, group_seconds=1e-4)


def between(problem: Problem, share: float) -> Problem:
    """The problem under a budget between what dropping each block leaves and the plain step."""
    plain, least = problem.judge(()).peak_bytes, problem.judge(problem.candidates).peak_bytes
    return problem.with_budget(int(min(plain, least) + share * max(0, plain - least)))


@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(4, 9), min_size=3, max_size=12, unique=True),
       st.integers(2, 9), st.lists(st.integers(10, 13), max_size=6))  # fmt: skip
def test_what_repeats_is_found_whatever_stands_around_it(
    before: list[int], block: list[int], times: int, after: list[int]
) -> None:
    found = runs(np.array([*before, *block * times, *after]))
    assert Run(len(before), len(before) + len(block) * times, len(block)) in found


@given(st.lists(st.integers(0, 4), max_size=60))
def test_runs_repeat_and_do_not_overlap(values: list[int]) -> None:
    found = runs(np.array(values, dtype=np.int64))
    for run in found:
        assert run.stop - run.start >= 2 * run.period
        assert values[run.start : run.stop - run.period] == values[run.start + run.period : run.stop]
    assert all(a.stop <= b.start for a, b in itertools.pairwise(found))


def test_the_layers_of_a_transformer_are_of_one_kind_and_what_is_around_them_is_not() -> None:
    found = blocks(make_problem(transformer(6), 0))[0]
    assert [block.first for block in found[1:]] == [block.stop for block in found[:-1]]
    assert max(kinds(found).count(kind) for kind in set(kinds(found))) >= 5


def test_names_times_and_the_numbering_of_storages_do_not_matter() -> None:
    profile, numbers = transformer(4), random.Random(3)
    order = list(range(len(profile.storages)))
    numbers.shuffle(order)
    place = {s: k for k, s in enumerate(order)}

    def of(found: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(place[s] for s in found)

    other = msgspec.structs.replace(
        profile,
        storages=tuple(msgspec.structs.replace(profile.storages[s], name=f"p{s}") for s in order),
        ops=tuple(
            msgspec.structs.replace(
                op, module=f"m{numbers.random()}", place="elsewhere.py:9", seconds=op.seconds + numbers.random(),
                reads=tuple(msgspec.structs.replace(r, storage=place[r.storage]) for r in op.reads),
                makes=of(op.makes), hides=of(op.hides), writes=of(op.writes), output=of(op.output),
            )
            for op in profile.ops
        ),
        slots=tuple(msgspec.structs.replace(slot, storage=place[slot.storage]) for slot in profile.slots),
    )  # fmt: skip
    a, b = (blocks(make_problem(p, 0))[0] for p in (profile, other))
    assert [x[:2] for x in a] == [x[:2] for x in b]
    assert [x.form for x in a] == [x.form for x in b]


@pytest.mark.parametrize("field", ["bytes", "name", "slot"])
def test_blocks_that_differ_in_bytes_calls_or_slots_are_of_two_kinds(field: str) -> None:
    profile = transformer(5)
    problem = make_problem(profile, 0)
    block = blocks(problem)[0][2]
    s = block.storages[block.inside[3]]
    if field == "bytes":
        storages = list(profile.storages)
        storages[s] = msgspec.structs.replace(storages[s], bytes=storages[s].bytes + 512)
        other = msgspec.structs.replace(profile, storages=tuple(storages))
    elif field == "name":
        ops = list(profile.ops)
        ops[block.first + 3] = msgspec.structs.replace(ops[block.first + 3], name="another")
        other = msgspec.structs.replace(profile, ops=tuple(ops))
    else:
        gone = next(x for k in block.inside for x in problem.slots_of[block.storages[k]])
        other = msgspec.structs.replace(profile, slots=tuple(x for i, x in enumerate(profile.slots) if i != gone))
    changed = block_of(make_problem(other, 0), block.first, block.stop)
    same = block_of(make_problem(other, 0), blocks(problem)[0][3].first, blocks(problem)[0][3].stop)
    assert changed.form != block.form
    assert same.form == blocks(problem)[0][3].form


def test_several_kinds_one_after_another_are_found_and_kinds_that_take_turns_as_one_block() -> None:
    for pattern, expected in (("AAAAABBBBB", 2), ("ABABABAB", 1)):
        found = blocks(make_problem(chain(pattern), 0))[0]
        assert sum(kinds(found).count(kind) >= 3 for kind in set(kinds(found))) == expected, pattern


def test_a_graph_without_repetition_has_no_blocks() -> None:
    b, numbers = Builder(), random.Random(0)
    x = b.external(MB, "input")
    for i in range(40):
        x = b.op(f"op{i}", "", [x], numbers.randint(1, 9) * MB, 1e-3, saves=[x])
    assert blocks(make_problem(b.build(), 0)) == []


def test_depth_adds_neither_symbols_nor_kinds() -> None:
    shallow, deep = (make_problem(transformer(layers), 0) for layers in (4, 40))
    assert len(set(symbols(shallow).tolist())) == len(set(symbols(deep).tolist()))
    assert len(set(kinds(blocks(shallow)[0]))) == len(set(kinds(blocks(deep)[0])))


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 1000), st.sampled_from(["AAAA", "AAABBB", "ABABAB"]))
def test_an_option_costs_and_frees_in_the_step_what_it_does_in_the_block(seed: int, pattern: str) -> None:
    problem = make_problem(chain(pattern, seed), 0)
    for block in [x for division in blocks(problem)[:1] for x in division if x.begin >= 0]:
        small, state = alone(problem, block, [block]), State(problem)
        forward, backward = state.forward(), state.backward()
        for effect in effects(small, options(small))[:6]:
            undo = state.change([block.storages[k] for k in effect.dropped], ())
            change = (state.forward() - forward)[block.first : block.stop]
            after = (state.backward() - backward)[block.begin :]
            assert change.tolist() == effect.forward.tolist()
            # What the block before has made may be kept for longer than the block's own backward reads of it.
            assert after[: len(effect.backward)].tolist() == effect.backward.tolist()
            seconds = sum(problem.cost[block.first + i] for i in effect.again)
            group = problem.profile.replay_group_seconds
            assert state.seconds == pytest.approx(seconds + group * effect.groups, abs=1e-12)
            state.undo(undo)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 1000), st.sampled_from(["AAAAA", "AAABBB", "ABABAB"]), st.sampled_from([0.9, 0.6, 0.4]))
def test_a_composition_keeps_the_budget_by_simulation(seed: int, pattern: str, share: float) -> None:
    problem = between(make_problem(chain(pattern, seed), 0), share)
    for dropped in Composer(problem).compose(problem.budget_bytes, 1):
        assert problem.judge(dropped).peak_bytes <= problem.budget_bytes


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5, 0.3])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_of_two_layers_no_choice_of_options_that_fits_is_cheaper(seed: int, share: float) -> None:
    problem = between(make_problem(chain("AA", seed), 0), share)
    for parts in Composer(problem).divisions:
        wishes = (
            [part.storages[k] for part, effect in zip(parts, choice, strict=True) for k in effect.dropped]
            for choice in itertools.product(*(part.effects for part in parts))
        )
        fitting = (judged for wish in wishes if (judged := problem.judge(wish)).peak_bytes <= problem.budget_bytes)
        cheapest = min((judged.seconds for judged in fitting), default=None)
        dropped = composed(parts, problem.budget_bytes)
        assert (dropped is None) == (cheapest is None)
        if dropped is not None:
            assert problem.judge(dropped).seconds == pytest.approx(cheapest)


def test_a_composition_is_the_same_each_time_and_so_is_the_plan() -> None:
    profile = transformer(8)
    budgets = [between(make_problem(profile, 0), share).budget_bytes for share in (0.8, 0.4)]
    for budget in budgets:
        answers = []
        for order in (budgets, budgets[::-1]):
            composer = Composer(make_problem(profile, 0))
            answers.append([composer.compose(b, least) for b in order for least in (0, 1, 2)])
            answers[-1] = answers[-1][3 * order.index(budget) :][:3]
        assert answers[0] == answers[1]
        assert solve(make_problem(profile, budget)) == solve(make_problem(profile, budget))


@pytest.mark.parametrize("layers", [12, 48])
def test_deep_models_are_settled_by_composition_without_many_segmentations(
    layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unwanted(search: Search, cuts: tuple[int, ...]) -> None:
        raise AssertionError("a segmentation was tried")

    monkeypatch.setattr(Search, "try_cuts", unwanted)
    problem = make_problem(transformer(layers), 0)
    problem = problem.with_budget(problem.judge(()).peak_bytes * 3 // 4)
    solution = solve(problem)
    assert solution.peak_bytes <= problem.budget_bytes
    assert solution.gap * solution.recompute_seconds <= 1e-3 * problem.profile.step_seconds


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_composed_of_an_odd_graph_can_be_carried_out(seed: int) -> None:
    problem = make_problem(layered(seed, 60), 0)
    for parts in Composer(problem).divisions:
        for part in parts:
            for effect in part.effects:
                problem.judge([part.storages[k] for k in effect.dropped])
