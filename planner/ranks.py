"""What the ranks of a process group tell each other while they plan.

They talk through the process group's store, not by collectives: a store keeps what was said, so that a rank that comes
later finds it, and a rank that never comes leaves no other hanging in a collective of its own.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from typing import Any

import msgspec
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

PATIENCE = 600.0  # seconds: how long a rank waits for another that has to come
GRACE = 10.0  # seconds: how long a rank waits for others that may not come
_CHUNK = 4 << 20  # bytes: a TCPStore takes 8 MiB at a time
_POLL = 0.01  # seconds

_NUMBERS: Counter[str] = Counter()


class Message(msgspec.Struct, frozen=True):
    """What the deciding rank says.

    Attributes:
        kind: "begun", "rehearse", "done" or "failed".
        text: the model's structure where it has begun, the error where it failed.
        model: the model's name.
        plan: an encoded plan.
        budget_bytes, minimum_bytes: of an infeasible budget.
    """

    kind: str
    text: str = ""
    model: str = ""
    plan: bytes = b""
    budget_bytes: int = -1
    minimum_bytes: int = -1


class Ranks:
    """One runtime's talk with its counterparts on the other ranks.

    Runtimes are told apart by the order in which they plan for the first time, so every rank has to plan its models in
    one order.

    Attributes:
        rank, size: this rank's number in the group, and how many there are.
    """

    def __init__(self, group: Any) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        name = str(getattr(group or dist.group.WORLD, "group_name", ""))
        _NUMBERS[name] += 1
        store = c10d._get_default_store()
        self._store: Any = c10d.PrefixStore(f"ckpt_planner/{name}/{_NUMBERS[name]}", store)  # type: ignore[attr-defined]

    @property
    def decides(self) -> bool:
        """Whether this rank's profile decides for all."""
        return self.rank == 0

    def say(self, talk: str, number: int, message: Message) -> None:
        """Say message `number` of a talk."""
        data, key = zlib.compress(msgspec.msgpack.encode(message)), f"{talk}/{number}"
        chunks = [data[at : at + _CHUNK] for at in range(0, len(data), _CHUNK)]
        for k, chunk in enumerate(chunks):
            self._store.set(f"{key}/{k}", chunk)
        self._store.set(key, str(len(chunks)))

    def hear(self, talk: str, number: int, seconds: float) -> Message | None:
        """Message `number` of a talk; None if it is not said within `seconds`."""
        key = f"{talk}/{number}"
        if not self._appears(key, seconds):
            return None
        chunks = [self._store.get(f"{key}/{k}") for k in range(int(self._store.get(key)))]
        return msgspec.msgpack.decode(zlib.decompress(b"".join(chunks)), type=Message)

    def all_here(self, talk: str, seconds: float) -> bool:
        """Whether every rank asks this within `seconds`; all that ask get the same answer.

        Whoever knows first, that all have come or that time is up, says so; the others take that.
        """
        if self._store.add(f"{talk}/here", 1) == self.size:
            self._answer(talk, "yes")
        elif not self._appears(f"{talk}/answer", seconds):
            self._answer(talk, "no")
        self._appears(f"{talk}/answer", PATIENCE)
        return bool(self._store.get(f"{talk}/answer") == b"yes")

    def _answer(self, talk: str, answer: str) -> None:
        if self._store.add(f"{talk}/answered", 1) == 1:
            self._store.set(f"{talk}/answer", answer)

    def _appears(self, key: str, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not self._store.check([key]):
            if time.monotonic() >= end:
                return False
            time.sleep(_POLL)
        return True


def ranks_of(group: Any) -> Ranks | None:
    """The ranks that train together; None where this one trains alone."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) < 2:
        return None
    return Ranks(group)


def collectives() -> int:
    """How many collectives this process has taken part in; differs before and after a step that has some."""
    if not dist.is_available() or not dist.is_initialized():
        return 0
    try:
        groups: list[Any] = list(c10d._world.pg_map)
        return sum(int(group._get_sequence_number_for_group()) for group in groups)
    except (RuntimeError, AttributeError):  # a backend that does not count: take it that there are some
        return time.monotonic_ns()
