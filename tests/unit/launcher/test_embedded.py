"""The option parser of the embedded engine (its serving is tested on the real thing)."""

from __future__ import annotations

import pytest
from warmslot.launcher import embedded
from warmslot.launcher.engine import parse_help

KINDS = "one of none, ngram-simple, ngram-map-k, ngram-map-k4v, ngram-mod, ngram-cache"


def parsed(*arguments: str) -> dict[str, object]:
    return {option.names[0]: value for option, value in embedded.parse(arguments)}


def test_options_are_read_as_llama_server_reads_them() -> None:
    assert parsed("-np", "4", "--no-kv-unified", "--ctx_size", "8192", "-t", "-1", "-sps", "0.5") == {
        "-np": 4,
        "-kvu": False,
        "-c": 8192,
        "-t": -1,
        "-sps": 0.5,
    }
    assert parsed("-ngl", "all") == {"-ngl": -2}
    assert parsed("-ngl", "auto") == {"-ngl": -1}
    assert parsed("-ngl", "0") == {"-ngl": 0}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--frob"], "the embedded engine has no option --frob (--help lists those that it has)"),
        (["stray"], "the embedded engine has no option stray (--help lists those that it has)"),
        (["-np"], "option -np needs a value N"),
        (["-np", "many"], "option -np: found 'many', allowed is a whole number"),
        (["-sps", "x"], "option -sps: found 'x', allowed is a number"),
        (["-fa", "maybe"], "option -fa: found 'maybe', allowed is one of on, off, auto"),
        (
            ["--slot-save-path", "/nonexistent"],
            "option --slot-save-path: found '/nonexistent', allowed is an existing folder",
        ),
        (["--spec-type", "draft-mtp"], f"option --spec-type: found 'draft-mtp', allowed is {KINDS}"),
        (["-ngl", "some"], "option -ngl: found 'some', allowed is a whole number, auto or all"),
    ],
)
def test_a_wrong_option_is_named_with_what_is_allowed(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert embedded.main(arguments) == 1
    assert capsys.readouterr().err == f"error: {said}\n"


def test_the_help_lists_every_option_in_llama_servers_layout(capsys: pytest.CaptureFixture[str]) -> None:
    assert embedded.main(["--help"]) == 0
    options = parse_help(capsys.readouterr().out)
    assert options == {
        name: frozenset({*option.names, *option.off})
        for option in embedded.OPTIONS
        for name in (*option.names, *option.off)
    }
