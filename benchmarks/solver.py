"""`python -m benchmarks.solver [INSTANCES]`: the solver alone, without torch: seconds, gap and memory against size.

Transformers of up to 96 layers, and random layered graphs of up to 10,000 operations beside Chen's segments at the peak
that these reach. With a folder of training graphs as networkx node-link JSON (`cost_cpu`, `cost_ram`, `backward` on
each node), those as well, at 90 %, 80 % and 50 % of the plain peak. The solver's seconds are CPU time; what a plan adds
is a share of forward and backward.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import time
from pathlib import Path

from ckpt_planner.problem import make_problem
from ckpt_planner.profile import SCHEMA_VERSION, Op, Profile, Read, Slot, Step, Storage
from ckpt_planner.solve import SolveStatus, minimum, solve

SIZES = (100, 300, 1000, 3000, 10_000)
LAYERS = (12, 24, 48, 96)
MB = 1_000_000
UNIT_SECONDS = 1e-6  # the graphs' times have no unit


Forward = list[tuple[int, float, list[int], list[int]]]
Backward = list[tuple[int, float]]


def profile_of(name: str, forward: Forward, backward: Backward) -> Profile:
    """A profile of a training graph.

    Args:
        name: what it is called.
        forward: (bytes of the output, seconds, operations that it reads, steps that read its output) of each operation.
        backward: (bytes of the output, seconds) of each step; the output is live until the next step has run.
    """
    readers: list[list[int]] = [[] for _ in forward]
    for i, (_, _, reads, _) in enumerate(forward):
        for j in reads:
            readers[j].append(i)
    storages = tuple(
        Storage(size, "value", i, max([i + 1, *(r + 1 for r in readers[i])])) for i, (size, *_) in enumerate(forward)
    )
    ops = tuple(
        Op(
            name="op", module="", place="", signature="", reads=tuple(Read(j, j) for j in reads), makes=(i,), hides=(),
            writes=(), output=(i,), seconds=seconds, workspace_bytes=size,
        )
        for i, (size, seconds, reads, _) in enumerate(forward)
    )  # fmt: skip
    slots = tuple(
        Slot(i, position, i, i, step)
        for i, (*_, steps) in enumerate(forward)
        for position, step in enumerate(sorted(steps))
    )
    live = [0, *(size for size, _ in backward)]
    steps = tuple(Step("step", -1, seconds, live[t], live[t] + size) for t, (size, seconds) in enumerate(backward))
    return Profile(
        schema=SCHEMA_VERSION, model=name, input_signature="", structure="", torch_version="", device="",
        storages=storages, ops=ops, slots=slots, steps=steps, parameter_bytes=0, buffer_bytes=0, input_bytes=0,
        gradient_bytes=0, end_live_bytes=live[-1],
    )  # fmt: skip


def layered(size: int, seed: int = 0) -> Profile:
    """A random graph in layers: an operation reads one of the four before it, one in three another from farther back.

    Backward runs in reverse and takes twice as long; a step reads the output of its own operation and what that reads.
    """
    rng = random.Random(seed)
    forward: Forward = []
    steps: list[set[int]] = [{size - 1 - i} for i in range(size)]
    for i in range(size):
        reads = {rng.randrange(max(0, i - 4), i)} if i else set()
        if i > 4 and rng.random() < 1 / 3:
            reads.add(rng.randrange(max(0, i - 40), i))
        for j in reads:
            steps[j].add(size - 1 - i)
        forward.append((rng.randint(1, 8) * MB, rng.randint(1, 20) * 1e-3, sorted(reads), []))
    whole = [(size_, seconds, reads, sorted(s)) for (size_, seconds, reads, _), s in zip(forward, steps, strict=True)]
    return profile_of(f"layered {size}", whole, [(size_, 2 * seconds) for size_, seconds, *_ in reversed(forward)])


def published(path: Path) -> Profile:
    """A training graph from a file. Nodes are taken in topological order."""
    graph = json.loads(path.read_text())
    nodes = {node["id"]: node for node in graph["nodes"]}
    links = [(link["source"], link["target"]) for link in graph["links"]]
    order = _sorted(list(nodes), links)
    ops = [v for v in order if not nodes[v]["backward"]]
    steps = [v for v in order if nodes[v]["backward"]]
    op, step = {v: i for i, v in enumerate(ops)}, {v: t for t, v in enumerate(steps)}
    forward = []
    for v in ops:
        reads = sorted(op[a] for a, b in links if b == v and a in op)
        read_by = sorted(step[b] for a, b in links if a == v and b in step)
        forward.append((int(nodes[v]["cost_ram"]), nodes[v]["cost_cpu"] * UNIT_SECONDS, reads, read_by))
    return profile_of(
        path.stem, forward, [(int(nodes[v]["cost_ram"]), nodes[v]["cost_cpu"] * UNIT_SECONDS) for v in steps]
    )


def _sorted(nodes: list[object], links: list[tuple[object, object]]) -> list[object]:
    import networkx as nx

    graph = nx.DiGraph()
    graph.add_nodes_from(nodes)
    graph.add_edges_from(links)
    place = {v: k for k, v in enumerate(nodes)}
    return list(nx.lexicographical_topological_sort(graph, key=lambda v: place[v]))


def row(profile: Profile, budget: int, what: str, kind: str, points: Path | None) -> str:
    """One line of the table, the plan for a budget, which is added to `points`, too."""
    begin = time.process_time()
    solution = solve(make_problem(profile, budget), time_limit=600)
    seconds = time.process_time() - begin
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    over = solution.status is SolveStatus.INFEASIBLE
    share = solution.recompute_seconds / profile.step_seconds
    if points is not None:
        point = {"kind": kind, "operations": len(profile.ops), "seconds": seconds, "mebibytes": memory}
        with points.open("a") as file:
            file.write(json.dumps({**point, "gap": solution.gap, "time added": share}) + "\n")
    plan = "cannot be kept |" if over else f"{share:.2%} | {solution.gap:.1%}"
    return f"| {profile.model} | {len(profile.ops)} | {what} | {plan} | {seconds:.1f} s | {memory:.0f} MiB |"


def transformer(layers: int) -> Profile:
    """A chain of identical transformer blocks of 24 operations, in the shape that a profile of one has."""
    forward: Forward = []
    reads_of: list[list[int]] = []

    def op(size: float, seconds: float, *reads: int) -> int:
        forward.append((int(size * MB), seconds * 1e-3, sorted(reads), []))
        reads_of.append(list(reads))
        return len(forward) - 1

    x = op(2, 0.2)
    for _ in range(layers):
        y = op(2, 0.6, x)  # layer norm
        q, k, v = (op(2, 2.7, y) for _ in range(3))
        heads = [op(2, 0.3, part) for part in (q, k, v)]
        scores = op(8, 1.4, heads[0], heads[1])
        scaled = op(8, 1.6, scores)
        masked = op(8, 1.6, scaled)
        weights = op(8, 2.4, masked)
        dropped = op(8, 2.0, weights)
        mixed = op(2, 1.4, dropped, heads[2])
        merged = op(2, 0.3, mixed)
        out = op(2, 2.7, merged)
        x = op(2, 0.4, x, op(2, 0.5, out))
        y = op(2, 0.6, x)
        up = op(8, 10.7, y)
        cubed = op(8, 1.6, up)
        inner = op(8, 1.6, up, cubed)
        gate = op(8, 2.4, inner)
        active = op(8, 1.6, up, gate)
        x = op(2, 0.4, x, op(2, 0.5, op(2, 10.7, active)))
    size = len(forward)
    steps: list[set[int]] = [{size - 1 - i} for i in range(size)]
    for i, reads in enumerate(reads_of):
        for j in reads:
            steps[j].add(size - 1 - i)
    whole = [(b, seconds, reads, sorted(t)) for (b, seconds, reads, _), t in zip(forward, steps, strict=True)]
    return profile_of(f"{layers} layers", whole, [(b, 2 * seconds) for b, seconds, *_ in reversed(forward)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("instances", nargs="*", type=Path, help="folders of training graphs")
    parser.add_argument("--points", type=Path, help="a file to which each row is added, for benchmarks.plots solver")
    options = parser.parse_args()
    print("| graph | operations | budget | time added | gap | solver | memory |")
    print("|---|---|---|---|---|---|---|")

    def show(profile: Profile, budget: int, what: str, kind: str) -> None:
        print(row(profile, budget, what, kind, options.points), flush=True)

    for folder in options.instances:
        for path in sorted(folder.glob("*.json")):
            profile = published(path)
            plain = solve(make_problem(profile, 1 << 60)).peak_bytes
            least = minimum(profile).peak_bytes
            for share in (0.9, 0.8, 0.5):
                show(profile, int(share * plain), f"{share:.0%} of plain (least {least / plain:.0%})", "published")
    for layers in LAYERS:
        profile = transformer(layers)
        plain = solve(make_problem(profile, 1 << 60)).peak_bytes
        for share in (0.75, 0.5, 0.25):
            show(profile, int(share * plain), f"{share:.0%} of plain", "transformer")
    for size in SIZES:
        profile = layered(size)
        by_rule = solve(make_problem(profile, 0), "sqrt")
        rule = f"Chen's peak, where Chen adds {by_rule.recompute_seconds / profile.step_seconds:.1%}"
        show(profile, by_rule.peak_bytes, rule, "random, Chen's peak")
        plain = solve(make_problem(profile, 1 << 60)).peak_bytes
        show(profile, (plain + by_rule.peak_bytes) // 2, "half-way from there to plain", "random, half-way")


if __name__ == "__main__":
    main()
