"""Where a monitor's records go: a CSV file, TensorBoard, a function. Free of torch until TensorBoard is asked for."""

from __future__ import annotations

import csv
import io
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from .errors import CkptPlannerError

log = logging.getLogger("ckpt_planner")

ACCEPTED = (
    'the path of a .csv file, "tensorboard:FOLDER", a SummaryWriter, a function of a StepRecord, or a list of these'
)
SCHEME = "tensorboard:"


class Sink(ABC):
    """Takes records. A disk that fails ends the log, with a warning, and not the training."""

    _failed = False

    def write(self, record: msgspec.Struct) -> None:
        """Take one record."""
        if self._failed:
            return
        try:
            self._write(record)
        except OSError as error:
            self._failed = True
            log.warning("%s: nothing more is logged there, since writing failed: %s", self.name, error)

    def close(self) -> None:
        """Close what was opened here."""
        try:
            self._close()
        except OSError as error:
            log.warning("%s: closing failed: %s", self.name, error)

    name = "the log"

    @abstractmethod
    def _write(self, record: msgspec.Struct) -> None: ...

    def _close(self) -> None:  # noqa: B027 (not all have something to close)
        ...


class CsvSink(Sink):
    """Appends lines to a CSV file, each in one write, so that a crash leaves whole lines.

    Raises:
        CkptPlannerError: the file is there with other columns, or cannot be opened.
    """

    def __init__(self, path: Path, fields: Sequence[str]) -> None:
        self.name = str(path)
        header = _line(fields)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise CkptPlannerError(f"{path} cannot be written: {error.strerror}. Name another file.") from error
        try:
            self._resume(path, header)
        except BaseException:
            self._file.close()
            raise

    def _resume(self, path: Path, header: bytes) -> None:
        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(0)
        first = self._file.read(len(header))
        if header.startswith(first) and len(first) < len(header):  # new, or torn within its first line
            self._file.truncate(0)
            self._file.write(header)
        elif first != header:
            raise CkptPlannerError(
                f"{path} has other columns than a monitor writes, so it is another's file: name a new one"
            )
        else:  # a line that a crash tore would spoil the next one
            self._file.seek(max(0, size - (1 << 16)))
            tail = self._file.read()
            self._file.truncate(size - (len(tail) - (tail.rfind(b"\n") + 1)))

    def _write(self, record: msgspec.Struct) -> None:
        self._file.write(_line(map(_cell, msgspec.structs.astuple(record))))

    def _close(self) -> None:
        self._file.close()


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else int(value) if isinstance(value, bool) else value


def _line(values: Any) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow([str(v).replace("\n", " ") for v in values])
    return text.getvalue().encode()


class TensorBoardSink(Sink):
    """Writes every number of a record as a scalar "ckpt_planner/NAME".

    Args:
        writer: a `SummaryWriter`, or anything with its `add_scalar`.
        own: close it, too.
    """

    def __init__(self, writer: Any, own: bool) -> None:
        self._writer, self._own = writer, own
        self.name = "TensorBoard"

    def _write(self, record: msgspec.Struct) -> None:
        values = msgspec.structs.asdict(record)
        step = values.pop("step")
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(f"ckpt_planner/{name}", value, step)

    def _close(self) -> None:
        if self._own:
            self._writer.close()
        else:
            self._writer.flush()


class CallSink(Sink):
    """Hands records to a function; what it raises is the user's, and is raised."""

    def __init__(self, function: Callable[[Any], object]) -> None:
        self._function = function

    def write(self, record: msgspec.Struct) -> None:
        """Call the function."""
        self._function(record)

    _write = write


def open_sinks(to: Any, fields: Sequence[str], start: int = 0) -> list[Sink]:
    """The sinks that `to` of a `Monitor` names.

    Args:
        to: as `Monitor` takes it; None for none.
        fields: names of a record's values.
        start: number of the first step; TensorBoard hides what an earlier run wrote from there on.

    Raises:
        CkptPlannerError: `to` is none of what is accepted, or cannot be opened. What was opened is closed again.
    """
    sinks: list[Sink] = []
    try:
        for one in to if isinstance(to, (list, tuple)) else [] if to is None else [to]:
            sinks.append(_open(one, fields, start))
    except BaseException:
        for sink in sinks:
            sink.close()
        raise
    return sinks


def _open(to: Any, fields: Sequence[str], start: int) -> Sink:
    if isinstance(to, str) and to.startswith(SCHEME) and len(to) > len(SCHEME):
        return TensorBoardSink(_writer(to.removeprefix(SCHEME), start), own=True)
    if isinstance(to, (str, os.PathLike)) and os.fspath(to).endswith(".csv"):
        return CsvSink(Path(to), fields)
    if hasattr(to, "add_scalar"):
        return TensorBoardSink(to, own=False)
    if callable(to):
        return CallSink(to)
    raise CkptPlannerError(f"a monitor cannot log to {to!r}. Accepted: {ACCEPTED}.")


def _writer(folder: str, start: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise CkptPlannerError(
            f"logging to TensorBoard needs the package tensorboard ({error}): "
            "pip install 'ckpt-planner[tensorboard]', or log to a .csv file"
        ) from error
    return SummaryWriter(folder, purge_step=start or None)
