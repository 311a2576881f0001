"""Log lines as recorded from running engines (the prompts' texts never are in them)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from warmslot.launcher.logs import (
    Cancelled,
    DecodeTiming,
    KvFull,
    Launched,
    Level,
    Listening,
    Loading,
    LogEvent,
    LogLine,
    PromptProgress,
    PromptTiming,
    Purged,
    Released,
    Selected,
    Selection,
    Stage,
    parse,
)

RECORDED: list[tuple[str, str, LogEvent | None]] = [
    ("I", "srv  llama_server: initializing ...", Loading(Stage.STARTED)),
    ("I", "srv          init: initializing ...", Loading(Stage.STARTED)),
    ("I", "srv    load_model: loading model '../smol.gguf'", Loading(Stage.READING)),
    ("I", "cmn          init: llama threadpool init, n_threads = 2", None),
    (
        "I",
        "srv    load_model: initializing, n_slots = 2, n_ctx_slot = 1024, kv_unified = 'false'",
        Loading(Stage.ALLOCATING, 2, 1024),
    ),
    ("I", "srv  llama_server: model loaded", Loading(Stage.LOADED)),
    ("I", "srv          init: model loaded", Loading(Stage.LOADED)),
    ("I", "srv  llama_server: listening on http://127.0.0.1:36823", Listening("http://127.0.0.1:36823")),
    ("I", "slot get_availabl: id  0 | task -1 | selected slot by id (0)", Selected(0, -1, Selection.ID)),
    (
        "I",
        "slot get_availabl: id  1 | task -1 | selected slot by LRU, t_last = -1",
        Selected(1, -1, Selection.LRU),
    ),
    (
        "I",
        (
            "slot get_availabl: id 10 | task -1 | selected slot by LCP similarity, "
            "f_sim_best = 0.950 (> 0.100 thold), f_keep = 0.981"
        ),
        Selected(10, -1, Selection.LCP, 0.950, 0.981),
    ),
    ("I", "slot launch_slot_: id  0 | task 5 | processing task, is_child = 0", Launched(0, 5)),
    (
        "I",
        (
            "slot print_timing: id  0 | task 5 | prompt eval time =      47.45 ms /    11 tokens "
            "(    4.31 ms per token,   231.85 tokens per second)"
        ),
        PromptTiming(0, 5, 11, pytest.approx(0.04745)),  # type: ignore[arg-type]
    ),
    (
        "I",
        (
            "slot print_timing: id  0 | task 5 |        eval time =      24.27 ms /     4 tokens "
            "(    8.09 ms per token,   123.62 tokens per second)"
        ),
        DecodeTiming(0, 5, 4, pytest.approx(0.02427)),  # type: ignore[arg-type]
    ),
    ("I", "slot print_timing: id  0 | task 5 |       total time =      71.71 ms /    15 tokens", None),
    ("I", "slot print_timing: id  0 | task 5 |    graphs reused =          5", None),
    (
        "I",
        "slot      release: id  0 | task 5 | stop processing: n_tokens = 214, truncated = 0",
        Released(0, 5, 214, truncated=False),
    ),
    (
        "I",
        "slot      release: id  1 | task 52 | stop processing: n_tokens = 512, truncated = 1",
        Released(1, 52, 512, truncated=True),
    ),
    (
        "I",
        (
            "slot print_timing: id  0 | task 0 | prompt processing, n_tokens =   2048, progress = 0.34, "
            "t =  10.09 s / 202.91 tokens per second"
        ),
        PromptProgress(0, 0, 2048, 0.34),
    ),
    ("W", "srv          stop: cancel task, id_task = 20", Cancelled(20)),
    ("W", "srv  try_clear_id: purging slot 3 with 1024 tokens", Purged(3, 1024)),
    (
        "W",
        "srv  decode: failed to find free space in the KV cache, retrying with smaller batch size, off = 0",
        KvFull(),
    ),
    (
        "E",
        "srv    send_error: task id = 20, error: request (6001 tokens) exceeds the available context size",
        None,
    ),
    ("W", "srv  llama_server: security: no API key is set and CORS allows all origins", None),
]
JSON_LEVELS = {"D": "debug", "I": "info", "W": "warn", "E": "error"}


@pytest.mark.parametrize(("level", "message", "event"), RECORDED)
def test_text(level: str, message: str, event: LogEvent | None) -> None:
    assert parse(f"0.02.434.712 {level} {message}\n") == LogLine(
        Level(level),
        message,
        event,
        pytest.approx(2.434712),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(("level", "message", "event"), RECORDED)
def test_json(level: str, message: str, event: LogEvent | None) -> None:
    line = json.dumps({"type": "log", "time": 2434712, "level": JSON_LEVELS[level], "msg": f"{message}\n"})
    assert parse(line) == LogLine(
        Level(level),
        message,
        event,
        pytest.approx(2.434712),  # type: ignore[arg-type]
    )


def test_minutes_count() -> None:
    assert parse("12.03.004.005 I x").seconds == pytest.approx(723.004005)


@pytest.mark.parametrize(
    "line",
    [
        '{"type":"fit_memory_breakdown","data":{"unit":"MiB","rows":[{"kind":"host","name":"Host","self":152}]}}',
        '{"type":"log","msg":7}',
        "{not json",
        "[1, 2]",
        "error: invalid argument: --frob",
        "",
    ],
)
def test_other_lines_pass_as_they_are(line: str) -> None:
    assert parse(line) == LogLine(None, line)


@given(st.text())
def test_no_line_raises(text: str) -> None:
    parse(text)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_no_json_raises(value: object) -> None:
    parse(json.dumps(value))
    parse(json.dumps({"type": "log", "msg": value, "level": value, "time": value}))


def test_events_hold_no_text_of_prompts() -> None:
    words = "the user's own words"
    for _, message, _event in RECORDED:
        assert words not in repr(parse(f"0.00.000.001 I {message} {words}").event)
