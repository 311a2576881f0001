"""Draws a dashboard with Grafana's own components in a headless browser, from a Prometheus that has data.

    cd dashboards/draw && npm install && npm run build
    python dashboards/draw/draw.py overview http://127.0.0.1:9090 docs/img/overview.png --minutes 15

Bar charts are drawn as bars of the same values and heat maps as plain cells, because those two panels are not
part of the package ``@grafana/ui``.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import sync_playwright

HERE = Path(__file__).resolve().parent
_PAGE = "<!doctype html><html><body><div id=root></div></body></html>"
COLOURS = ("#3274d9", "#56a64b")
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]


class Asked:
    """A Prometheus, asked over one range of time."""

    def __init__(self, url: str, start: float, end: float, rate_interval: str) -> None:
        self._http = httpx.Client(base_url=f"{url}/api/v1", timeout=60, trust_env=False)
        self.start, self.end = start, end
        self._rate_interval = rate_interval

    def panel(self, panel: dict[str, Any]) -> list[dict[str, Any]]:
        """The series of a panel: name, points, colour."""
        found = []
        for index, target in enumerate(panel["targets"]):
            expr = re.sub(r'"\$\w+"', '".+"', target["expr"])
            expr = expr.replace("$__rate_interval", self._rate_interval)
            expr = expr.replace("$__range", f"{self.end - self.start:.0f}s")
            names = panel.get("transformations", [{}, {"options": {"renameByName": {}}}])[1]["options"][
                "renameByName"
            ]
            for one in self._ask(expr, instant=target["instant"]):
                name = _named(target, one["metric"])
                if names:
                    name += " " + names.get(f"Value #{target['refId']}", "")
                points = [[float(at), float(value)] for at, value in one.get("values") or [one["value"]]]
                found.append({"name": name, "points": points, "colour": COLOURS[index % 2]})
        return sorted(found, key=lambda one: one["name"]) if panel["type"] == "barchart" else found

    def _ask(self, expr: str, *, instant: bool) -> list[dict[str, Any]]:
        if instant:
            answer = self._http.get("/query", params={"query": expr, "time": self.end})
        else:
            step = max(1.0, (self.end - self.start) / 240)
            window = {"start": self.start, "end": self.end, "step": step}
            answer = self._http.get("/query_range", params={"query": expr, **window})
        answer.raise_for_status()
        result: list[dict[str, Any]] = answer.json()["data"]["result"]
        return result


def _named(target: dict[str, Any], labels: dict[str, str]) -> str:
    if target["legendFormat"] == "__auto":
        return ", ".join(value for name, value in labels.items() if name != "__name__")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), target["legendFormat"])


def draw(dashboard: dict[str, Any], asked: Asked, out: Path, mode: str) -> None:
    """Render into a picture. Errors of the page are errors here."""
    answers = {panel["id"]: asked.panel(panel) for panel in dashboard["panels"] if panel["type"] != "row"}
    facts = {"dashboard": dashboard, "answers": answers, "from": asked.start, "to": asked.end, "mode": mode}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        page = browser.new_page(viewport={"width": 1600, "height": 1000})
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        # Served by nobody: the components want a page with an origin, for its local storage.
        page.route("**/*", lambda route: route.fulfill(body=_PAGE, content_type="text/html"))
        page.goto("http://localhost/")
        page.add_style_tag(path=HERE / "build/page.css")
        page.add_script_tag(path=HERE / "build/page.js")
        page.evaluate("(facts) => window.draw(facts)", facts)
        page.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 1500)))")
        page.screenshot(path=out, full_page=True)
        drawn = page.locator("canvas").count()
        browser.close()
    if faults or not drawn:
        raise SystemExit("\n".join(faults) or "nothing was drawn")


def main() -> None:
    """Read the arguments and draw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=["overview", "parallel"])
    parser.add_argument("prometheus", help="address, such as http://127.0.0.1:9090")
    parser.add_argument("out", type=Path, help="the picture")
    parser.add_argument("--minutes", type=float, default=15, help="length of the time that is looked at")
    parser.add_argument("--until", type=float, default=time.time(), help="its end, in seconds of the epoch")
    parser.add_argument("--rate-interval", default="1m")
    parser.add_argument("--mode", choices=["dark", "light"], default="dark")
    given = parser.parse_args()
    dashboard = json.loads((HERE.parent / f"{given.name}.json").read_text(encoding="utf-8"))
    asked = Asked(given.prometheus, given.until - 60 * given.minutes, given.until, given.rate_interval)
    draw(dashboard, asked, given.out, given.mode)
    sys.stdout.write(f"drew {given.out}\n")


if __name__ == "__main__":
    main()
