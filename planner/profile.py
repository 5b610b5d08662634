"""What was measured of one training step: the only thing that deciding needs, and free of torch.

A profile describes the step as three lists. *Storages* are blocks of memory, with the span of forward in which the
model's own Python holds them. *Operations* are the torch calls of the forward pass in the order in which they ran.
*Steps* are the nodes of the backward pass in the order in which autograd ran them. *Slots* tie them together: each is
one tensor that an operation saved for backward, and says which storage it lies in and which step reads it.

All sizes are bytes, all times seconds.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import msgspec

from .errors import PlanMismatchError

SCHEMA_VERSION = 1
UNSEEN = -2  # position of a slot that no hook sees

StorageKind = Literal["value", "hidden", "parameter", "buffer", "input", "constant"]
Replay = Literal["plain", "grad", "never"]


class Storage(msgspec.Struct, frozen=True):
    """One block of memory.

    Attributes:
        bytes: its size.
        kind: "value" for what an operation returns, "hidden" for what an operation saves for backward but never
            returns (a dropout mask, a log-sum-exp); the rest exist before the step and are never freed during it.
        birth: index of the operation that makes it; -1 for what exists before the step.
        death: index of the first operation before which Python no longer holds it (birth < death); len(ops) where it
            lets go when forward returns, len(ops) + 1 where the output or the loss holds it until backward has ended.
        name: the parameter's, buffer's or input's name; empty for the others.
    """

    bytes: int
    kind: StorageKind
    birth: int
    death: int
    name: str = ""


class Read(msgspec.Struct, frozen=True):
    """One tensor argument of an operation.

    Attributes:
        storage: index of the storage that it lies in.
        producer: index of the operation whose result this tensor is; -1 if it exists before the step.
        version: how many operations had written into the storage in place before this read.
    """

    storage: int
    producer: int
    version: int = 0


class Op(msgspec.Struct, frozen=True):
    """One torch call of the forward pass.

    Attributes:
        name: the function's public name, e.g. "torch.nn.functional.linear".
        module: path of the innermost module that made the call; "" for the model itself.
        place: "file.py:12", the line that made the call.
        signature: equal for calls that do the same work (function, shapes, types, options).
        reads: its tensor arguments, in order.
        makes: storages born here that it returns (none for a view).
        hides: storages born here that it only saves.
        writes: storages that it changes in place.
        output: storage of each tensor that it returns, in order (views: the storage they look into).
        seconds: time of the forward call.
        workspace_bytes: most bytes that were live during the call, above those live when it began; what it returns
            and saves is included.
        random: draws from a torch generator, so that replaying it needs the generator's state.
        replay: "plain" where running it again without gradients gives the same bits; "grad" where only recording
            gradients does (some kernels have another path for inference); "never" where it would not give the same bits
            or would change something outside.
        reason: why `replay` is "never"; empty otherwise.
        inside: made within the model's forward; False for the loss, which is not planned.
        choices: storages made here that hold indices computed from floating-point values (top-k, arg-max, sampling);
            they are kept, because another choice on replay would be another model.
        snapshot: positions in `reads` whose storage exists before the step and is changed during it: replaying
            needs a copy from before the call.
    """

    name: str
    module: str
    place: str
    signature: str
    reads: tuple[Read, ...]
    makes: tuple[int, ...]
    hides: tuple[int, ...]
    writes: tuple[int, ...]
    output: tuple[int, ...]
    seconds: float
    workspace_bytes: int
    random: bool = False
    replay: Replay = "plain"
    reason: str = ""
    inside: bool = True
    choices: tuple[int, ...] = ()
    snapshot: tuple[int, ...] = ()


class Slot(msgspec.Struct, frozen=True):
    """One tensor saved for backward.

    Attributes:
        op: index of the operation that saved it.
        position: how many tensors the same operation had saved before; -1 if it was saved outside any operation,
            UNSEEN if autograd saved it without telling a hook (a number wrapped as a tensor).
        storage: index of the storage that it lies in.
        producer: index of the operation whose result it is or looks into; -1 if none did (it exists before the step,
            or is hidden).
        step: index of the backward step that reads it; -1 if none does.
        fixed: must stay as it is (saved outside an operation, by the loss, an odd layout, an older version).
    """

    op: int
    position: int
    storage: int
    producer: int
    step: int
    fixed: bool = False


class Step(msgspec.Struct, frozen=True):
    """One node of the backward pass.

    Attributes:
        name: autograd's name for it.
        op: index of the operation whose backward it is; -1 if unknown or a gradient's accumulation.
        seconds: its time, without any replay.
        live_bytes: gradients that are live when it begins (parameter gradients included).
        peak_bytes: most bytes of gradients and working memory live while it runs, saved tensors not included.
        gradient_bytes: bytes of parameter gradients that it is the first to leave behind.
    """

    name: str
    op: int
    seconds: float
    live_bytes: int
    peak_bytes: int
    gradient_bytes: int = 0


class Profile(msgspec.Struct, frozen=True):
    """One measured training step. See the module's docstring.

    Attributes:
        parameter_bytes, buffer_bytes, input_bytes: what is resident during the whole step, each storage once.
        gradient_bytes: parameter gradients at the end of backward.
        optimizer_state_bytes: resident during the whole step; 0 if no optimizer was given.
        optimizer_workspace_bytes: most bytes that the optimizer's step allocates above all that is resident.
        rng_state_bytes: size of one saved generator state.
        end_live_bytes: gradients live when backward has ended (equals the last step's outcome).
        replay_op_seconds, replay_group_seconds: what replaying costs beyond the kernels, per operation and per group.
        follow_op_seconds: what following costs for each operation of forward, as soon as anything is computed again.
        profiling_peak_bytes: the most bytes that were live while this was measured, the user's model included.
        bucket_bytes: what `DistributedDataParallel` averages gradients in, resident during the whole step.
        device: "cpu" or the GPU's name; `notes` are sentences for the user.
    """

    schema: int
    model: str
    input_signature: str
    structure: str
    torch_version: str
    device: str
    storages: tuple[Storage, ...]
    ops: tuple[Op, ...]
    slots: tuple[Slot, ...]
    steps: tuple[Step, ...]
    parameter_bytes: int
    buffer_bytes: int
    input_bytes: int
    gradient_bytes: int
    end_live_bytes: int
    optimizer: str = ""
    optimizer_state_bytes: int = 0
    optimizer_workspace_bytes: int = 0
    rng_state_bytes: int = 0
    replay_op_seconds: float = 0.0
    replay_group_seconds: float = 0.0
    follow_op_seconds: float = 0.0
    profiling_peak_bytes: int = 0
    loss: str = ""
    notes: tuple[str, ...] = ()
    bucket_bytes: int = 0

    @property
    def resident_bytes(self) -> int:
        """Bytes that no plan can avoid: parameters, buffers, inputs, optimizer state, and buckets of gradients."""
        own = self.parameter_bytes + self.buffer_bytes + self.input_bytes
        return own + self.optimizer_state_bytes + self.bucket_bytes

    @property
    def forward_seconds(self) -> float:
        """Time of the plain forward pass."""
        return math.fsum(op.seconds for op in self.ops)

    @property
    def step_seconds(self) -> float:
        """Time of the plain step, the optimizer's not included."""
        return self.forward_seconds + math.fsum(step.seconds for step in self.steps)

    def gradients_before(self, step: int) -> int:
        """Bytes of parameter gradients that exist when a backward step begins."""
        return sum(s.gradient_bytes for s in self.steps[:step])

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON."""
        Path(path).write_bytes(msgspec.json.encode(self))

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile that `save` wrote.

        Raises:
            PlanMismatchError: the file is no profile, or was written by another version of the format.
        """
        try:
            profile = msgspec.json.decode(Path(path).read_bytes(), type=cls)
        except msgspec.DecodeError as error:
            raise PlanMismatchError(f"{path} is not a profile of ckpt-planner: {error}") from error
        if profile.schema != SCHEMA_VERSION:
            raise PlanMismatchError(f"{path} has profile format {profile.schema}; this version reads {SCHEMA_VERSION}")
        return profile
