"""The writer: rotation, bounds, crashes, drops, and that no text leaks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from warmslot.router.config import Journal as JournalConfig
from warmslot.router.journal import QUEUE_ENTRIES, Journal, JournalError, Reading, files_of, newest_of, read
from warmslot.router.records import BackendChange, Opening, Record
from warmslot.router.values import Prompt

from .conftest import Scribe

if TYPE_CHECKING:
    from pathlib import Path


def turn(number: int, turns: int = 1) -> bytes:
    return "".join(f"user {number} says {n} and a good deal more than that. " for n in range(turns)).encode()


def test_what_was_told_is_what_is_read(scribe: Scribe) -> None:
    first = scribe.serve(turn(1, 10), b"an answer", session="s")
    scribe.serve(turn(1, 20), b"another", session="s", cached=100)
    records = scribe.records()
    assert [record.id for record in records] == [first, "r2"]
    record = records[1]
    assert record.chain == Prompt.of(turn(1, 20)).chain
    assert record.after_length == len(turn(1, 20)) + len(b"another")
    assert (record.time, record.ended, record.first_token) == (1101.0, 1.0, 0.3)
    assert (record.cached_tokens, record.prompt_tokens) == (100, len(turn(1, 20)) // 4)
    assert record.session == "s"
    assert record.candidates[0].prefill_seconds == 0.5
    assert (scribe.journal.written, scribe.journal.dropped) == (2, 0)


def test_a_journal_begins_with_the_pools_and_tells_backends(scribe: Scribe) -> None:
    scribe.journal.backend_changed("b", up=True, slots=4, context=512, reason="")
    scribe.journal.close()
    opening, change = read(scribe.path)
    assert opening == Opening(1100.0, {"m": ["b"]})
    assert change == BackendChange(1100.0, "b", up=True, slots=4, context=512)


def test_no_text_is_written_unless_asked_for(tmp_path: Path) -> None:
    plain = Scribe(tmp_path / "plain.jsonl")
    plain.serve(b"the launch code is swordfish", b"swordfish it is")
    assert [record.text for record in plain.records()] == [None]
    assert b"swordfish" not in plain.path.read_bytes()
    open_book = Scribe(tmp_path / "text.jsonl", {"text": True})
    open_book.serve(b"the launch code is swordfish", b"swordfish it is")
    assert open_book.records()[0].text == {
        "messages": [{"role": "user", "content": "the launch code is swordfish"}],
        "reply": "swordfish it is",
    }


def test_files_rotate_stay_below_the_bound_and_each_stands_alone(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path / "journal.jsonl", {"file_size": 2**16, "files": 3})
    for number in range(600):
        scribe.serve(turn(number % 7, 12 + number // 7), session=f"s{number % 7}")
    records = scribe.records()
    files = files_of(scribe.path)
    assert [file.name for file in files] == ["journal.jsonl.2", "journal.jsonl.1", "journal.jsonl"]
    assert sum(file.stat().st_size for file in files) <= 3 * 2**16
    assert [record.id for record in records] == [f"r{n}" for n in range(601 - len(records), 601)]
    for file in files:
        reading = Reading()
        assert any(isinstance(entry, Record) for entry in read(file, reading))
        assert reading.skipped == 0


def test_what_is_up_is_told_in_each_file_and_read_once(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path / "journal.jsonl", {"file_size": 2**16, "files": 2})
    scribe.journal.backend_changed("gone", up=True, slots=2, context=256, reason="")
    scribe.journal.backend_changed("gone", up=False, slots=0, context=0, reason="stopped")
    scribe.journal.backend_changed("b", up=True, slots=4, context=512, reason="")
    for number in range(600):
        scribe.serve(turn(number % 7, 12 + number // 7), session=f"s{number % 7}")
    assert len(scribe.records()) < 600  # the file of the start is thrown away
    up = BackendChange(1100.0, "b", up=True, slots=4, context=512)
    for file in files_of(scribe.path):
        assert [one for one in read(file, files=[file]) if isinstance(one, BackendChange)] == [up]
    assert [entry for entry in read(scribe.path) if isinstance(entry, BackendChange)] == [up]
    scribe.journal.close()


def test_the_newest_files_are_those_that_hold_so_many_requests(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path / "journal.jsonl", {"file_size": 2**16, "files": 3})
    for number in range(600):
        scribe.serve(turn(number % 7, 12 + number // 7), session=f"s{number % 7}")
    scribe.journal.close()
    files = files_of(scribe.path)
    counts = [sum(isinstance(one, Record) for one in read(file, files=[file])) for file in files]
    assert newest_of(files, counts[2]) == files[2:]
    assert newest_of(files, counts[2] + 1) == files[1:]
    assert newest_of(files, 10_000) == files
    assert list(read(scribe.path, files=files[1:]))[-1] == list(read(scribe.path))[-1]


def test_only_its_owner_may_read_it(scribe: Scribe) -> None:
    scribe.journal.close()
    assert scribe.path.stat().st_mode & 0o777 == 0o600


def test_a_torn_last_line_is_dropped_and_writing_goes_on_after_it(scribe: Scribe) -> None:
    for number in range(3):
        scribe.serve(turn(number))
    assert len(scribe.records()) == 3
    os.truncate(scribe.path, scribe.path.stat().st_size - 20)
    reading = Reading()
    assert sum(isinstance(entry, Record) for entry in read(scribe.path, reading)) == 2
    assert reading.skipped == 1
    again = Scribe(scribe.path)
    again.serve(turn(9))
    assert [record.chain for record in again.records()][-1] == Prompt.of(turn(9)).chain
    reading = Reading()
    assert sum(isinstance(entry, Record) for entry in read(scribe.path, reading)) == 3
    assert reading.skipped == 1


def test_a_killed_process_loses_nothing_that_it_handed_over(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    code = """
import os, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from tests.unit.journal.conftest import Scribe
scribe = Scribe(Path(sys.argv[1]))
for number in range(50):
    scribe.serve(b"word %d " % number * 40)
while scribe.journal.written < 50:
    pass
os.kill(os.getpid(), 9)
"""
    top = str(__import__("pathlib").Path(__file__).parents[3])
    done = subprocess.run([sys.executable, "-c", code, str(path), top], check=False, timeout=60)
    assert done.returncode == -9
    assert sum(isinstance(entry, Record) for entry in read(path)) == 50


def test_a_second_router_is_refused(scribe: Scribe) -> None:
    with pytest.raises(JournalError, match="another router writes it"):
        Journal(JournalConfig(path=str(scribe.path))).open()
    scribe.journal.close()
    again = Journal(JournalConfig(path=str(scribe.path)))
    again.open()
    again.close()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="No such file"):
        Journal(JournalConfig(path=str(tmp_path / "none" / "journal.jsonl"))).open()


def test_reading_what_is_no_journal_says_so(tmp_path: Path) -> None:
    other = tmp_path / "trace.jsonl"
    other.write_text('{"timestamp": 1}\n')
    with pytest.raises(JournalError, match="no line of it is readable"):
        list(read(other))
    with pytest.raises(JournalError, match="no such file"):
        list(read(tmp_path / "nothing"))


def test_a_full_queue_drops_and_counts_and_never_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def stuck(self: Journal, item: object) -> None:
        del self, item
        inside.set()
        go_on.wait()
        raise RuntimeError("not this one")

    monkeypatch.setattr(Journal, "_record", stuck)
    scribe = Scribe(tmp_path / "journal.jsonl")
    scribe.serve(b"first")
    assert inside.wait(10)
    for _ in range(QUEUE_ENTRIES + 5):
        scribe.serve(b"more")
    assert scribe.journal.dropped == 5
    go_on.set()
    scribe.journal.close()


def test_a_full_disk_is_said_once_and_later_lines_do_not_build_on_lost_ones(
    scribe: Scribe, caplog: pytest.LogCaptureFixture
) -> None:
    class Full:
        """A file on a disk without room."""

        closed = False

        def write(self, data: object) -> int:
            del data
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            self.closed = True

        def fileno(self) -> int:
            raise OSError(9, "Bad file descriptor")

    scribe.serve(turn(1, 10))
    while scribe.journal.written < 1:
        pass
    writer = scribe.journal._writer
    real, writer._file = writer._file, Full()  # type: ignore[assignment]
    scribe.serve(turn(1, 11))
    while scribe.journal.dropped < 1:
        pass
    assert real is not None
    real.close()
    scribe.serve(turn(1, 12))
    records = scribe.records()
    assert [record.id for record in records] == ["r1", "r3"]
    assert records[1].chain == Prompt.of(turn(1, 12)).chain
    assert caplog.text.count("No space left on device") == 1
