"""The demo benchmark's workload and figures."""

from __future__ import annotations

from warmslot.launcher.bench import Sample, Side
from warmslot.launcher.workload import demo_workload


def test_the_same_seed_gives_the_same_bytes() -> None:
    assert demo_workload(5, 4, seed=7) == demo_workload(5, 4, seed=7)
    assert demo_workload(5, 4, seed=7) != demo_workload(5, 4, seed=8)


def test_agents_of_one_kind_share_their_preamble_and_nothing_else() -> None:
    agents = demo_workload(6, 3)
    assert agents[0].system == agents[3].system
    assert len({agent.system for agent in agents}) == 3
    assert len({agent.turns for agent in agents}) == 6
    assert len({agent.name for agent in agents}) == 6


def test_an_agent_asks_once_and_then_appends_tool_output() -> None:
    (agent,) = demo_workload(1, 4)
    assert [turn.role for turn in agent.turns] == ["user", "tool", "tool", "tool"]
    assert agent.turns[0].text in agent.title_request


def test_reuse_is_weighted_by_tokens() -> None:
    side = Side(
        "x",
        samples=[
            Sample("a", "turn", cached=900, processed=100, output=8, ttft=0.2, total=1.0),
            Sample("b", "title", cached=0, processed=100, output=8, ttft=0.4, total=1.0),
        ],
    )
    assert side.prefilled == 200
    assert side.prompt_tokens == 1100
    assert round(side.reuse, 3) == 0.818
    assert side.ttft(50) == 0.3


def test_a_side_without_answers_has_figures_too() -> None:
    side = Side("x")
    assert (side.reuse, side.ttft(95), side.prefilled) == (0.0, 0.0, 0)
