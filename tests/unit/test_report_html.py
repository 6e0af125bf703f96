"""report.html: one page, every repeat on it, whatever it was told escaped."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_folder import (
    broken,
    decide,
    demo_folder,
    make_plan,
    make_summary,
    make_values,
    write_folder,
)

from pytest_dsv41.report.html import html_page, write_html
from pytest_dsv41.report.model import Item, load_window, series_rows
from pytest_dsv41.report.svg import fit, interval_plot, run_plot, ticks
from pytest_dsv41.report.terminal import render_files
from pytest_dsv41.window.summary import ClaimInfo

EVIL = "<script>alert(1)</script>\"'&{{ 7*7 }}\x1b[2J\x00\u202e\ud800\ufffe"
VOID = {"meta", "line", "rect", "br", "circle", "polygon", "path"}


class Page(HTMLParser):
    """Collects tags and text, and checks that they nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "br"}:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def page_of(folder: Path) -> Page:
    return Page(html_page(load_window(folder)))


@pytest.mark.parametrize(
    ("gain", "word"), [(0.08, "CANDIDATE"), (0.0, "INCONCLUSIVE"), (-0.08, "NOT A CANDIDATE")]
)
def test_the_verdict_stands_at_the_top(tmp_path: Path, gain: float, word: str) -> None:
    page = page_of(demo_folder(tmp_path / "w", gain))
    body = page.text().partition("DEMO demo")[2]
    assert re.search(r"[A-Z]{4,}(?: [A-Z]+)*", body.partition("round.")[2])
    assert body.partition("round.")[2].strip().startswith(word)
    assert "short-b1: ms per round" in body


def test_the_page_needs_nothing_and_runs_nothing(tmp_path: Path) -> None:
    folder = demo_folder(tmp_path / "w")
    raw = write_html(folder).read_text()
    page = Page(raw)
    names = {name for name, _ in page.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    attributes = {key for _, attrs in page.tags for key in attrs}
    assert not attributes & {"src", "href", "action"}
    assert not {key for key in attributes if key.startswith("on")}
    assert "url(" not in raw
    assert "@import" not in raw
    policy = [attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv")]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_every_repeat_is_a_mark_in_run_order(tmp_path: Path) -> None:
    folder = demo_folder(tmp_path / "w")
    raw = html_page(load_window(folder))
    plot = raw.partition("ms_per_round of every repeat in run order")[2].partition("</svg>")[0]
    names = re.findall(r"<title>(\S+): [\d.]+ ms \((\w+)\)</title>", plot)
    assert names == [
        (f"{start}-short-b1-r{repeat}", arm)
        for start, arm in (("K1", "control"), ("I1", "fast"), ("K2", "control"), ("I2", "fast"))
        for repeat in range(3)
    ]
    assert re.findall(r"<title>start (\w+), arm (\w+)</title>", plot) == [
        ("K1", "control"),
        ("I1", "fast"),
        ("K2", "control"),
        ("I2", "fast"),
    ]


def test_lower_values_lie_lower_on_the_plot(tmp_path: Path) -> None:
    files = load_window(demo_folder(tmp_path / "w"))
    plot = str(
        run_plot(
            files.of("short-b1"),
            "ms_per_round",
            "ms",
            ("control", "fast"),
            lower_is_better=True,
            key="k",
        )
    )
    control = [float(y) for y in re.findall(r'<circle cx="[\d.]+" cy="([\d.]+)"', plot)]
    fast = [float(y) for y in re.findall(r'<polygon points="[\d.]+,([\d.]+)', plot)]
    assert len(control) == len(fast) == 6
    assert max(control) < min(fast)


def test_a_repeat_without_a_value_is_marked_with_its_reason(tmp_path: Path) -> None:
    plan = make_plan()
    values = make_values(plan, {"fast": 0.08})
    values[0] = broken(values[0], "refused", "foreign_request", "a second client was seen")
    summary = make_summary(plan, {}, status="INCOMPLETE", exit_code=12)
    page = html_page(load_window(write_folder(tmp_path / "w", plan, values, summary)))
    assert "<title>K1-short-b1-r0: refused, a second client was seen</title>" in page


def test_the_interval_plot_has_zero_the_two_percent_line_and_each_series(tmp_path: Path) -> None:
    files = load_window(demo_folder(tmp_path / "w"))
    rows = [(row.metric, row) for row in series_rows(files) if row.cell == "short-b1"]
    plot = str(interval_plot(rows, key="k"))
    zero = float(re.findall(r'x1="([\d.]+)"[^>]*class="zero"', plot)[0])
    required = float(re.findall(r'x1="([\d.]+)"[^>]*class="required"', plot)[0])
    bars = [
        (float(x), float(x) + float(width))
        for x, width in re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', plot)
    ]
    points = [float(x) for x in re.findall(r'<circle cx="([\d.]+)"', plot)]
    assert len(bars) == len(points) == 3
    scale = (required - zero) / 0.02
    for (low, high), point, (_, row) in zip(bars, points, rows, strict=True):
        assert row.low is not None
        assert row.high is not None
        assert row.gain is not None
        assert low == pytest.approx(zero + scale * row.low, abs=0.2)
        assert high == pytest.approx(zero + scale * row.high, abs=0.3)
        assert point == pytest.approx(zero + scale * row.gain, abs=0.2)


def test_hostile_texts_are_shown_and_do_nothing(tmp_path: Path) -> None:
    plan = make_plan(cells={EVIL: True})
    plan["cells"][EVIL] = {EVIL: EVIL}
    plan["window_id"] = EVIL
    values = make_values(plan, {"fast": 0.08})
    values[0] = broken(values[0], "failed", "k", "placeholder")
    values[0]["reason"] = EVIL
    for line in values[1:]:
        line["values"][EVIL] = {"value": 1.0, "unit": EVIL}
    series = {"metric": EVIL, "role": EVIL, "design": EVIL, "reason": EVIL, "gain": 0.1}
    decision = {
        "verdict": EVIL,
        "cells": {EVIL: {"verdict": EVIL, "reason": EVIL, "series": [series]}},
    }
    summary = make_summary(
        plan,
        {EVIL: (decision, [EVIL])},
        status="INCOMPLETE",
        exit_code=20,
        stopped=EVIL,
        incomplete=[EVIL],
        alerts=[EVIL],
        notes=[EVIL],
        advisory={EVIL: [EVIL]},
        restore={"status": EVIL, "reason": EVIL},
        watch={"status": EVIL},
        chain=EVIL,
        production_commit=EVIL,
        target={"kind": EVIL, EVIL: EVIL},
        arms=[{"name": EVIL, "role": EVIL}, {"name": "fast", "role": "candidate"}],
        starts=[{"name": EVIL, "arm": EVIL, "reason": EVIL, "started_utc": EVIL}],
        promotion={"arm": EVIL, "profile": EVIL, "cells": [EVIL]},
        spreads={f"{EVIL}/{EVIL}": {"in_window_cv": 0.1, "archive_cv": 0.1}},
        software={EVIL: EVIL},
        archive={"path": EVIL, "before": {"rows": 1, "sha256": EVIL}, "appended": 0},
        window={
            "id": EVIL,
            "lane": EVIL,
            "name": EVIL,
            "hypothesis": EVIL,
            "kind": EVIL,
            "plan_digest": EVIL,
        },
    )
    raw = write_html(write_folder(tmp_path / "w", plan, values, summary)).read_text()
    page = Page(raw)
    assert page.count("script") == 0
    assert "49" not in page.text().partition("alert(1)")[2][:200]
    assert "<script>alert(1)</script>" in page.text()
    assert not {char for char in raw if ord(char) < 32} - {"\n"}
    assert "\u202e" not in raw
    assert "\\u202e" in raw


def test_claims_and_ledgers_stand_on_the_page_and_on_the_terminal(tmp_path: Path) -> None:
    plan = make_plan()
    claim = ClaimInfo(
        text="<b>the slab</b> is a threshold",
        cell="short-b1",
        metric="ms_per_round",
        from_arm="control",
        to_arm="fast",
        direction="flat",
        threshold=0.03,
        answer="FALSIFIED",
        reason="+8.9%, between +6.0% and +11.8%",
    )
    ledgers = {"fast": ("kv K dtype: f16 -> q8_0",)}
    summary = make_summary(plan, {}, status="COMPLETE", claims=(claim,), ledgers=ledgers)
    folder = write_folder(tmp_path / "w", plan, make_values(plan, {}), summary)
    page = html_page(load_window(folder))
    assert "<b>the slab</b>" not in page
    assert "&lt;b&gt;the slab&lt;/b&gt; is a threshold" in page
    section = page[page.index("Boot ledger of fast") :]
    assert "<li>kv K dtype: f16 -&gt; q8_0</li>" in section[: section.index("</section>")]
    shown = " ".join(render_files(load_window(folder), width=120, color=False).split())
    assert "claim FALSIFIED: <b>the slab</b> is a threshold (short-b1/ms_per_round" in shown
    assert "ledger fast kv K dtype: f16 -> q8_0" in shown


def test_production_down_cannot_be_overlooked(tmp_path: Path) -> None:
    folder = demo_folder(
        tmp_path / "w",
        exit_code=20,
        restore={"status": "FAILED", "reason": "port 8000 refuses"},
        alerts=["run dsv41 recover"],
    )
    page = page_of(folder)
    alerts = [attrs for _, attrs in page.tags if attrs.get("role") == "alert"]
    assert len(alerts) == 2
    text = page.text()
    assert text.index("PRODUCTION IS DOWN") < text.index("exit 20")


def test_a_production_that_a_chain_left_down_is_no_alarm(tmp_path: Path) -> None:
    restore = {"status": "CHAINED: production left down", "seconds": 0.0}
    source = html_page(load_window(demo_folder(tmp_path / "w", chain="CHAINED", restore=restore)))
    assert 'role="alert"' not in source
    assert '<span class="open">CHAINED: production left down</span>' in source


def test_a_killed_window_and_an_empty_one_have_a_page(tmp_path: Path) -> None:
    plan = make_plan()
    killed = page_of(write_folder(tmp_path / "k", plan, make_values(plan, {})[:4], None))
    assert "There is no summary.json" in killed.text()
    refused = make_summary(plan, {}, status="REFUSED", exit_code=13, stopped="foreign HOLD")
    empty = page_of(write_folder(tmp_path / "e", None, [], refused))
    assert "Stopped: foreign HOLD" in empty.text()


def test_plots_have_names_for_those_who_do_not_see_them(tmp_path: Path) -> None:
    page = page_of(demo_folder(tmp_path / "w"))
    plots = [attrs for tag, attrs in page.tags if tag == "svg" and attrs.get("role") == "img"]
    assert len(plots) == 2 * (4 + 1)
    ids = [attrs["id"] for _, attrs in page.tags if attrs.get("id")]
    assert len(ids) == len(set(ids))
    for plot in plots:
        assert set(str(plot["aria-labelledby"]).split()) <= set(ids)


def test_texts_of_a_plot_stay_inside_it() -> None:
    items = [
        Item(f"{'s' * 40}{n}", f"{'start' * 9}{n}", f"{'arm' * 20}", "c", 0, n, True, "measured",
             values={"m" * 50: {"value": 1e8 + n, "unit": "u" * 30}})
        for n in range(3)
    ]  # fmt: skip
    plot = str(
        run_plot(items, "m" * 50, "u" * 30, ("x",), lower_is_better=False, key="k", width=440)
    )
    for x, anchor, size, text in re.findall(
        r'<text x="([\d.]+)"[^>]*text-anchor="(\w+)" font-size="(\d+)"[^>]*>([^<]*)<', plot
    ):
        wide = len(text) * 6.7 * int(size) / 12
        left = float(x) - {"start": 0, "middle": wide / 2, "end": wide}[anchor]
        assert left >= -1, text
        assert left + wide <= 441, text


def test_many_starts_of_one_repeat_are_drawn(tmp_path: Path) -> None:
    starts = tuple((f"{'CX'[n % 2]}{n // 2 + 1}", ("control", "fast")[n % 2]) for n in range(60))
    plan = make_plan(starts=starts, cells={"short-b1": True}, repeats=1)
    values = make_values(plan, {"fast": 0.05})
    summary = make_summary(plan, {"fast": decide(plan, values, "fast")})
    page = page_of(write_folder(tmp_path / "w", plan, values, summary))
    assert page.text().count("run order, 60 repeats") == 1


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 10.0, (0, 2, 4, 6, 8, 10)),
        (18.3, 20.1, (18.5, 19.0, 19.5, 20.0)),
        (-0.3, 0.3, (-0.2, 0.0, 0.2)),
        (5.0, 5.0, (5.0,)),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: tuple[float, ...]) -> None:
    assert ticks(low, high, 5 if low != -0.3 else 3) == pytest.approx(expected)


def test_fit_cuts_with_an_ellipsis() -> None:
    assert fit("short", 100) == "short"
    assert fit("a" * 100, 67) == "a" * 9 + "…"
