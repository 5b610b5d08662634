"""Random profiles whose operations do all that a torch call may do: nothing here is as tidy as a model's layers.

Calls read several tensors, return several, look into what they read while they read something else, write into what
another tensor looks into, and save what backward never reads. Steps are as greedy for memory as they like.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
from profiles import MB, Builder, Tensor

from ckpt_planner.profile import Op, Profile, Read


class Tangle(Builder):
    """Adds calls at random; `build` is the builder's."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.lot = random.Random(seed)
        self.values = [self.external(MB, "input")]
        self.buffer = self.external(MB, "buffer")

    def chance(self, share: float) -> bool:
        return self.lot.random() < share

    def call(self) -> None:
        reads = [self.lot.choice(self.values[-3:])]
        reads += [self.lot.choice(self.values) for _ in range(2) if self.chance(0.3)]
        roll, first = self.lot.random(), reads[0]
        if first.producer >= 0 and roll < 0.25:
            looks = [r for r in reads if r is first or (r.producer >= 0 and self.chance(0.2))]
            self.add("look", reads, looks=looks, makes=int(self.chance(0.15)))
        elif first.producer >= 0 and roll < 0.42 and self.may_be_written(first):
            self.add("write", reads, writes=[first], looks=[first], makes=int(self.chance(0.15)))
            if self.chance(0.7):  # otherwise what looked into it before still does
                newest = self.values[-1]
                self.values = [v for v in self.values if v.storage != newest.storage] + [newest]
        else:
            self.add("make", reads, makes=1 + self.chance(0.15), hides=int(self.chance(0.2)))

    def may_be_written(self, tensor: Tensor) -> bool:
        """Autograd raises where what was saved is written into."""
        return all(t.storage != tensor.storage for saved in self.saved for t in saved)

    def add(
        self,
        name: str,
        reads: list[Tensor],
        *,
        makes: int = 0,
        hides: int = 0,
        writes: Sequence[Tensor] = (),
        looks: Sequence[Tensor] = (),
    ) -> None:
        """Appends a call; it returns what it makes, then its looks."""
        i, lot = len(self.ops), self.lot
        if self.chance(0.05):
            reads = [*reads, self.buffer]
        made = [self._storage(lot.randint(1, 30) * MB, "value", i) for _ in range(makes)]
        hidden = [self._storage(lot.randint(1, 10) * MB, "hidden", i) for _ in range(hides)]
        written = [t.storage for t in writes] + [self.buffer.storage] * self.chance(0.03)
        out = [Tensor(s, i) for s in dict.fromkeys((*made, *(t.storage for t in looks)))]
        never = self.chance(0.06)
        work = sum(self.sizes[s] for s in (*made, *hidden)) + self.chance(0.3) * lot.randint(0, 60) * MB
        self.ops.append(
            Op(
                name=name,
                module=f"layer.{i // 4}",
                place="model.py:1",
                signature=f"{name}:{i}",
                reads=tuple(Read(t.storage, t.producer, self.versions.get(t.storage, 0)) for t in reads),
                makes=tuple(made),
                hides=tuple(hidden),
                writes=tuple(written),
                output=tuple(t.storage for t in out),
                seconds=lot.choice([1e-5, lot.randint(1, 20) * 1e-3]),
                workspace_bytes=work,
                random=self.chance(0.1),
                replay="never" if never else "plain",
                reason="made up" if never else "",
                snapshot=tuple(k for k, t in enumerate(reads) if t.producer < 0 and self.chance(0.5)),
            )
        )
        for s in written:
            self.versions[s] = self.versions.get(s, 0) + 1
        read = [] if writes else reads
        saves = [t for t in read if self.chance(0.45)] + [t for t in out if self.chance(0.3)]
        self.saved.append([*saves, *(Tensor(s, -1) for s in hidden)])
        self.values += out


def tangled(seed: int, size: int) -> Profile:
    """A random profile of `size` operations and a loss; times of a replay itself are drawn, too."""
    b = Tangle(seed)
    for _ in range(size):
        b.call()
    loss = b.op("loss", "", [b.values[-1], b.lot.choice(b.values)], 4, 1e-4, inside=False)
    b.hold(loss, len(b.ops) + 1)
    lot = b.lot
    profile = b.build(op_seconds=lot.choice([1e-4, 1e-2]), group_seconds=lot.choice([0.0, 1e-4, 5e-4, 3e-2]))
    steps = []
    for step in profile.steps:
        live = lot.randint(0, 20) * MB
        greedy = lot.choice([0, 60, 300]) * MB
        steps.append(
            msgspec.structs.replace(step, live_bytes=live, peak_bytes=live + lot.randint(0, greedy // MB) * MB)
        )
    unread = lot.choice([0.0, 0.0, 0.3])
    slots = [msgspec.structs.replace(s, step=-1) if lot.random() < unread else s for s in profile.slots]
    storages = [
        msgspec.structs.replace(s, death=min(s.death, lot.randint(s.birth + 1, len(profile.ops))))
        if s.kind == "value" and s.death <= len(profile.ops) and b.chance(0.3)
        else s
        for s in profile.storages
    ]
    return msgspec.structs.replace(profile, steps=tuple(steps), slots=tuple(slots), storages=tuple(storages))
