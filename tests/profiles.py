"""Made-up profiles: chains of transformer blocks, and random layered graphs, with the shape that real ones have."""

from __future__ import annotations

import random as random_module

from ckpt_planner.profile import SCHEMA_VERSION, Op, Profile, Read, Slot, Step, Storage

MB = 1_000_000


class Tensor:
    """A tensor of the made-up model: a storage, and the operation whose result it is."""

    def __init__(self, storage: int, producer: int) -> None:
        self.storage, self.producer = storage, producer


class Builder:
    """Writes down operations one after another; `build` adds the backward pass that autograd would run."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.kinds: list[str] = []
        self.births: list[int] = []
        self.deaths: dict[int, int] = {}
        self.names: list[str] = []
        self.ops: list[Op] = []
        self.saved: list[list[Tensor]] = []
        self.versions: dict[int, int] = {}

    def external(self, size: int, kind: str = "parameter") -> Tensor:
        return Tensor(self._storage(size, kind, -1), -1)

    def _storage(self, size: int, kind: str, birth: int) -> int:
        self.sizes.append(size)
        self.kinds.append(kind)
        self.births.append(birth)
        self.names.append(f"{kind}.{len(self.sizes)}" if birth < 0 else "")
        return len(self.sizes) - 1

    def op(
        self,
        name: str,
        module: str,
        reads: list[Tensor],
        size: int,
        seconds: float,
        *,
        saves: list[Tensor] | None = None,
        saves_output: bool = False,
        hides: tuple[int, ...] = (),
        random: bool = False,
        inside: bool = True,
        never: bool = False,
        workspace: int = 0,
        in_place: bool = False,
    ) -> Tensor:
        i = len(self.ops)
        hidden = [self._storage(h, "hidden", i) for h in hides]
        made = () if in_place else (self._storage(size, "value", i),)
        out = Tensor(reads[0].storage if in_place else made[0], i)
        self._append(
            name,
            module,
            reads,
            made,
            tuple(hidden),
            out,
            seconds,
            size + sum(hides) + workspace,
            random,
            inside,
            never,
            in_place,
        )
        kept = list(saves or ()) + ([out] if saves_output else []) + [Tensor(h, -1) for h in hidden]
        self.saved.append(kept)
        if in_place:
            self.versions[out.storage] = self.versions.get(out.storage, 0) + 1
        return out

    def view(self, name: str, module: str, of: Tensor) -> Tensor:
        out = Tensor(of.storage, len(self.ops))
        self._append(name, module, [of], (), (), out, 1e-6, 0, False, True, False, False)
        self.saved.append([])
        return out

    def _append(
        self, name: str, module: str, reads: list[Tensor], makes: tuple[int, ...], hides: tuple[int, ...], out: Tensor,
        seconds: float, workspace: int, random: bool, inside: bool, never: bool, in_place: bool,
    ) -> None:  # fmt: skip
        self.ops.append(
            Op(
                name=name, module=module, place="model.py:1", signature=f"{name}:{module.split('.')[-1]}",
                reads=tuple(Read(t.storage, t.producer, self.versions.get(t.storage, 0)) for t in reads),
                makes=makes, hides=hides, writes=(out.storage,) if in_place else (), output=(out.storage,),
                seconds=seconds, workspace_bytes=workspace, random=random, replay="never" if never else "plain",
                reason="made up" if never else "", inside=inside,
            )
        )  # fmt: skip

    def hold(self, tensor: Tensor, until: int) -> None:
        self.deaths[tensor.storage] = until

    def build(self, *, op_seconds: float = 20e-6, group_seconds: float = 100e-6) -> Profile:
        n = len(self.ops)
        last = {s: i for i, op in enumerate(self.ops) for s in (*op.makes, *op.output, *(r.storage for r in op.reads))}
        steps, slots, ends = self._backward(last)
        storages = []
        for s, (size, kind, birth) in enumerate(zip(self.sizes, self.kinds, self.births, strict=True)):
            death = n + 1 if birth < 0 else birth + 1 if kind == "hidden" else min(last[s] + 2, n)
            storages.append(Storage(size, kind, birth, self.deaths.get(s, death), self.names[s]))  # type: ignore[arg-type]
        totals = {
            k: sum(z for z, kind in zip(self.sizes, self.kinds, strict=True) if kind == k) for k in set(self.kinds)
        }
        return Profile(
            schema=SCHEMA_VERSION, model="made up", input_signature="", structure="", torch_version="", device="cpu",
            storages=tuple(storages), ops=tuple(self.ops), slots=tuple(slots), steps=tuple(steps),
            parameter_bytes=totals.get("parameter", 0), buffer_bytes=0, input_bytes=totals.get("input", 0),
            gradient_bytes=totals.get("parameter", 0), end_live_bytes=ends, rng_state_bytes=5056,
            replay_op_seconds=op_seconds, replay_group_seconds=group_seconds,
        )  # fmt: skip

    def _backward(self, last: dict[int, int]) -> tuple[list[Step], list[Slot], int]:
        """Steps in reverse order of the operations; the gradient of a value lives from its last use to its maker."""
        steps: list[Step] = []
        slots: list[Slot] = []
        live: dict[int, int] = {}
        for i in reversed(range(len(self.ops))):
            op, saved = self.ops[i], self.saved[i]
            for position, t in enumerate(saved):
                slots.append(Slot(i, position, t.storage, t.producer, len(steps), not op.inside))
            before = sum(live.values())
            wanted = {r.storage for r in op.reads if self.kinds[r.storage] in ("value", "parameter")}
            for s in sorted(wanted):
                live.setdefault(s, self.sizes[s])
            peak = max(before, sum(live.values()))
            steps.append(Step(f"{op.name}Backward", i, 2 * op.seconds, before, peak))
            for s in op.makes:
                live.pop(s, None)
        slots.sort(key=lambda slot: (slot.op, slot.position))
        return steps, slots, sum(live.values())


def transformer(
    layers: int, *, width: int = 256, tokens: int = 2048, vocabulary: int = 8192, heads: int = 4
) -> Profile:
    """A GPT of `layers` identical blocks, fp32; times are those of a machine of 100 GFLOP/s and 10 GB/s."""
    b, unit, t = Builder(), 4 * width * tokens, 256

    def matmul(a: int, c: int) -> float:
        return 2 * tokens * a * c / 1e11

    def stream(size: int) -> float:
        return size / 1e10

    def weights(a: int, c: int) -> Tensor:
        return b.external(4 * a * c)

    ids = b.external(8 * tokens, "input")
    x = b.op("embedding", "wte", [ids, weights(vocabulary, width)], unit, stream(unit), saves=[ids])
    for layer in range(layers):
        m = f"h.{layer}"
        y = b.op(
            "layer_norm",
            f"{m}.ln_1",
            [x, weights(2, width)],
            unit,
            stream(3 * unit),
            saves=[x],
            hides=(4 * tokens, 4 * tokens),
        )
        qkv = b.op(
            "linear", f"{m}.attn.c_attn", [y, weights(width, 3 * width)], 3 * unit, matmul(width, 3 * width), saves=[y]
        )
        parts = [
            b.view("transpose", f"{m}.attn", b.view("view", f"{m}.attn", b.view("split", f"{m}.attn", qkv)))
            for _ in range(3)
        ]
        a = b.op("sdpa", f"{m}.attn", parts, unit, 4 * tokens * t * width / 1e11, saves=parts, saves_output=True,
                 hides=(4 * tokens * heads,), workspace=unit)  # fmt: skip
        a = b.op("contiguous", f"{m}.attn", [b.view("transpose", f"{m}.attn", a)], unit, stream(2 * unit))
        a = b.op("linear", f"{m}.attn.c_proj", [a, weights(width, width)], unit, matmul(width, width), saves=[a])
        a = b.op("dropout", f"{m}.attn.resid_dropout", [a], unit, stream(3 * unit), hides=(unit // 4,), random=True)
        x = b.op("add", m, [x, a], unit, stream(3 * unit))
        y = b.op(
            "layer_norm",
            f"{m}.ln_2",
            [x, weights(2, width)],
            unit,
            stream(3 * unit),
            saves=[x],
            hides=(4 * tokens, 4 * tokens),
        )
        y = b.op(
            "linear", f"{m}.mlp.c_fc", [y, weights(width, 4 * width)], 4 * unit, matmul(width, 4 * width), saves=[y]
        )
        half = b.op("mul", f"{m}.mlp.act", [y], 4 * unit, stream(8 * unit))
        power = b.op("pow", f"{m}.mlp.act", [y], 4 * unit, stream(8 * unit), saves=[y])
        inner = b.op("add", f"{m}.mlp.act", [y, power], 4 * unit, stream(12 * unit))
        gate = b.op("tanh", f"{m}.mlp.act", [inner], 4 * unit, stream(8 * unit), saves_output=True)
        y = b.op("mul", f"{m}.mlp.act", [half, gate], 4 * unit, stream(12 * unit), saves=[half, gate])
        y = b.op("linear", f"{m}.mlp.c_proj", [y, weights(4 * width, width)], unit, matmul(4 * width, width), saves=[y])
        y = b.op("dropout", f"{m}.mlp.dropout", [y], unit, stream(3 * unit), hides=(unit // 4,), random=True)
        x = b.op("add", m, [x, y], unit, stream(3 * unit))
    x = b.op(
        "layer_norm", "ln_f", [x, weights(2, width)], unit, stream(3 * unit), saves=[x], hides=(4 * tokens, 4 * tokens)
    )
    logits = b.op(
        "linear",
        "lm_head",
        [x, weights(width, vocabulary)],
        4 * tokens * vocabulary,
        matmul(width, vocabulary),
        saves=[x],
    )
    loss = b.op(
        "cross_entropy",
        "",
        [logits],
        4,
        stream(8 * tokens * vocabulary),
        hides=(4 * tokens * vocabulary,),
        inside=False,
    )
    b.hold(logits, len(b.ops) + 1)
    b.hold(loss, len(b.ops) + 1)
    return b.build()


def layered(seed: int, size: int, *, kinds: bool = True) -> Profile:
    """A random graph of `size` operations: skips, views, hidden storages, in-place writes, calls that never replay."""
    rng = random_module.Random(seed)
    b = Builder()
    values = [b.external(MB, "input")]
    weight = b.external(rng.randint(1, 4) * MB)
    for i in range(size):
        reads = [rng.choice(values[-4:]), *([rng.choice(values)] if rng.random() < 0.3 else [])]
        roll, module = rng.random() if kinds else 1.0, f"layer.{i // 4}"
        if roll < 0.12 and reads[0].producer >= 0:
            values.append(b.view("view", module, reads[0]))
            continue
        bytes_, seconds = rng.randint(1, 8) * MB, rng.randint(1, 20) * 1e-3
        if roll < 0.18 and reads[0].producer >= 0:
            saved_already = any(t.storage == reads[0].storage for kept in b.saved for t in kept)
            if not saved_already:
                out = b.op("relu_", module, reads[:1], 0, seconds, in_place=True, saves_output=rng.random() < 0.7)
                values = [v for v in values if v.storage != out.storage] + [out]
                continue
        saves = [r for r in reads if rng.random() < 0.7]
        hides = (rng.randint(1, 3) * MB // 2,) if rng.random() < 0.3 else ()
        values.append(
            b.op("op", module, [*reads, weight], bytes_, seconds, saves=saves, saves_output=rng.random() < 0.4,
                 hides=hides, random=rng.random() < 0.2, never=kinds and rng.random() < 0.06,
                 workspace=rng.randint(0, 2) * MB)
        )  # fmt: skip
    loss = b.op("loss", "", [values[-1]], 4, 1e-4, inside=False)
    b.hold(loss, len(b.ops) + 1)
    return b.build(op_seconds=1e-4, group_seconds=5e-4)
