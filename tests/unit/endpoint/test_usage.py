"""The two counts of a steered answer: replaced where they stand, and nothing else."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from warmslot.router.usage import Correction, corrected

USAGE = '"usage": {"cache_read_input_tokens":99,"input_tokens":1, "output_tokens":7}'
LURE = '{"usage": {"cache_read_input_tokens":99,"input_tokens":1, "output_tokens":7}}'
TEXT = json.dumps(LURE)
MESSAGE = f'{{"type":"message","content":[{{"text":{TEXT}}},{{"input":{LURE}}}],{USAGE},"n":1e400}}'.encode()
START = (
    f'event: message_start\ndata: {{"type":"message_start","message":{{"content":[],{USAGE}}}}}\n\n'.encode()
)
DELTA = f'event: content_block_delta\ndata: {{"delta":{{"input":{LURE}}}}}\n\n'.encode()


def test_only_the_messages_own_counts_change() -> None:
    message = MESSAGE.replace(b"1e400", b"1.0")
    wanted = b'"cache_read_input_tokens":30,"input_tokens":70, "output_tokens":7},"n":1.0}'
    assert corrected(message, 30, 100) == message[: message.rindex(b'"cache_read')] + wanted


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b"no json",
        b'{"usage":3}',
        b'{"type":"message_start"}',
        b'{"usage":{"input_tokens":1}}',
        b'{"usage":{"input_tokens":1,"cache_read_input_tokens":50}}',
        b'{"usage":{"input_tokens":"1","cache_read_input_tokens":99}}',
        b'{"usage":{"input_tokens":1,"cache_read_input_tokens":99,"more":{}}}',
    ],
)
def test_what_is_not_understood_or_true_already_stays_as_it_is(data: bytes) -> None:
    assert corrected(data, 30, 100) == data


@given(st.lists(st.integers(1, len(START + DELTA) - 1), max_size=5), st.sampled_from([b"", b": ping\n\n"]))
def test_a_stream_cut_anywhere(cuts: list[int], before: bytes) -> None:
    data = before + START + DELTA
    places = [0, *sorted(cuts), len(data)]
    correction = Correction(30, 100)
    pieces = [correction.feed(data[a:b]) for a, b in itertools.pairwise(places)]
    changed = START.replace(b":99", b":30").replace(b'input_tokens":1', b'input_tokens":70')
    assert b"".join(pieces) + correction.rest() == before + changed + DELTA


@pytest.mark.parametrize("data", [b"data: {", b"x" * 70_000, b"data: {}\r\n\r\n"])
def test_a_stream_that_is_none_passes_whole(data: bytes) -> None:
    correction = Correction(30, 100)
    assert correction.feed(data) + correction.rest() == data
