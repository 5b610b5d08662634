"""Records one eager forward pass as a list of operations, in the memory of inference.

A `TorchFunctionMode` around the model's own forward sees every torch call with its real arguments, and no flag says
that anything is traced: the path recorded is the one that training takes. What autograd would save is noted and let go,
so that a model whose plain step does not fit can be recorded all the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as hooks
from torch.overrides import TorchFunctionMode

from ckpt_planner.errors import UnsupportedModelError
from ckpt_planner.profile import Op, Read, Slot, Storage
from ckpt_planner.replay.ambient import generator_states
from ckpt_planner.replay.calls import (
    bytes_of,
    call_name,
    is_operation,
    is_plain,
    storage_key,
    storage_ref,
    tensors_in,
    transforming,
    version_of,
)

from .describe import call_signature, calling_line, users_line
from .faithful import UNWRITTEN, Faithful, same_bits
from .meter import Meter
from .overwritten import Overwritten
from .saved import MOST_SNAPSHOT, Saved, with_snapshots, writes_repeatably
from .unseen import Unseen


class Recorder(TorchFunctionMode):
    """Records what a model does. Enter it around the forward pass; `outside()` says that the loss begins.

    Args:
        model: whose module paths name the operations.
        known: name and kind of each tensor that exists before the step.
        meter: entered already.
        device: where the model computes.

    `marks` holds the meter's marks before and after each operation.
    """

    def __init__(
        self, model: torch.nn.Module, known: list[tuple[str, Any, torch.Tensor]], meter: Meter, device: torch.device
    ):
        super().__init__()
        self._meter, self._device = meter, device
        self._names = {id(m): name for name, m in model.named_modules()}
        self._storages: list[dict[str, Any]] = []
        self._index: dict[int, int] = {}
        self._refs: list[StorageWeakRef | None] = []
        self._living: list[int] = []
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], int, int, int]] = {}  # and version, writes
        self._writes: dict[int, int] = {}
        self._path: list[str] = []
        self._saved: list[Saved] = []
        self._busy = False
        self._unseen, self._known = Unseen(), [tensor for _, kind, tensor in known if kind != "parameter"]
        self._sequence = 0
        self.faithful, self.overwritten = Faithful(meter), Overwritten(model)
        self._inside = True
        self._handles: list[Any] = []
        self.ops: list[Op] = []
        self.slots: list[Slot] = []
        self.marks: list[tuple[int, int]] = []
        self.sequences: list[int] = []
        self._first_sequence = 0
        self._slot_versions: list[int] = []
        self._saving = saved_tensors_hooks(self._pack, self._unpack)
        for name, kind, tensor in known:
            if storage_key(tensor) is not None and storage_key(tensor) not in self._index:
                self._add(self._bytes(tensor), kind, -1, storage_ref(tensor), name)

    def __enter__(self) -> Recorder:
        self._handles = [
            hooks.register_module_forward_pre_hook(self._enter_module),
            hooks.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        self._saving.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        self._first_sequence = torch._C._autograd._get_sequence_nr()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._saving.__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def _enter_module(self, module: torch.nn.Module, _: Any) -> None:
        self._path.append(self._names.get(id(module), type(module).__name__))

    def _leave_module(self, module: torch.nn.Module, _: Any, __: Any) -> None:
        if self._path:
            self._path.pop()

    def outside(self) -> None:
        """The model's forward has returned; what follows is the loss."""
        self._inside = False

    def finish(self) -> tuple[tuple[Storage, ...], tuple[Op, ...], tuple[Slot, ...]]:
        """Everything recorded. Call it when forward and loss have returned and their results are still held."""
        self._poll()
        self._compare(self._known)
        for living in self._living:
            self._storages[living]["death"] = len(self.ops) + 1
        for storage in self._storages:
            storage.setdefault("death", len(self.ops))
        final = self._writes
        slots = [
            Slot(x.op, x.position, x.storage, x.producer, -1, x.fixed or version != final.get(x.storage, 0))
            for x, version in zip(self.slots, self._slot_versions, strict=True)
        ]
        storages = tuple(Storage(**s) for s in self._storages)
        return storages, with_snapshots(tuple(self.ops), storages, final), tuple(slots)

    # -- one call ---------------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = call_name(func)
        if name.endswith(".__get__"):  # a property: free, and mostly no tensor
            result = func(*args, **kwargs)
            if result is not None and is_operation(result):
                self._note(name, args, kwargs, result, None, None)
            return result
        self._poll()
        tensors = [*tensors_in(args), *tensors_in(kwargs)]
        self._compare(tensors)
        versions = [version_of(t) for t in tensors]
        contents = [self._content(t) for t in tensors]
        signature = call_signature(name, args, kwargs, tensors, self._device)
        held = self.overwritten.before(signature, tensors)
        trial = self.faithful.begin(signature, name, func, args, kwargs)
        states = generator_states()
        self._sequence = torch._C._autograd._get_sequence_nr() - self._first_sequence
        self._busy = True
        first = self._meter.mark()
        try:
            result = func(*args, **kwargs)
        finally:
            self._busy = False
        last = self._meter.mark()
        self.overwritten.after(signature, held)
        if not is_operation(result):
            self._flush(None)
            return result
        random = any(not torch.equal(a, b) for a, b in zip(states, generator_states(), strict=True))
        changed = [
            i
            for i, (t, v, c) in enumerate(zip(tensors, versions, contents, strict=True))
            if version_of(t) != v or (c is not None and not same_bits(c, t))
        ]
        verdict = self.faithful.end(trial, signature, func, args, kwargs, result, states, random, bool(changed))
        self._note(name, args, kwargs, result, (first, last), (tensors, versions, changed, signature, random, verdict))
        return result

    def _note(self, name: str, args: Any, kwargs: Any, result: Any, marks: Any, details: Any) -> None:
        if details is None:
            tensors = [*tensors_in(args), *tensors_in(kwargs)]
            details = (tensors, [version_of(t) for t in tensors], [], name, False, ("plain", ""))
            mark = self._meter.mark()
            marks = (mark, mark)
        tensors, versions, changed, signature, random, (replay, reason) = details
        index = len(self.ops)
        reads = tuple(map(self._read, tensors, versions))
        writes = tuple(sorted({reads[i].storage for i in changed}))
        for s in writes:
            self._writes[s] = self._writes.get(s, 0) + 1
        makes, output, choices = [], [], []
        floating = any(t.is_floating_point() or t.is_complex() for t in tensors)
        for tensor in tensors_in(result):
            key = storage_key(tensor)
            if key is None:
                s = self._add(self._bytes(tensor), "value", index, None)
                makes.append(s)
            elif key in self._index:
                s = self._index[key]
            else:
                s = self._add(self._bytes(tensor), "value", index, storage_ref(tensor))
                makes.append(s)
            if not is_plain(tensor):
                replay, reason = "never", f"it returns a {type(tensor).__name__} of layout {tensor.layout}"
            if (
                s in makes
                and floating
                and not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
            ):
                choices.append(s)
            output.append(s)
            self._made[id(tensor)] = (weakref.ref(tensor), index, version_of(tensor), self._writes.get(s, 0))
        hides = self._flush(index, fixed=not writes_repeatably(name, kwargs, args, [tensors[i] for i in changed]))
        self._unseen.note([*(tensors[i] for i in changed), *tensors_in(result)], self._watched, name in UNWRITTEN)
        self.marks.append(marks)
        self.sequences.append(self._sequence)
        self.ops.append(
            Op(
                name=name,
                module=self._path[-1] if self._path else "",
                place=calling_line(),
                signature=signature,
                reads=reads,
                makes=tuple(makes),
                hides=hides,
                writes=writes,
                output=tuple(output),
                seconds=0.0,
                workspace_bytes=0,
                random=random,
                replay=replay,
                reason=reason,
                inside=self._inside,
                choices=tuple(choices),
            )
        )

    def _watched(self, tensor: torch.Tensor) -> int | None:
        """The number of a storage that is watched for unseen writes."""
        s = self._index.get(storage_key(tensor) or 0)
        return s if s is not None and self._storages[s]["kind"] != "parameter" else None

    def _compare(self, tensors: list[torch.Tensor]) -> None:
        for s in self._unseen.compare(tensors, self._watched):
            self._writes[s] = self._writes.get(s, 0) + 1

    def _content(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A copy of a small tensor from before the step: batch_norm writes its statistics without counting it."""
        s = self._index.get(storage_key(tensor) or 0)
        if s is None or self._storages[s]["kind"] not in ("buffer", "constant") or tensor.nbytes > MOST_SNAPSHOT:
            return None
        if transforming() or not is_plain(tensor):
            return None
        return tensor.detach().clone()

    def _read(self, tensor: torch.Tensor, version: int) -> Read:
        key = storage_key(tensor)
        made = self._made.get(id(tensor))
        producer = made[1] if made is not None and made[0]() is tensor else -1
        if key is not None and key in self._index:
            s = self._index[key]
        else:
            now = self._made_unseen(tensor)
            birth = max(0, len(self.ops) - 1) if now else -1
            ref = storage_ref(tensor) if key is not None else None
            s = self._add(self._bytes(tensor), "value" if now else "constant", birth, ref)
        marked = made is not None and version != made[2] and self._writes.get(s, 0) == made[3]  # mark_dirty
        producer = -1 if marked or s in self._unseen.found else producer  # written into, but by no call that passed by
        return Read(s, producer, self._writes.get(s, 0))

    def _made_unseen(self, tensor: torch.Tensor) -> bool:
        """Whether something else than a call that passed by has made it in this step: TorchScript, an extension."""
        # The question would make a view's node anew, and may fail; what made it is what made its base.
        base = tensor._base if tensor._is_view() and tensor._base is not None else tensor
        node: Any = base.grad_fn
        return node is not None and hasattr(node, "_sequence_nr") and node._sequence_nr() >= self._first_sequence

    def _bytes(self, tensor: torch.Tensor) -> int:
        """What a tensor takes on the device that the budget is about."""
        return bytes_of(tensor) if tensor.device == self._device else 0

    def _add(self, size: int, kind: Any, birth: int, ref: StorageWeakRef | None, name: str = "") -> int:
        s = len(self._storages)
        self._storages.append({"bytes": int(size), "kind": kind, "birth": birth, "name": name})
        if birth < 0:
            self._storages[s]["death"] = 0
        self._refs.append(ref)
        if ref is not None:
            self._index[ref.cdata] = s
            self._living += [s] * (birth >= 0)
        return s

    def _poll(self) -> None:
        """Which storages Python has let go of since the last operation."""
        living = []
        for s in self._living:
            ref = self._refs[s]
            if ref is not None and ref.expired():
                self._storages[s]["death"] = max(len(self.ops), self._storages[s]["birth"] + 1)
            else:
                living.append(s)
        self._living = living

    # -- what autograd saves ----------------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> int:
        with torch._C.DisableTorchFunction():  # or what is asked here would pass by as the model's
            saved = Saved(tensor, self._bytes(tensor))
            self._saved.append(saved)
            if not self._busy:
                self._flush(None)
        return 0

    def _unpack(self, _: int) -> torch.Tensor:
        raise UnsupportedModelError(
            f"the model differentiates inside its own forward (torch.autograd.grad or backward) in {self.where()}; "
            "planning records a forward without keeping what that needs. Move the inner gradient out of forward, or "
            "plan a part of the model."
        )

    def where(self, error: BaseException | None = None) -> str:
        """The module whose forward runs now, or in which an error was raised, and the line."""
        path, place = self._path[-1] if self._path else "", "" if error else calling_line()
        trace = error.__traceback__ if error else None
        while trace is not None:
            path = self._names.get(id(trace.tb_frame.f_locals.get("self")), path)
            place = users_line(trace.tb_frame, trace.tb_lineno) or place
            trace = trace.tb_next
        return (f"module '{path}'" if path else "the model itself") + (f", {place}" if place else "")

    def _flush(self, index: int | None, fixed: bool = False) -> tuple[int, ...]:
        """Turn what was saved during operation `index` into slots; None: outside any operation, or by a mere read."""
        hides: list[int] = []
        op = index if index is not None else max(0, len(self.ops) - 1)
        for position, saved in enumerate(self._saved):
            s = self._index.get(saved.key) if saved.key is not None else None
            if s is None:
                s = self._add(saved.bytes, "hidden", op, saved.ref)
                if index is not None:
                    hides.append(s)
            storage = self._storages[s]
            producer = storage["birth"] if storage["kind"] == "value" else -1
            stays = index is None or not saved.plain or not self._inside
            stays = stays or (storage["kind"] == "hidden" and (fixed or s not in hides))
            self.slots.append(Slot(op, position if index is not None else -1, s, producer, -1, stays))
            self._slot_versions.append(self._writes.get(s, 0))
        self._saved.clear()
        return tuple(hides)
