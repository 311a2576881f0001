"""The demo benchmark's workload: a few agents of our own writing, as agents behave in front of a server.

Agents of one kind share a long preamble (role, rules, tools). Each works through its own task: it asks, gets
an answer, runs a tool for a moment, appends the tool's output and asks again. After its first answer it also
asks for a title in a short request that has nothing to do with the conversation, as chat front ends do.
Pure and deterministic: the same seed gives the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

ANSWER_TOKENS = 16
TITLE_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of an agent: what is appended before it, and how long the tool ran before that."""

    role: str
    text: str
    pause: float
    """Seconds."""


@dataclass(frozen=True, slots=True)
class Agent:
    """One conversation: ``system`` is shared by all agents of its kind, the turns are its own."""

    name: str
    system: str
    turns: tuple[Turn, ...]
    title_request: str


@dataclass(frozen=True, slots=True)
class _Kind:
    name: str
    role: str
    rules: tuple[str, ...]
    tools: tuple[tuple[str, str, str], ...]
    task: str


_KINDS = (
    _Kind(
        "coder",
        "You are a software engineer who mends defects in a repository through a shell.",
        (
            "Read before you write: look at the failing test, then at the code under test.",
            "Change as little as the defect needs, and keep the style of the file that you change.",
            "After every change run the tests that touch it, and read the whole output before the next step.",
            "Never delete a test that fails. A test that is wrong is corrected in a change of its own.",
            "When a command fails twice in the same way, stop and say what you expected and what you saw.",
            "Answer with one command at a time and with one sentence that says why you run it.",
        ),
        (
            ("list_files", "path: text", "Names and sizes of the files below a folder, two levels deep."),
            ("read_file", "path: text, first: integer, last: integer", "Lines of a file with their numbers."),
            (
                "search",
                "pattern: text, path: text",
                "Lines that match a regular expression, with file and line.",
            ),
            (
                "edit",
                "path: text, old: text, new: text",
                "Replaces one passage of a file that must be unique.",
            ),
            (
                "run_tests",
                "path: text",
                "Runs the tests of a file or a folder and gives the last lines of the output.",
            ),
            (
                "git_log",
                "path: text, count: integer",
                "The latest changes of a file, newest first, one line each.",
            ),
        ),
        "The tests of module {noun} fail since this morning. Find out why and mend it. Start at {file}.",
    ),
    _Kind(
        "analyst",
        "You are a data analyst who answers questions about a company's orders with a read-only database.",
        (
            "Look at the schema of a table before the first query that uses it; never guess a column's name.",
            "Count rows before you aggregate them, and say how many were left out by each condition.",
            "Amounts are in cents and times are in UTC; convert them in the last step only.",
            "A question that can be read in two ways is answered for both, the likelier one first.",
            "Never show names or addresses of customers; use their numbers.",
            "Answer with one query at a time and with one sentence that says what it will tell.",
        ),
        (
            ("tables", "", "All tables with their row counts and the time of the latest row."),
            (
                "columns",
                "table: text",
                "Columns of a table with type, share of nulls and three sample values.",
            ),
            ("query", "sql: text, limit: integer", "Runs one SELECT and gives the rows as a table."),
            ("explain", "sql: text", "The plan of a query, without running it."),
            (
                "chart",
                "sql: text, kind: text",
                "Draws the result of a query and gives a link to the picture.",
            ),
            ("note", "text: text", "Writes a finding into the report that the user will read."),
        ),
        "Why did orders of {noun} fall last week? Begin with the table {file} and find the main reason.",
    ),
    _Kind(
        "operator",
        "You are on call for a fleet of servers and find the cause of alerts before you touch anything.",
        (
            "State what the alert measures, since when it fires, and which hosts it names.",
            "Look at what changed before the alert began: deployments, configuration, traffic, certificates.",
            "Prefer commands that only read. A command that changes something needs a reason and a way back.",
            "One host that behaves unlike the others is a clue; all hosts that behave alike is another.",
            "Write down the time of every step, so that the report after the incident writes itself.",
            "Answer with one step at a time and with one sentence that says what you expect to see.",
        ),
        (
            ("alerts", "", "Alerts that fire now, with their labels and the time since when they fire."),
            ("metric", "name: text, hosts: text, minutes: integer", "A time series as one row per minute."),
            ("logs", "unit: text, host: text, lines: integer", "The latest log lines of a unit on a host."),
            ("deployments", "hours: integer", "What was rolled out in the last hours, by whom and where."),
            ("shell", "host: text, command: text", "Runs a command on a host that only reads."),
            ("page", "team: text, text: text", "Wakes the team that owns a service."),
        ),
        "Alert: latency of {noun} is high on three hosts. Find the cause. The first clue is in {file}.",
    ),
)

_NOUNS = (
    "billing",
    "search",
    "catalog",
    "sessions",
    "exports",
    "invoices",
    "uploads",
    "quotas",
    "mailer",
    "ledger",
)
_PARTS = (
    "parser",
    "cache",
    "worker",
    "schema",
    "client",
    "index",
    "queue",
    "render",
    "policy",
    "router",
    "store",
)
_VERBS = ("reads", "drops", "retries", "merges", "locks", "skips", "counts", "splits", "renames", "expires")
_STATES = ("ok", "late", "stale", "failed", "empty", "slow", "partial", "skipped")


def demo_workload(agents: int = 6, turns: int = 5, seed: int = 1) -> list[Agent]:
    """``agents`` conversations of ``turns`` requests each, the kinds taken in turn."""
    return [_agent(number, turns, Random(f"{seed}/{number}")) for number in range(agents)]  # noqa: S311


def _agent(number: int, turns: int, random: Random) -> Agent:
    kind = _KINDS[number % len(_KINDS)]
    noun, part = random.choice(_NOUNS), random.choice(_PARTS)
    task = kind.task.format(noun=noun, file=f"{noun}_{part}") + " " + _sentence(random)
    later = tuple(
        Turn("tool", _tool_output(kind, random), random.uniform(0.1, 0.6)) for _ in range(turns - 1)
    )
    return Agent(
        name=f"{kind.name}-{number}",
        system=_preamble(kind),
        turns=(Turn("user", task, 0.0), *later),
        title_request=f"Write a title of at most five words for this task: {task}",
    )


def _preamble(kind: _Kind) -> str:
    rules = "\n".join(f"{number}. {rule}" for number, rule in enumerate(kind.rules, 1))
    tools = "\n".join(f"- {name}({arguments}): {text}" for name, arguments, text in kind.tools)
    return f"{kind.role}\n\nRules:\n{rules}\n\nTools, one call in each answer:\n{tools}\n"


def _sentence(random: Random) -> str:
    return (
        f"Someone noticed that the {random.choice(_PARTS)} {random.choice(_VERBS)} every "
        f"{random.choice(_STATES)} {random.choice(_NOUNS)} entry {random.randint(2, 90)} times."
    )


def _tool_output(kind: _Kind, random: Random) -> str:
    name = random.choice(kind.tools)[0]
    lines = [
        f"{random.randint(1, 999):4d}  {random.choice(_NOUNS)}/{random.choice(_PARTS)}  "
        f"{random.choice(_VERBS)} {random.choice(_NOUNS)}  {random.choice(_STATES)}"
        for _ in range(random.randint(7, 12))
    ]
    return f"Output of {name}:\n" + "\n".join(lines) + f"\n{_sentence(random)}"
