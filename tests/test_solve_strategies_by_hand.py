"""The blocks and segments of the strategies that people use by hand."""

from __future__ import annotations

from itertools import pairwise

from profiles import Builder, transformer

from ckpt_planner.problem import make_problem
from ckpt_planner.schedule import Schedule
from ckpt_planner.solve.blocks import block_cuts, block_of_ops, solve_all
from ckpt_planner.solve.segments import balanced_cuts, inside_segments, saved_before


def test_blocks_are_the_repeated_modules() -> None:
    profile = transformer(3)
    block = block_of_ops(make_problem(profile, 0))
    for op, number in zip(profile.ops, block, strict=True):
        assert number == (int(op.module.split(".")[1]) if op.module.startswith("h.") else -1)


def test_blocks_are_top_level_children_where_nothing_repeats() -> None:
    b = Builder()
    x = b.external(1000, "input")
    for module in ("stem.conv", "stem.act", "body.0.linear", "head"):
        x = b.op("op", module, [x], 1000, 1e-3, saves=[x])
    assert block_of_ops(make_problem(b.build(), 0)) == (0, 0, 1, 2)


def test_every_block_is_one_group_and_keeps_its_input() -> None:
    profile = transformer(4)
    problem = make_problem(profile, 0)
    judged = solve_all(problem)
    groups = Schedule(profile, judged.dropped, judged.inner).groups
    block = block_of_ops(problem)
    assert [{block[i] for i in group.ops} for group in groups] == [{0}, {1}, {2}, {3}]
    starts = {profile.ops[p].reads[0].storage for p in (0, *block_cuts(problem)) if block[p] >= 0}
    assert not starts & set(judged.dropped)


def test_segments_are_balanced_on_bytes() -> None:
    problem = make_problem(transformer(8), 0)
    saved, cuts = saved_before(problem), balanced_cuts(problem, 4)
    edges = (0, *cuts, len(problem.profile.ops))
    parts = [saved[b] - saved[a] for a, b in pairwise(edges)]
    assert len(parts) == 4
    assert max(parts) < 1.5 * saved[-1] / 4
    assert len(Schedule(problem.profile, inside_segments(problem, cuts)).groups) == 4
