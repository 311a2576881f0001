"""``warmslot check``: whether answers that are generated at once equal the same answers generated in turn.

Each prompt is answered greedily, alone and together with the others, each in a slot of its own. Then: equal
or not, and where not the first token that differs with its probabilities, which tell a near-tie (the order of
additions in a shared step tips the scales) from a fault. The engine's own counters say whether steps were
really shared, over this window and not since its start.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import httpx
from rich.table import Table

from .bare import BareEngineError, bare_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from rich.console import Console

    from .engine import Engine

NEAR_TIE: Final = 0.2
"""Two tokens whose log probabilities differ by less are a near-tie: shared steps add in another order."""

DRAFTS: Final = ("--spec-type", "ngram-simple")
"""Speculation that needs no second model."""

_TIMEOUT: Final = 600.0
_ALTERNATIVES: Final = 20
_SHARED: Final = 0.5
"""Share of what could be shared from which on steps count as shared."""


class CheckError(Exception):
    """It cannot be checked; the message is one line."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One greedy answer."""

    tokens: tuple[int, ...]
    decode_seconds: float
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two answers part. Probabilities are of the engine that answers alone; ``None``: not told."""

    answer: int
    position: int
    alone: int
    together: int
    alone_probability: float | None
    together_probability: float | None

    @property
    def near_tie(self) -> bool | None:
        """Whether rounding explains it; ``None`` where the engine told no probabilities."""
        if self.alone_probability is None or self.together_probability is None:
            return None
        if not self.alone_probability or not self.together_probability:
            return False
        return abs(math.log(self.alone_probability / self.together_probability)) < NEAR_TIE


@dataclass(frozen=True, slots=True)
class Finding:
    """One setting, compared with the same prompts answered in turn without drafts."""

    setting: str
    answers: int
    tokens: int
    differences: list[Difference]
    busy_slots: float | None
    """Mean of slots that took part in a decoding step, over this window."""
    seconds: float
    """From the first request to the last answer."""
    step_seconds: float
    """Decode time of one token of one answer."""
    drafted: int = 0
    accepted: int = 0

    @property
    def faults(self) -> int:
        """Differences that rounding does not explain."""
        return sum(one.near_tie is not True for one in self.differences)


@dataclass(frozen=True, slots=True)
class Result:
    """All settings; the first is the reference."""

    at_once: int
    findings: list[Finding] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """No fault, and the steps of what ran at once were shared."""
        return not any(one.faults for one in self.findings) and self.shared is not False

    @property
    def shared(self) -> bool | None:
        """Whether what ran at once shared its steps; ``None`` where the engine does not count them."""
        means = [f.busy_slots for f in self.findings if f.setting.startswith("at once") and f.busy_slots]
        if not means or self.at_once < 2:  # noqa: PLR2004
            return None
        return min(means) - 1 >= _SHARED * (self.at_once - 1)


def prompts(count: int) -> list[str]:
    """Prompts of our own that differ from their first word on, with repetition that can be drafted."""
    places = ("north", "south", "east", "west", "upper", "lower", "inner", "outer")
    out = []
    for number in range(count):
        place = f"{places[number % len(places)]}-{number}"
        rows = "\n".join(
            f"{row}. station {place}: {(row * 37 + number * 11) % 90 + 10} units, "
            f"{'open' if (row + number) % 3 else 'closed'}"
            for row in range(1, 13)
        )
        out.append(
            f"List {number} of {place} stations.\n{rows}\n\nThe same list of {place} stations again:\n1."
        )
    return out


# -- one engine --------------------------------------------------------------------------------------------


class Asker:
    """Asks one llama-server that nobody else uses."""

    def __init__(self, url: str, tokens: int) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=_TIMEOUT, trust_env=False)
        self._tokens = tokens

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = await self._http.post(path, json=body, headers={"Connection": "close"})
        except httpx.HTTPError as error:
            raise CheckError(
                f"the engine gave no answer to {path} ({error or type(error).__name__})"
            ) from error
        if not answer.is_success:
            raise CheckError(f"the engine answered {path} with {answer.status_code}: {answer.text[:200]}")
        found: dict[str, Any] = answer.json()
        return found

    async def answer(self, prompt: str, slot: int) -> Answer:
        """One greedy answer of a fixed length, computed from scratch."""
        body = await self._post(
            "/completion",
            {
                "prompt": prompt,
                "n_predict": self._tokens,
                "temperature": 0,
                "ignore_eos": True,
                "return_tokens": True,
                "cache_prompt": False,
                "id_slot": slot,
            },
        )
        tokens, timings = body.get("tokens"), body.get("timings", {})
        if not isinstance(tokens, list) or not tokens:
            raise CheckError("the engine's /completion gives no tokens (return_tokens)")
        return Answer(
            tuple(tokens),
            float(timings.get("predicted_ms", 0.0)) / 1000,
            int(timings.get("draft_n", 0)),
            int(timings.get("draft_n_accepted", 0)),
        )

    async def probabilities(
        self, prompt: str, before: Sequence[int], of: Sequence[int]
    ) -> list[float | None]:
        """How likely each of ``of`` is after the prompt and the tokens ``before``."""
        start = (await self._post("/tokenize", {"content": prompt, "add_special": True}))["tokens"]
        body = await self._post(
            "/completion",
            {
                "prompt": [*start, *before],
                "n_predict": 1,
                "temperature": 0,
                "n_probs": _ALTERNATIVES,
                "cache_prompt": False,
                "id_slot": 0,
            },
        )
        told = body.get("completion_probabilities") or [{}]
        found = {
            one["id"]: math.exp(one["logprob"]) if "logprob" in one else one.get("prob")
            for one in told[0].get("top_logprobs", told[0].get("top_probs", []))
        }
        return [found.get(token, 0.0 if found else None) for token in of]

    async def steps(self) -> tuple[float, float] | None:
        """Decoding steps so far, and slots that took part in them; ``None`` where that is not counted."""
        try:
            text = (await self._http.get("/metrics")).text
        except httpx.HTTPError as error:
            raise CheckError(f"the engine gave no answer to /metrics ({error})") from error
        found = dict(
            re.findall(r"^llamacpp:(n_decode_total|n_busy_slots_per_decode) (\S+)$", text, re.MULTILINE)
        )
        if len(found) < 2:  # noqa: PLR2004
            return None
        steps = float(found["n_decode_total"])
        return steps, steps * float(found["n_busy_slots_per_decode"])


async def measure(
    asker: Asker, setting: str, texts: Sequence[str], reference: Sequence[Answer] | None, *, together: bool
) -> tuple[Finding, list[Answer]]:
    """Answer all prompts under one setting and compare with the reference (itself if there is none)."""
    before = await asker.steps()
    began = time.monotonic()
    if together:
        answers = list(await asyncio.gather(*(asker.answer(text, slot) for slot, text in enumerate(texts))))
    else:
        answers = [await asker.answer(text, slot) for slot, text in enumerate(texts)]
    seconds = time.monotonic() - began
    after = await asker.steps()
    busy = None
    if before is not None and after is not None and after[0] > before[0]:
        busy = (after[1] - before[1]) / (after[0] - before[0])
    differences = []
    for number, (mine, theirs) in enumerate(zip(answers, reference or answers, strict=True)):
        at = first_difference(theirs.tokens, mine.tokens)
        if at is None:
            continue
        pair = (theirs.tokens[at], mine.tokens[at])
        likely = await asker.probabilities(texts[number], theirs.tokens[:at], pair)
        differences.append(Difference(number, at, *pair, *likely))
    tokens = sum(len(one.tokens) for one in answers)
    finding = Finding(
        setting=setting,
        answers=len(answers),
        tokens=tokens,
        differences=differences,
        busy_slots=busy,
        seconds=seconds,
        step_seconds=sum(one.decode_seconds for one in answers) / max(1, tokens),
        drafted=sum(one.drafted for one in answers),
        accepted=sum(one.accepted for one in answers),
    )
    return finding, answers


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first position at which two answers differ, as far as both go."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)


async def check_url(url: str, at_once: int, tokens: int, say: Callable[[str], None]) -> Result:
    """Check an engine that runs already, with what it was started with. Nobody else may use it meanwhile."""
    result = Result(at_once)
    async with _asker(url, tokens) as asker:
        await _pair(asker, result, "", None, say)
    return result


async def check_engine(
    engine: Engine,
    model: Path,
    flags: Sequence[str],
    *,
    at_once: int,
    tokens: int,
    drafts: bool,
    say: Callable[[str], None],
) -> Result:
    """Start the engine with and without drafts, and check each. Raises :class:`CheckError`."""
    result = Result(at_once)
    profile = (
        *("-np", str(at_once), "-c", str(at_once * (1024 + 2 * tokens)), "--no-kv-unified", "--metrics"),
        *("--no-cache-idle-slots", "--cache-ram", "0", *flags),
    )
    reference: list[Answer] | None = None
    try:
        say("starting the engine")
        async with bare_engine(engine, model, *profile) as url, _asker(url, tokens) as asker:
            reference = await _pair(asker, result, "", reference, say)
        if drafts:
            say("starting the engine, drafts")
            async with bare_engine(engine, model, *profile, *DRAFTS) as url, _asker(url, tokens) as asker:
                await _pair(asker, result, ", drafts", reference, say)
    except BareEngineError as error:
        if reference is None or DRAFTS[0] not in str(error):
            raise CheckError(str(error)) from error
        say(f"this engine does not draft: {error}")
    return result


@asynccontextmanager
async def _asker(url: str, tokens: int) -> AsyncIterator[Asker]:
    asker = Asker(url, tokens)
    try:
        yield asker
    finally:
        await asker.aclose()


async def _pair(
    asker: Asker, result: Result, name: str, reference: list[Answer] | None, say: Callable[[str], None]
) -> list[Answer]:
    texts = prompts(result.at_once)
    for how, together in (("in turn", False), ("at once", True)):
        say(f"{result.at_once} answers {how}{name}")
        finding, answers = await measure(asker, how + name, texts, reference, together=together)
        result.findings.append(finding)
        reference = answers if reference is None else reference
    if reference is None:
        raise AssertionError("nothing was measured")
    return reference


# -- in words ----------------------------------------------------------------------------------------------


def show(console: Console, result: Result) -> None:
    """Print what was found."""
    table = Table(title=f"{result.at_once} greedy answers", title_justify="left", header_style="bold")
    table.add_column("setting")
    for name in ("equal", "near-ties", "faults", "slots per step", "ms per token", "wall s", "drafts kept"):
        table.add_column(name, justify="right")
    for one in result.findings:
        ties = len(one.differences) - one.faults
        table.add_row(
            one.setting,
            f"{one.answers - len(one.differences)}/{one.answers}",
            *(str(ties), str(one.faults)),
            "–" if one.busy_slots is None else f"{one.busy_slots:.2f}",
            f"{one.step_seconds * 1000:.1f}",
            f"{one.seconds:.1f}",
            f"{one.accepted}/{one.drafted}" if one.drafted else "–",
        )
    console.print(table)
    for one in result.findings:
        for difference in one.differences:
            console.print(_in_words(one.setting, difference), soft_wrap=True, highlight=False)
    for line in conclusions(result):
        console.print(line, soft_wrap=True, highlight=False)


def _in_words(setting: str, it: Difference) -> str:
    def likely(value: float | None) -> str:
        return "not told" if value is None else f"{value:.4f}"

    kind = {True: "a near-tie", False: "a fault", None: "of unknown weight"}[it.near_tie]
    return (
        f"{setting}, answer {it.answer}: differs from token {it.position} on: {it.together} (probability "
        f"{likely(it.together_probability)}) instead of {it.alone} ({likely(it.alone_probability)}): {kind}"
    )


def conclusions(result: Result) -> list[str]:
    """What the figures say."""
    lines = []
    faults = sum(one.faults for one in result.findings)
    ties = sum(len(one.differences) for one in result.findings) - faults
    if faults:
        lines.append(
            f"{faults} answer(s) differ by more than rounding: do not run this engine at this setting."
        )
    elif ties:
        lines.append(f"{ties} answer(s) differ in near-ties only: rounding, not a fault.")
    else:
        lines.append("All answers are equal, token for token.")
    if result.shared is None:
        lines.append("The engine does not count its steps, so it is not known whether they were shared.")
    elif not result.shared:
        lines.append("The steps were NOT shared: the requests ran one after the other.")
    for alone, together in zip(result.findings[::2], result.findings[1::2], strict=True):
        if alone.step_seconds and together.step_seconds:
            ratio = together.step_seconds / alone.step_seconds
            lines.append(
                f"A token takes {ratio:.2f} times as long {together.setting} as {alone.setting}: "
                f"{result.at_once} at once give {result.at_once / ratio:.2f} times the tokens per second "
                f"({alone.seconds:.1f} s {alone.setting}, {together.seconds:.1f} s {together.setting})."
            )
    return lines


def as_json(result: Result) -> dict[str, Any]:
    """Everything as plain values."""
    return {
        "at_once": result.at_once,
        "good": result.good,
        "steps_shared": result.shared,
        "findings": [
            {
                "setting": one.setting,
                "answers": one.answers,
                "tokens": one.tokens,
                "busy_slots_per_step": one.busy_slots,
                "wall_seconds": one.seconds,
                "seconds_per_token": one.step_seconds,
                "drafted": one.drafted,
                "accepted": one.accepted,
                "faults": one.faults,
                "differences": [
                    {
                        "answer": difference.answer,
                        "position": difference.position,
                        "alone": difference.alone,
                        "together": difference.together,
                        "alone_probability": difference.alone_probability,
                        "together_probability": difference.together_probability,
                        "near_tie": difference.near_tie,
                    }
                    for difference in one.differences
                ],
            }
            for one in result.findings
        ],
    }
