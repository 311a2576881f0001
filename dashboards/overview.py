"""The overview: how much prefill is avoided, why the rest is not, and what clients feel of it."""

from __future__ import annotations

from grafana import Dashboard, Panel, Query, Row, now, quantile, rate, ratio, total

CACHED = 'reuse="cached"'
LOSSES = {
    "new": "blue",
    "evicted": "red",
    "busy": "orange",
    "diverged": "purple",
    "restarted": "dark-yellow",
    "engine": "text",
}
_GOOD_HIGH = ((None, "orange"), (0.5, "yellow"), (0.8, "green"))


def _reuse(*by: str, metric: str = "prompt_tokens_total") -> str:
    return ratio(total(rate(metric, CACHED), *by), total(rate(metric), *by))


AT_A_GLANCE = Row(
    "At a glance",
    (
        Panel(
            "Reuse",
            "Share of all prompt tokens that engines took from their KV cache, weighted by tokens.",
            "percentunit",
            (Query(_reuse(), "reuse"),),
            kind="stat",
            width=4,
            height=4,
            top=1,
            steps=_GOOD_HIGH,
        ),
        Panel(
            "Prefill avoided",
            "Seconds of prefill, at the measured cost of each position, that reuse saves per second.",
            "suffix: s/s",
            (Query(total(rate("prefill_seconds_avoided_total")), "avoided"),),
            kind="stat",
            width=4,
            height=4,
            decimals=2,
        ),
        Panel(
            "TTFT p95",
            "Time from a request's arrival to its first token that 95 % of requests stay below, queueing"
            " included.",
            "s",
            (Query(quantile(0.95, "time_to_first_token_seconds"), "p95"),),
            kind="stat",
            width=4,
            height=4,
            steps=((None, "green"), (4, "yellow"), (15, "red")),
        ),
        Panel(
            "Error ratio",
            "Share of requests that ended in an error; those that clients cancelled are left out.",
            "percentunit",
            (
                Query(
                    ratio(
                        total(rate("requests_total", 'outcome="error"')),
                        total(rate("requests_total", 'outcome!="cancelled"')),
                    ),
                    "errors",
                ),
            ),
            kind="stat",
            width=4,
            height=4,
            steps=((None, "green"), (0.01, "yellow"), (0.05, "red")),
            decimals=1,
        ),
        Panel(
            "Waiting",
            "Requests in the router's queue, waiting for a slot.",
            "short",
            (Query(total(now("queue_requests")), "waiting"),),
            kind="stat",
            width=4,
            height=4,
        ),
        Panel(
            "Backends up",
            "Backends that serve, and those that are configured.",
            "short",
            (
                Query(total(now("backend_up")), "up"),
                Query(f"count({now('backend_up')})", "configured"),
            ),
            kind="stat",
            width=4,
            height=4,
        ),
    ),
)

REUSE = Row(
    "Reuse and its losses",
    (
        Panel(
            "Prompt tokens: cached and processed",
            "All prompt tokens that clients presented; the two add up. Processed ones are what the"
            " accelerator had to compute.",
            "si:tok/s",
            (Query(total(rate("prompt_tokens_total"), "reuse"), "{{reuse}}"),),
            colours={"cached": "green", "processed": "orange"},
            stacked=True,
        ),
        Panel(
            "Where reused tokens were",
            "slot: still in the slot that the request ran in. host_ram: overwritten in the slots, and brought"
            " back by the engine from its cache in host memory (setting `cache_ram`). What comes from host"
            " memory costs a copy instead of a prefill (the live page says whether that pays): where it is"
            " much, more slots would spare the copies; where it stays at nothing although tokens are evicted,"
            " that cache is off or too small. Of a backend given by `url` the router cannot tell them apart:"
            " all of its reuse counts as slot.",
            "si:tok/s",
            (Query(total(rate("reused_tokens_total"), "source"), "{{source}}"),),
            colours={"slot": "green", "host_ram": "blue"},
            stacked=True,
        ),
        Panel(
            "Why prompt tokens were computed",
            "new: never seen before. evicted: was resident, overwritten. busy: resident in a slot that was in"
            " use. diverged: the conversation's own past changed. restarted: the engine was. engine: it was"
            " resident, yet the engine did not reuse it.",
            "si:tok/s",
            (Query(total(rate("recomputed_tokens_total"), "reason"), "{{reason}}"),),
            colours=LOSSES,
            stacked=True,
        ),
        Panel(
            "Reuse by backend",
            "Where one backend lags behind the others, look at its slots and its restarts.",
            "percentunit",
            (Query(_reuse("backend"), "{{backend}}"),),
            top=1,
        ),
        Panel(
            "Reuse by route",
            "By the kind of request.",
            "percentunit",
            (Query(_reuse("route"), "{{route}}"),),
            top=1,
        ),
        Panel(
            "Reuse by client",
            "By the key that requests came with; `other` is everyone without a key of their own."
            " Clients are counted over all pools and backends.",
            "percentunit",
            (Query(_reuse("client", metric="client_prompt_tokens_total"), "{{client}}"),),
            top=1,
        ),
    ),
)

PICTURE = Row(
    "Is the router's picture true?",
    (
        Panel(
            "Reuse: predicted and observed",
            "Tokens that the router expected to be reused when it chose the slot, and those that the engine"
            " reported. They part when the picture of what slots hold is wrong.",
            "si:tok/s",
            (
                Query(total(rate("predicted_reuse_tokens_total")), "predicted"),
                Query(total(rate("prompt_tokens_total", CACHED)), "observed"),
            ),
            colours={"predicted": "blue", "observed": "green"},
            dashed=("predicted",),
        ),
        Panel(
            "Routing decisions",
            "affinity: the slot with the longest match. fresh: nothing matched. spill: a better match existed"
            " but was not used. wait: held until the matching slot was free. unpinned: the engine chose.",
            "reqps",
            (Query(total(rate("routing_decisions_total"), "decision"), "{{decision}}"),),
            stacked=True,
        ),
        Panel(
            "The engine's own slot selections",
            "Read from the log of engines launched here. Everything but `id` means that a request was not"
            " pinned, or that the engine did not honour it.",
            "reqps",
            (Query(total(rate("engine_slot_selections_total"), "by"), "by {{by}}"),),
            stacked=True,
        ),
    ),
)

LOAD = Row(
    "What clients feel, and how busy the slots are",
    (
        Panel(
            "Time to first token",
            "How many requests had their first token after how long.",
            "reqps",
            (Query(total(rate("time_to_first_token_seconds_bucket"), "le"), "{{le}}"),),
            kind="heatmap",
            width=12,
        ),
        Panel(
            "Time in the queue, p95",
            "From arrival to the lease of a slot.",
            "s",
            (Query(quantile(0.95, "queue_seconds", "pool"), "{{pool}}"),),
            width=12,
        ),
        Panel(
            "Requests by how they ended",
            "rejected: the queue was full, or the request was not acceptable. cancelled: the client left.",
            "reqps",
            (Query(total(rate("requests_total"), "outcome"), "{{outcome}}"),),
            colours={"ok": "green", "error": "red", "cancelled": "yellow", "rejected": "orange"},
            stacked=True,
        ),
        Panel(
            "Slot occupancy",
            "Share of the time that each slot was under lease.",
            "percentunit",
            (Query(total(rate("slot_busy_seconds_total"), "backend", "slot"), "{{backend}} slot {{slot}}"),),
            top=1,
        ),
        Panel(
            "Restarts per hour",
            "How often backends came back, by why they had gone.",
            "short",
            (
                Query(
                    total(f"3600 * {rate('backend_restarts_total')}", "backend", "reason"),
                    "{{backend}} {{reason}}",
                ),
            ),
        ),
    ),
)

OVERVIEW = Dashboard(
    uid="warmslot-overview",
    title="warmslot / Overview",
    about="How much prefill is avoided, why the rest is not, and what clients feel of it.",
    rows=(AT_A_GLANCE, REUSE, PICTURE, LOAD),
    links=(("warmslot-parallel", "What --parallel?"),),
)
