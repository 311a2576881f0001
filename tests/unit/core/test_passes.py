"""Slots whose numbers follow one another share a pass of a decoding step, and placement knows."""

from __future__ import annotations

import pytest
from warmslot.router.core import CoreSettings, RouterCore
from warmslot.router.rates import Rates
from warmslot.router.values import Lease, Outcome, Prompt, Request, Status

PASS = 0.02
"""Seconds that a further pass costs; half of what a step takes that was never measured."""


@pytest.fixture(params=[0.0, PASS])
def per_pass(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """What a core takes a further pass to cost, as if it had learned it."""
    seconds: float = request.param
    monkeypatch.setattr(Rates, "pass_seconds", property(lambda _: seconds))
    return seconds


def make(slots: int, in_flight: str) -> RouterCore:
    core = RouterCore({"p": CoreSettings(in_flight=in_flight, linger=0.0)})  # type: ignore[arg-type]
    core.backend_up("a", "p", slots, 4096, 0.0, known_empty=True)
    return core


def text(name: str) -> bytes:
    return f"{name} has this to say. ".encode() * 40


def ask(core: RouterCore, name: str, now: float, more: bytes = b"") -> None:
    core.submit(Request(id=f"{name} {now}", prompt=Prompt.of(text(name) + more), pool="p", arrived=now), now)


def end(core: RouterCore, lease: Lease, now: float) -> None:
    tokens = lease.request.prompt.length // 4
    outcome = Outcome(
        status=Status.OK,
        cached_tokens=0,
        processed_tokens=tokens,
        output_tokens=1,
        prefill_seconds=tokens / 500,
    )
    core.finish(lease.request.id, outcome, now)


def fill(core: RouterCore, names: str) -> dict[str, Lease]:
    """One conversation on each slot, all decoding."""
    for name in names:
        ask(core, name, 0.0)
    leases = {lease.request.id[0]: lease for lease in core.grant(0.0)}
    assert sorted(lease.slot.slot for lease in leases.values()) == list(range(len(names)))
    for lease in leases.values():
        core.first_token(lease.request.id, 0.5)
    return leases


def test_a_stranger_runs_where_it_shares_the_pass_of_what_runs(per_pass: float) -> None:
    core = make(6, "slots")
    at = {lease.slot.slot: lease for lease in fill(core, "abcdef").values()}
    for number, slot in enumerate((0, 4, 5, 1, 3)):
        end(core, at[slot], 1.0 + number)
    ask(core, "x", 7.0)
    (lease,) = core.grant(7.0)
    # Where passes cost nothing, it overwrites what was left longest ago.
    assert lease.slot.slot in ({1, 3} if per_pass else {0})


def test_of_two_that_lose_nothing_the_one_beside_what_runs_goes_first(per_pass: float) -> None:
    core = make(6, "slots")
    leases = fill(core, "abcdef")
    where = {lease.slot.slot: name for name, lease in leases.items()}
    for slot in (0, 1, 3, 4, 5):
        end(core, leases[where[slot]], 1.0)
    core.reschedule("p", CoreSettings(in_flight="pair", linger=0.0))
    ask(core, where[1], 2.0, b"And what now?")
    ask(core, where[5], 2.1, b"And what now?")
    (lease,) = core.grant(2.2)
    # Where passes cost nothing, the youngest goes first.
    assert lease.slot.slot == (1 if per_pass else 5)
    assert lease.predicted_tokens == len(text("a")) // 4
