"""Output that nobody reads holds nobody up."""

from __future__ import annotations

import io
import os
import threading
from typing import TYPE_CHECKING

import pytest
from warmslot.launcher.display import Display, plain_console
from warmslot.launcher.output import Output, standard_output

if TYPE_CHECKING:
    from collections.abc import Iterator

LINE = "x" * 99


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Its reading and its writing end; both are closed at the end, so that no writer waits any more."""
    ends = os.pipe()
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:
            continue


def read_all(end: int) -> list[str]:
    with os.fdopen(os.dup(end), encoding="utf-8") as file:
        return file.read().splitlines()


def closed_and_read(output: Output, pipe: tuple[int, int]) -> list[str]:
    """What comes out once somebody reads again."""
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(read_all(pipe[0])))
    reader.start()
    output.close()
    os.close(pipe[1])
    reader.join()
    return lines


def test_what_is_written_comes_out_in_order(pipe: tuple[int, int]) -> None:
    output = Output(pipe[1])
    for number in range(1000):
        output.write(f"{number}\n")
    assert closed_and_read(output, pipe) == [str(number) for number in range(1000)]


def test_a_pipe_that_nobody_reads_holds_nobody_up_and_loses_the_oldest_lines(pipe: tuple[int, int]) -> None:
    output = Output(pipe[1], limit=50)
    for number in range(10_000):  # far more than a pipe holds
        output.write(f"{number} {LINE}\n")
    lines = closed_and_read(output, pipe)
    gaps = [line for line in lines if line.startswith("(")]
    kept = [int(line.split()[0]) for line in lines if not line.startswith("(")]
    assert gaps
    assert kept == sorted(set(kept))
    assert kept[-50:] == [*range(10_000 - 50, 10_000)]
    assert len(kept) + sum(int(gap.split()[0].strip("(").replace(",", "")) for gap in gaps) == 10_000


def test_the_display_and_its_lines_of_a_log_wait_for_no_reader(pipe: tuple[int, int]) -> None:
    output = Output(pipe[1], limit=10)
    display = Display(plain_console(output))
    for number in range(5_000):
        display.say(f"{number} {LINE}")
    assert closed_and_read(output, pipe)[-1] == f"4999 {LINE}"


def test_a_reader_that_has_gone_is_no_error(pipe: tuple[int, int]) -> None:
    output = Output(pipe[1])
    os.close(pipe[0])
    output.write("a\n")
    output._thread.join()
    assert output.write("b\n") == 2
    output.close()
    output.flush()  # as logging does at the very end


def test_a_descriptor_that_does_not_block_gets_everything(pipe: tuple[int, int]) -> None:
    os.set_blocking(pipe[1], False)
    output = Output(pipe[1])
    for number in range(5_000):
        output.write(f"{number} {LINE}\n")
    assert closed_and_read(output, pipe) == [f"{number} {LINE}" for number in range(5_000)]


def test_what_the_encoding_lacks_is_replaced(pipe: tuple[int, int]) -> None:
    output = Output(pipe[1], encoding="ascii")
    output.write("loading …\n")
    assert closed_and_read(output, pipe) == ["loading ?"]


def test_the_end_waits_only_a_moment_for_a_reader(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warmslot.launcher.output._LAST_WAIT", 0.01)
    output = Output(pipe[1])
    output.write("x" * 1_000_000)
    output.close()
    assert output.closed
    os.close(pipe[0])
    output._thread.join()


def test_a_stream_without_a_descriptor_is_taken_as_it_is(pipe: tuple[int, int]) -> None:
    stream = io.StringIO()
    with standard_output(stream) as output:
        assert output is stream
    assert not stream.closed
    with os.fdopen(os.dup(pipe[1]), "w") as real:
        with standard_output(real) as output:
            output.write("a\n")
        assert not real.closed
    assert os.read(pipe[0], 10) == b"a\n"
