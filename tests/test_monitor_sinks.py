"""Where a monitor's records go: whole lines whatever happens, and errors that say what to do."""

from __future__ import annotations

import builtins
import csv
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_planner import CkptPlannerError, StepRecord
from ckpt_planner.sinks import Sink, open_sinks

FIELDS = StepRecord.__struct_fields__
HEADER = ",".join(FIELDS) + "\n"


def record(step: int = 0, **values: Any) -> StepRecord:
    return StepRecord(step=step, calls=1, signature='(float32[2,3],){"a":\n1}', peak_bytes=12345, error=0.25, **values)


def sink(to: Any, start: int = 0) -> Sink:
    (made,) = open_sinks(to, FIELDS, start)
    return made


def write(path: Path, *steps: int) -> None:
    made = sink(path)
    for step in steps:
        made.write(record(step))
    made.close()


def lines(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_one_header_over_several_runs(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "run.csv"
    write(path, 0, 1)
    write(path, 2)
    assert path.read_text().count(HEADER) == 1
    assert [row["step"] for row in lines(path)] == ["0", "1", "2"]
    row = lines(path)[0]
    assert (row["peak_bytes"], row["error"], row["reserved_bytes"], row["planning"]) == ("12345", "0.25", "", "0")
    assert row["signature"] == '(float32[2,3],){"a": 1}'
    assert len(path.read_text().splitlines()) == 4


@pytest.mark.parametrize("cut", [3, len(HEADER), len(HEADER) + 4])
def test_a_line_that_a_crash_tore_is_dropped_on_resume(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "run.csv"
    write(path, 0)
    path.write_bytes(path.read_bytes()[:cut])
    write(path, 5)
    assert [row["step"] for row in lines(path)] == ["5"]
    assert path.read_text().startswith(HEADER)


def test_a_killed_process_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    code = (
        "import os\nfrom tests.test_monitor_sinks import record, sink\n"
        f"made = sink({str(path)!r})\nfor step in range(3): made.write(record(step))\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent)
    assert done.returncode == -9
    assert path.read_text().endswith("\n")
    assert [row["step"] for row in lines(path)] == ["0", "1", "2"]


def test_a_file_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text("a,b\n1,2\n" * 40)
    before = path.read_bytes()
    with pytest.raises(CkptPlannerError, match=r"data\.csv has other columns"):
        sink(str(path))
    assert path.read_bytes() == before


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "is-a-folder.csv").mkdir()
    with pytest.raises(CkptPlannerError, match=r"is-a-folder\.csv cannot be written"):
        sink(tmp_path / "is-a-folder.csv")


def test_a_full_disk_ends_the_log_and_not_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = sink(tmp_path / "run.csv")
    made._file.close()  # type: ignore[attr-defined]
    with open("/dev/full", "wb", buffering=0) as full:
        made._file = full  # type: ignore[attr-defined]
        made.write(record(0))
        made.write(record(1))
    made.close()
    assert caplog.text.count("nothing more is logged there") == 1
    assert "No space left" in caplog.text


@pytest.mark.parametrize("to", ["run.txt", "tensorboard:", 7, ["a.csv", object()]])
def test_what_is_no_place_is_refused(to: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CkptPlannerError, match=r"Accepted: the path of a \.csv file"):
        open_sinks(to, FIELDS)


def test_several_places_and_none(tmp_path: Path) -> None:
    found: list[StepRecord] = []
    for made in open_sinks([found.append, tmp_path / "a.csv", str(tmp_path / "b.csv")], FIELDS):
        made.write(record(3))
        made.close()
    assert [r.step for r in found] == [3]
    assert lines(tmp_path / "a.csv") == lines(tmp_path / "b.csv") != []
    assert open_sinks(None, FIELDS) == []


def test_what_a_function_raises_is_raised() -> None:
    def stop(record: StepRecord) -> None:
        raise StopIteration("enough")

    with pytest.raises(StopIteration, match="enough"):
        sink(stop).write(record())


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder))
    read.Reload()
    return {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_tensorboard_has_every_number(tmp_path: Path) -> None:
    made = sink(f"tensorboard:{tmp_path}")
    made.write(record(4))
    made.write(record(5, step_seconds=0.5))
    made.close()
    found = scalars(tmp_path)
    assert set(found) == {f"ckpt_planner/{n}" for n in ("calls", "planning", "peak_bytes", "error", "step_seconds")}
    assert found["ckpt_planner/peak_bytes"] == [(4, 12345.0), (5, 12345.0)]
    assert found["ckpt_planner/step_seconds"] == [(5, 0.5)]


def test_tensorboard_of_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    for start, steps in ((0, (0, 1, 2, 3)), (2, (2, 3))):
        made = sink(f"tensorboard:{tmp_path}", start)
        for step in steps:
            made.write(record(step))
        made.close()
    assert [step for step, _ in scalars(tmp_path)["ckpt_planner/peak_bytes"]] == [0, 1, 2, 3]


def test_a_writer_of_the_users_own_stays_open() -> None:
    calls: list[Any] = []
    writer = SimpleNamespace(
        add_scalar=lambda *a: calls.append(a), flush=lambda: calls.append("flush"), close=lambda: calls.append("close")
    )
    made = sink(writer)
    made.write(record(1))
    made.close()
    assert ("ckpt_planner/peak_bytes", 12345, 1) in calls
    assert calls[-1] == "flush"


def test_without_tensorboard_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith(("tensorboard", "torch.utils.tensorboard")):
            raise ModuleNotFoundError("No module named 'tensorboard'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(CkptPlannerError, match=r"ckpt-planner\[tensorboard\]"):
        sink(f"tensorboard:{tmp_path}")


def test_the_package_is_imported_without_tensorboard() -> None:
    code = (
        "import sys, ckpt_planner; assert 'torch' not in sys.modules; ckpt_planner.Monitor; "
        "assert 'torch' in sys.modules; assert not any(m.startswith('tensorboard') for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
