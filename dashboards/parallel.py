"""The slot count: what reuse would be at other counts, what demand asks for, what memory allows."""

from __future__ import annotations

from grafana import (
    Dashboard,
    Panel,
    Query,
    Row,
    increase,
    now,
    padded,
    quantile,
    rate,
    ratio,
    table,
    total,
)

CACHED = 'reuse="cached"'
MENDED = 'reason=~"evicted|busy"'
OTHERS = 'reason!~"evicted|busy"'

_ALL_SLOTS = total(now("backend_slots"))
_REUSE = ratio(total(rate("prompt_tokens_total", CACHED)), total(rate("prompt_tokens_total")))
_REUSE_RANGE = ratio(total(increase("prompt_tokens_total", CACHED)), total(increase("prompt_tokens_total")))
_PRESENTED = total(rate("prompt_tokens_total"))
_PRESENTED_RANGE = total(increase("prompt_tokens_total"))


def _by_slots(shadow: str, presented: str) -> str:
    return f"{total(shadow, 'slots')} / on () group_left () ({presented} > 0)"


_DEMAND = total(increase("demand_seconds_total"), "level")

ANSWER = Row(
    "The answer",
    (
        Panel(
            "Slots: advised and current",
            "The slot count that `warmslot advise` finds best for each backend, from the latest of its"
            " journal, and the one that it has. No advice is given without a journal, or until there is"
            " traffic to learn from.",
            "short",
            (
                Query(f"{now('advised_slots')} > 0", "{{backend}} advised"),
                Query(now("backend_slots"), "{{backend}} current"),
            ),
            kind="stat",
            height=5,
            options={"graphMode": "none"},
        ),
        Panel(
            "Reuse",
            "Observed, over the time that is looked at.",
            "percentunit",
            (Query(_REUSE_RANGE, "observed", instant=True),),
            kind="stat",
            height=5,
            top=1,
            steps=((None, "orange"), (0.5, "yellow"), (0.8, "green")),
            options={"graphMode": "none"},
        ),
        Panel(
            "Lost for want of slots",
            "Share of all prompt tokens that were computed again because their slot had been overwritten or"
            " was in use: what more slots would mend.",
            "percentunit",
            (
                Query(
                    ratio(total(increase("recomputed_tokens_total", MENDED)), _PRESENTED_RANGE),
                    "evicted + busy",
                    instant=True,
                ),
            ),
            kind="stat",
            height=5,
            steps=((None, "green"), (0.1, "yellow"), (0.2, "red")),
            options={"graphMode": "none"},
        ),
    ),
)

REUSE = Row(
    "What other slot counts would reuse",
    (
        Panel(
            "Reuse by slot count",
            "What reuse would have been with N slots in the pool, from the same requests in the same order;"
            " `unbounded` is the most that any count can reach. The bar `observed` stands at the current"
            " count: where it and the model part, do not trust the model.",
            "percentunit",
            (
                Query(
                    padded(_by_slots(increase("shadow_cached_tokens_total"), _PRESENTED_RANGE), "slots"),
                    instant=True,
                ),
                Query(
                    padded(
                        f'count_values("slots", {_ALL_SLOTS}) * on () group_left () ({_REUSE_RANGE})',
                        "slots",
                    ),
                    instant=True,
                ),
            ),
            kind="barchart",
            width=12,
            top=1,
            colours={"modelled": "blue", "observed": "green"},
            options={"xField": "slots"},
            transformations=table("slots", {"A": "modelled", "B": "observed"}),
        ),
        Panel(
            "Reuse by slot count over time",
            "The same as lines; the dashed one is the observed reuse at the current count.",
            "percentunit",
            (
                Query(
                    padded(_by_slots(rate("shadow_cached_tokens_total"), _PRESENTED), "slots"),
                    "N = {{slots}}",
                ),
                Query(_REUSE, "observed"),
            ),
            width=12,
            top=1,
            colours={"observed": "green"},
            dashed=("observed",),
        ),
        Panel(
            "Losses that more slots would mend, and others",
            "More slots keep what is evicted or busy today. They do nothing for prompts that are new, that"
            " diverged, or that the engine did not reuse.",
            "si:tok/s",
            (
                Query(total(rate("recomputed_tokens_total", MENDED)), "more slots would mend"),
                Query(total(rate("recomputed_tokens_total", OTHERS)), "they would not"),
            ),
            width=12,
            colours={"more slots would mend": "red", "they would not": "blue"},
            stacked=True,
        ),
        Panel(
            "Time by demand",
            "How long how many requests were in flight or queued at once. Time to the right of the current"
            " slot count (in orange) is time with more requests than slots.",
            "s",
            (
                Query(padded(f"{_DEMAND} > 0", "level"), instant=True),
                Query(
                    padded(f'{_DEMAND} and on (level) count_values("level", {_ALL_SLOTS})', "level"),
                    instant=True,
                ),
            ),
            kind="barchart",
            width=12,
            colours={"time": "blue", "at the slot count": "orange"},
            options={"xField": "level"},
            transformations=table("level", {"A": "time", "B": "at the slot count"}),
        ),
    ),
)

COST = Row(
    "What slots cost",
    (
        Panel(
            "Decode throughput by busy slots",
            "Generated tokens per second of a backend while so many requests decoded at once. Where the lines"
            " lie close together, more at once gains nothing.",
            "si:tok/s",
            (
                Query(
                    ratio(
                        total(rate("decode_level_tokens_total"), "busy"),
                        total(rate("decode_level_seconds_total"), "busy"),
                    ),
                    "{{busy}} busy",
                ),
            ),
            width=12,
        ),
        Panel(
            "Context of a slot and length of prompts",
            "What a slot can hold against the longest prompts: where they meet, requests are refused; where"
            " they are far apart, the same memory could hold more slots.",
            "si:tok",
            (
                Query(f"max by (backend) ({now('slot_context_tokens')})", "{{backend}} context"),
                Query(quantile(0.99, "prompt_length_tokens", "backend"), "{{backend}} prompt p99"),
            ),
            width=12,
            dashed=("context",),
        ),
        Panel(
            "Prompt tokens per generated token",
            "The higher, the more of an answer's time is prefill, and the more a warm slot is worth.",
            "short",
            (
                Query(
                    ratio(
                        total(rate("prompt_tokens_total"), "backend"),
                        total(rate("output_tokens_total"), "backend"),
                    ),
                    "{{backend}}",
                ),
            ),
        ),
        Panel(
            "Cost of prefill by position",
            "Seconds for a thousand prompt tokens in each part of the context, up to the bound named: the"
            " marginal prefill curve.",
            "s",
            (
                Query(
                    "1000 * "
                    + ratio(
                        total(rate("prefill_position_seconds_total"), "backend", "block"),
                        total(rate("prefill_position_tokens_total"), "backend", "block"),
                    ),
                    "{{backend}} to {{block}}",
                ),
            ),
        ),
        Panel(
            "KV memory: reserved and in use",
            "Tokens that the slots of a backend can hold, which is what memory is reserved for, and tokens"
            " that they do hold.",
            "si:tok",
            (
                Query(
                    f"max by (backend) ({now('backend_slots')})"
                    f" * on (backend) max by (backend) ({now('slot_context_tokens')})",
                    "{{backend}} reserved",
                ),
                Query(total(now("slot_resident_tokens"), "backend"), "{{backend}} in use"),
            ),
            dashed=("reserved",),
        ),
    ),
)

PARALLEL = Dashboard(
    uid="warmslot-parallel",
    title="warmslot / What --parallel?",
    about="The slot count: what reuse would be at other counts, what demand asks for, what slots cost.",
    rows=(ANSWER, REUSE, COST),
    links=(("warmslot-overview", "Overview"),),
    since="now-24h",
)
