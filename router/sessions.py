"""Conversations, found by their prefixes, and how likely each is to go on. Pure.

A conversation is a chain of prompts in which each contains the one before it. Time is counted in arrivals,
not seconds: with agents waiting for slots, "as many other requests have come since as usually do" says that
a conversation is over far better than a clock that runs slower the busier the engine is. Seconds are kept
as well, but only to decide how long a slot that was just left is worth holding (``linger``).

All that is used to predict is learned here from what was seen; there is no constant fitted to a workload.
Sources: the survival estimate is the empirical one (Kaplan-Meier without ties), mixed with the share of
conversations that went on at all, by how many turns they already had.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .clocks import ENDING, Timeless, TimelessIndex
from .samples import Samples
from .trie import PrefixTrie, common_blocks, common_bytes
from .values import BLOCK

if TYPE_CHECKING:
    from array import array

    from .values import Prompt

LIMIT = 512
"""Conversations that are remembered."""
MAX_BYTES = 64 << 20
"""Of text that their last prompts stand for (an eighth of that in memory)."""

_OWN_BLOCKS = 4
"""Blocks by which a match must exceed a preamble shared with others to be of the conversation itself."""

_UNSEEN = 0.1
"""Weight of the assumption that a conversation is alive, in observations."""

_MOST_TURNS = 16.0
_CLASSES = 3


@dataclass(slots=True)
class _Share:
    """Yes among yes and no. Until something was seen, four in five are taken to be yes."""

    yes: float = 2.0
    total: float = 2.5

    @property
    def value(self) -> float:
        return self.yes / self.total


@dataclass(slots=True)
class Session:
    """One conversation. ``chain`` and ``length`` are those of its last prompt; lengths are bytes."""

    id: str
    key: int
    chain: array[int]
    length: int
    ending: bytes | None
    """The prompt's last bytes, beyond its whole blocks and some before; ``None`` where no text is known."""
    tokens: int = 0
    """Of its context after the last answer."""
    turns: int = 1
    running: int = 0
    """Its requests that wait or run now."""
    released_at: float = 0.0
    released_tick: int = 0
    arrived_tick: int = 0
    returned: bool = False
    """Whether its last release was followed by a return (each release is counted once)."""
    retold: bool = False
    """Whether its last prompt told another time than the one before: what it left is of no use then."""
    tail: array[int] | None = None
    """Chain of the longer prompt that this conversation went back from, until it is asked for again."""
    tail_from: int = 0
    """Blocks of ``tail`` that were kept."""


class Sessions:
    """The conversations of one pool: the ``limit`` most recent ones."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._bytes = 0
        self._tick = 0
        self._arrived: list[int] = []
        """Tick of each conversation's last arrival, ascending."""
        self._made = 0
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._by_key: dict[int, Session] = {}
        self._free: list[int] = list(range(limit, -1, -1))
        self._trie = PrefixTrie()
        self._timeless = TimelessIndex()
        self._went_on = [_Share() for _ in range(_CLASSES)]
        self._tails = _Share()
        self._gaps = Samples()
        """Arrivals between the release of a conversation and its return."""
        self._others = Samples()
        """The same, counting each other conversation once."""
        self._gap_seconds = Samples()
        self._chances: dict[str, float] = {}
        """Answers of :meth:`chance` since the last arrival or release."""

    def get(self, session_id: str) -> Session | None:
        """A conversation that is still remembered."""
        return self._sessions.get(session_id)

    def arrive(self, prompt: Prompt, hint: str | None, now: float) -> tuple[Session, int]:
        """A request has come: the conversation that it continues, or a new one. Learns from the return.

        ``hint`` is the client's own name for the conversation and outranks what the prefix says. The second
        value: tokens that the conversation's context had so far.
        """
        self._tick += 1
        self._chances.clear()
        timeless = None if hint else Timeless.of(prompt)
        session = self._sessions.get(f"={hint}") if hint else self._continued(prompt)
        retold = False
        if session is None and timeless is not None:
            session, retold = self._at_another_time(timeless), True
        if session is None:
            return self._begin(prompt, hint, timeless), 0
        reach = session.tokens
        if not hint and self._are_two(session, prompt):
            return self._begin(prompt, hint, timeless), reach
        if session.running == 0 and not session.returned:
            session.returned = True
            self._gaps.add(self._tick - session.released_tick)
            self._others.add(self._distance(session))
            self._gap_seconds.add(max(0.0, now - session.released_at))
            self._turned(session)
        session.running += 1
        session.turns += 1
        session.retold = retold
        self._note_tail(session, prompt)
        self._set(session, prompt, timeless)
        return session, reach

    def release(self, session_id: str, now: float, tokens: int | None = None) -> None:
        """A request of the conversation is over (or was withdrawn); its context has ``tokens`` now."""
        session = self._sessions.get(session_id)
        self._chances.clear()
        if session is None:
            return
        if tokens is not None:
            session.tokens = tokens
        session.running = max(0, session.running - 1)
        if session.running == 0:
            session.released_at, session.released_tick, session.returned = now, self._tick, False
            self._went_on[self._class(session)].total += 1

    def chance(self, session_id: str) -> float:
        """How likely the conversation is to be asked for again, given how long ago it was left."""
        chance = self._chances.get(session_id)
        if chance is None:
            chance = self._chances[session_id] = self._chance(session_id)
        return chance

    def going_on(self, session_id: str) -> float:
        """How likely a conversation is to be asked for again after the request of it that runs now."""
        session = self._sessions.get(session_id)
        if session is None:
            return self._went_on[0].value
        return 1.0 if session.running > 1 else self._went_on[self._class(session)].value

    def is_running(self, session_id: str) -> bool:
        """Whether a request of the conversation waits or runs."""
        session = self._sessions.get(session_id)
        return session is not None and session.running > 0

    def fixed_linger(self, session_id: str, seconds: float, now: float) -> float:
        """How much of a given hold is left for a conversation that was left; 0 for one that runs."""
        session = self._sessions.get(session_id)
        if session is None or session.running:
            return 0.0
        return max(0.0, session.released_at + seconds - now)

    def turns_ahead(self) -> float:
        """How many more turns a conversation that goes on has, on average (bounded)."""
        share = self._went_on[-1].value
        return min(_MOST_TURNS, max(1.0, share / (1.0 - share)))

    def tail_chance(self, session_id: str) -> float:
        """How likely what a conversation went back from is asked for again."""
        session = self._sessions.get(session_id)
        return 0.0 if session is not None and session.retold else self._tails.value

    def linger_seconds(self, session_id: str, gain_seconds: float, now: float) -> float:
        """How much longer to hold the slot of a conversation that was left, in seconds; 0 = not worth it.

        Holding until ``t`` wins ``gain_seconds`` with the chance that the next turn comes by then, and costs
        the time waited. The best ``t`` is one of the gaps seen.
        """
        session = self._sessions.get(session_id)
        if session is None or session.running or not self._gap_seconds.ordered:
            return 0.0
        waited = now - session.released_at
        ahead = self._gap_seconds.ordered[bisect_right(self._gap_seconds.ordered, waited) :]
        if not ahead:
            return 0.0
        share = self._went_on[self._class(session)].value
        all_gaps = len(self._gap_seconds.ordered)
        alive = share * len(ahead) / all_gaps + 1.0 - share
        best, best_net, passed = 0.0, 0.0, 0.0
        for count, gap in enumerate(ahead, start=1):
            left = gap - waited
            if left >= gain_seconds:
                break
            passed += left
            came = share * count / all_gaps / alive
            net = came * gain_seconds - (share * passed / all_gaps / alive) - (1.0 - came) * left
            if net > best_net:
                best, best_net = left, net
        return best

    # Inside

    def _chance(self, session_id: str) -> float:
        session = self._sessions.get(session_id)
        if session is None:
            # A content that belongs to no remembered conversation: older than all that are.
            return 0.0 if len(self._sessions) >= self._limit else self._went_on[0].value / 2
        if session.running:
            return 1.0
        share = self._went_on[self._class(session)].value
        samples = len(self._gaps.ordered)
        later = min(
            self._gaps.above(self._tick - session.released_tick),
            self._others.above(self._distance(session) - 1),
        )
        alive = (later + _UNSEEN) / (samples + _UNSEEN)
        return share * alive / (share * alive + 1.0 - share)

    def _continued(self, prompt: Prompt) -> Session | None:
        """The conversation that a prompt is the next call of.

        It contains that one's last prompt, or is contained in it; else it shares most of it, and more than
        it shares with any other conversation (which would be a preamble).
        """
        best: tuple[int, int, int] | None = None
        found = None
        whole = prompt.length // BLOCK
        matches = self._trie.match(prompt.chain)
        for key, blocks in matches.items():
            session = self._by_key[key]
            if prompt.length >= session.length and _contains(prompt, session, blocks):
                rank = (1, session.length, session.released_tick)
            elif whole and blocks >= whole:
                rank = (0, -session.length, session.released_tick)
            else:
                continue
            if best is None or rank > best:
                best, found = rank, session
        return found if found is not None else self._changed_above(matches)

    def _changed_above(self, matches: dict[int, int]) -> Session | None:
        """The conversation whose history was edited, if the prompt looks like that."""
        ranked = sorted(matches.items(), key=lambda item: -item[1])[:2]
        if not ranked:
            return None
        key, most = ranked[0]
        elsewhere = ranked[1][1] if len(ranked) > 1 else 0
        session = self._by_key[key]
        own = 2 * most * BLOCK >= session.length and most >= elsewhere + _OWN_BLOCKS
        return session if own else None

    @staticmethod
    def _are_two(session: Session, prompt: Prompt) -> bool:
        """Whether a prompt goes on with what a conversation was before its history changed.

        Then it never was one conversation, but two with a common preamble.
        """
        if session.tail is None:
            return False
        shared = common_blocks(session.tail, prompt.chain)
        if shared <= common_blocks(session.chain, prompt.chain):
            return False
        session.tail = None
        return True

    def _at_another_time(self, prompt: Timeless) -> Session | None:
        """The conversation that the prompt continues but for a clock near the top; none that runs now."""
        found = (self._sessions[name] for name in self._timeless.find(prompt))
        return next((session for session in found if not session.running), None)

    def _begin(self, prompt: Prompt, hint: str | None, timeless: Timeless | None) -> Session:
        self._made += 1
        name = f"={hint}" if hint else f"s{self._made}"
        while len(self._sessions) >= self._limit:
            self._forget()
        session = Session(id=name, key=self._free.pop(), chain=prompt.chain, length=0, ending=b"", running=1)
        self._sessions[name] = session
        self._by_key[session.key] = session
        self._set(session, prompt, timeless)
        return session

    def _distance(self, session: Session) -> int:
        """How many other conversations were asked for since this one was left."""
        return len(self._arrived) - bisect_right(self._arrived, session.released_tick)

    def _set(self, session: Session, prompt: Prompt, timeless: Timeless | None) -> None:
        self._timeless.put(session.id, timeless)
        self._unmark(session)
        session.arrived_tick = self._tick
        self._arrived.append(self._tick)
        self._bytes += prompt.length - session.length
        session.chain, session.length = prompt.chain, prompt.length
        start = _sure_blocks(prompt.length) * BLOCK
        session.ending = None if prompt.data is None else prompt.data[start:]
        self._trie.put(session.key, prompt.chain)
        self._sessions.move_to_end(session.id)
        while self._bytes > MAX_BYTES and len(self._sessions) > 1:
            self._forget()

    def _unmark(self, session: Session) -> None:
        at = bisect_right(self._arrived, session.arrived_tick) - 1
        if at >= 0 and self._arrived[at] == session.arrived_tick:
            del self._arrived[at]

    def _forget(self) -> None:
        """Drop the conversation that was used longest ago; one that is running only if all are."""
        for session in self._sessions.values():
            if not session.running:
                break
        else:
            session = next(iter(self._sessions.values()))
        self._unmark(session)
        del self._sessions[session.id]
        del self._by_key[session.key]
        self._timeless.drop(session.id)
        self._trie.drop(session.key)
        self._free.append(session.key)
        self._bytes -= session.length

    def _turned(self, session: Session) -> None:
        self._went_on[self._class(session)].yes += 1

    def _class(self, session: Session) -> int:
        return min(session.turns, _CLASSES) - 1

    def _note_tail(self, session: Session, prompt: Prompt) -> None:
        """Whether conversations come back to what they went back from."""
        chain = prompt.chain
        if session.tail is not None:
            kept = session.tail_from
            if len(chain) > kept and len(session.tail) > kept and chain[kept] == session.tail[kept]:
                self._tails.yes += 1
                session.tail = None
        shared = common_blocks(chain, session.chain)
        if shared < len(session.chain):
            self._tails.total += not session.retold
            session.tail, session.tail_from = session.chain, shared


def _sure_blocks(length: int) -> int:
    """Whole blocks of a prompt that its continuation has in any case."""
    return max(0, length - ENDING) // BLOCK


def _contains(prompt: Prompt, session: Session, blocks: int) -> bool:
    """Whether a prompt that shares ``blocks`` with a session's last one holds all of it but its ending."""
    sure = _sure_blocks(session.length)
    if blocks < sure or not session.length:
        return False
    if prompt.data is None or session.ending is None:
        return blocks > 0
    shared = sure * BLOCK + common_bytes(session.ending, prompt.data[sure * BLOCK : sure * BLOCK + 2 * BLOCK])
    return shared >= session.length - min(ENDING, session.length // 2)
