"""The page of a run: its numbers, its text in the face of hostile names, its data and its files."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from jinja2 import TemplateAssertionError, UndefinedError

from offload.core.errors import ConfigError, FormatError
from offload.core.timeline import (
    COMPUTE,
    COMPUTING,
    DISK_READS,
    DISK_WRITES,
    IN_MODEL,
    IN_STEP,
    OTHER,
    ROWS,
    STEP,
    TO_DEVICE,
    UPDATE,
    WAITING,
    Event,
    StepFact,
)
from offload.telemetry import run_file
from offload.telemetry.iterations import is_wait, iterations_of
from offload.telemetry.run_file import About, ParamFact, Run, UnitFact
from offload.telemetry.words import show_ratio, show_seconds, show_share
from offload.tools.html_report import make_page, make_picture, to_perfetto
from offload.tools.html_report.page import environment
from offload.tools.html_report.picture import COLOURS
from offload.tools.html_report.timeline import (
    HtmlReportUnits,
    costs_of,
    draw,
    tiers_of,
    typical_iteration,
)

MIB = 1 << 20
HOSTILE = "<script>alert('x')</script>\"&amp;</pre>]]>{{ 7*7 }}{% raw %}\u202e\ud800"
PARAM = "group 0 param 1 (64, 64)"


def fact(number: int, begin_s: float, end_s: float, waited_s: float = 0.1) -> StepFact:
    """Make a step of 0.5 s of update, `waited_s` of waits in step() and the rest other; 0.2 s of
    waits are outside of step().
    """
    step_s = end_s - begin_s
    return StepFact(
        number,
        begin_s,
        end_s,
        {
            "step(): update": 0.5,
            "step(): disk read": waited_s,
            "step(): other": step_s - 0.5 - waited_s,
            "model: parameter read": 0.2,
        },
        {
            "disk_read_bytes": 30 * MIB,
            "disk_written_bytes": 10 * MIB,
            "parameter_hits": 3,
            "parameter_misses": 1,
        },
    )


ABOUT = About(
    title="Model",
    made_by="offload 0, torch 2",
    date="2026-01-01 00:00 UTC",
    cpu="CPU",
    cores=2,
    device="cpu",
    kind="prepare",
    prefetch_depth="auto",
    activations="keep",
    tuned=None,
    host_bytes=100 * MIB,
    device_bytes=None,
    directories=1,
    plan="parameters  all of them\nverdict     fits",
    shares={"parameters": 40 * MIB, "gradients": 20 * MIB, "state": 30 * MIB},
    chunk_numel=1024,
    units=(
        UnitFact("first", 8 * MIB, (0,), False, False),
        UnitFact("second and 2 more", 4 * MIB, (1,), False, False),
    ),
    params=(
        ParamFact("group 0 param 0 (8, 8)", 64, 4, ("m", "v"), 0, 256, False),
        ParamFact(PARAM, 4096, 4, ("m", "v"), 1, 16384, False),
    ),
    order=((0, 0), (0, 1), (1, 1), (1, 0)),
    steps=(fact(1, 0.0, 2.0), fact(2, 4.0, 6.0), fact(3, 8.0, 10.0)),
    fallbacks={},
    numbers={
        "speed/disk_bytes_per_s": 40e6,
        "count/parameter_hits": 9.0,
        "count/parameter_misses": 3.0,
        "host_bytes": 90.0 * MIB,
        "process/peak_bytes": 300.0 * MIB,
    },
)
EVENTS = (
    Event(STEP, "step 1", 0.0, 2.0),
    Event(COMPUTE, "forward 0: first", 2.0, 2.5),
    Event(DISK_READS, "parameters 1: second and 2 more", 2.1, 2.6, 4 * MIB),
    Event(WAITING, "parameter read: second and 2 more", 2.5, 2.7),
    Event(COMPUTE, "forward 1: second and 2 more", 2.7, 3.0),
    Event(COMPUTE, "backward 1: second and 2 more", 3.0, 3.6),
    Event(COMPUTE, "backward 0: first", 3.6, 4.0),
    Event(UPDATE, f"update: {PARAM}[0:512] and 3 more", 4.0, 4.5),
    Event(WAITING, f"disk read: {PARAM}[512:1024]", 4.5, 4.6),
    Event(DISK_READS, f"state chunk 7: {PARAM}[512:1024]", 4.0, 4.6, MIB),
    Event(DISK_WRITES, f"state chunk 6: {PARAM}[0:512] and 3 more", 4.5, 5.0, MIB),
    Event(STEP, "step 2", 4.0, 6.0),
)
RUN = Run(
    ABOUT,
    EVENTS,
    ("host: parameters", "host: optimizer state", "disk", "process"),
    ((0.0, (30 * MIB, 20 * MIB, 50 * MIB, 300 * MIB)), (3.0, (40 * MIB, 25 * MIB, 60 * MIB, 1))),
)
EMPTY = Run(
    replace(ABOUT, units=(), params=(), order=(), steps=(), shares={}, numbers={}, plan=""),
    (),
    (),
    (),
)


# --- numbers --------------------------------------------------------------------------------------


def test_an_iteration_goes_from_end_to_end_of_steps() -> None:
    found = RUN.iterations
    assert [one.total_s for one in iterations_of(ABOUT.steps)] == [None, 4.0, 4.0]
    assert (found.steps, found.span_s) == (3, (4.0, 4.0))
    assert (found.typical_s, found.step_s, found.is_whole) == (4.0, 2.0, True)


def test_parts_add_up_to_the_iteration_and_waits_are_told_apart() -> None:
    found = RUN.iterations
    assert sum(found.parts.values()) == pytest.approx(4.0)
    assert found.parts["outside"] == pytest.approx(1.8)
    assert found.stalls == pytest.approx({"model: parameter read": 0.2, "step(): disk read": 0.1})
    assert list(found.stalls) == ["model: parameter read", "step(): disk read"]
    assert found.stall_share == pytest.approx(0.3 / 4)


def test_the_ceiling_is_computing_or_the_disk() -> None:
    found = RUN.iterations
    assert found.limit == "computing"
    assert found.least_s == pytest.approx(3.7)
    slow = replace(RUN, about=replace(ABOUT, numbers={"speed/disk_bytes_per_s": 10.6e6}))
    found = slow.iterations
    assert found.limit == "the disk"
    assert found.least_s == pytest.approx(40 * MIB / 10.6e6)


def test_no_run_is_faster_than_its_ceiling() -> None:
    """The rate that step() saw may be below that of the whole iteration."""
    slow = replace(RUN, about=replace(ABOUT, numbers={"speed/disk_bytes_per_s": 1.0}))
    assert slow.iterations.share_of_ceiling == pytest.approx(1.0)


def test_no_typical_iteration_is_faster_than_its_own_least() -> None:
    """One long iteration moves means, not medians: both numbers of the sentence are medians."""
    ends = [4.0, 8.0, 12.0, 16.0, 22.0]  # iterations of 4, 4, 4 and 6 s
    facts = tuple(fact(n + 1, end - 2.0, end) for n, end in enumerate(ends))
    found = replace(RUN, about=replace(ABOUT, steps=facts)).iterations
    assert found.typical_s == 4.0 and found.least_s == pytest.approx(3.7)
    assert found.share_of_ceiling == pytest.approx(found.least_s / found.typical_s)


def test_hits_and_bytes_are_those_of_an_iteration() -> None:
    found = RUN.iterations
    assert found.hit_rate == 0.75
    assert found.device_hit_rate is None
    assert found.moved["disk_read_bytes"] == 30 * MIB


def test_a_long_iteration_is_left_out_and_said() -> None:
    steps = [fact(n, 4.0 * n, 4.0 * n + 2) for n in range(5)]
    late = replace(fact(5, 118.0, 120.0), counts={"disk_read_bytes": 1 << 40})
    run = replace(RUN, about=replace(ABOUT, steps=(*steps, late)))
    found = run.iterations
    assert (found.left_out, found.typical_s) == (1, 4.0)
    assert found.moved["disk_read_bytes"] == 30 * MIB
    assert "Left out: 1" in make_page([run], ["x"])


def test_one_step_alone_is_told_as_such() -> None:
    run = replace(RUN, about=replace(ABOUT, steps=ABOUT.steps[:1]))
    found = run.iterations
    assert (found.is_whole, found.typical_s) == (False, 2.0)
    assert found.stalls == pytest.approx({"step(): disk read": 0.1})
    assert "step() takes 2 s" in make_page([run], ["x"])


def test_causes_that_compute_are_no_waits_wherever_they_are() -> None:
    for cause in (*COMPUTING, OTHER):
        assert not is_wait(IN_STEP + cause) and not is_wait(IN_MODEL + cause)
    assert is_wait(f"{IN_STEP}disk read") and is_wait(f"{IN_MODEL}parameter read")


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("forward 0: first", 0),
        ("parameters 1: second and 2 more", 1),
        ("parameter read: second and 2 more", 1),
        ("first", 0),
        (f"state chunk 0: {PARAM}[0:512] and 3 more", 1),
        (f"update: {PARAM}[0:512]", 1),
        ("activations 0", None),
        ("forward 99999999999999999999: first", 0),
        ("gradient norm", None),
        ("", None),
    ],
)
def test_events_belong_to_units(name: str, unit: int | None) -> None:
    assert HtmlReportUnits(ABOUT).find(name) == unit


def test_costs_of_units_are_those_of_whole_iterations() -> None:
    first, second = costs_of(RUN)
    assert first.seconds == pytest.approx({"forward": 0.5, "backward": 0.4})
    assert second.seconds["waiting"] == pytest.approx(0.3)
    assert (second.acts["read"], second.moved["read"]) == (2, 5 * MIB)
    twice = [e._replace(begin_s=e.begin_s + 4, end_s=e.end_s + 4) for e in EVENTS[1:]]
    both = costs_of(replace(RUN, events=(*EVENTS, *twice)))
    assert [cost.seconds for cost in both] == [pytest.approx(c.seconds) for c in (first, second)]


def test_the_iteration_that_is_shown_first_took_the_median_time() -> None:
    steps = [Event(STEP, "s", end_s - 0.5, end_s) for end_s in (1.0, 2.0, 9.0, 11.0)]
    assert typical_iteration(steps) == (9.0, 11.0)
    assert typical_iteration(steps[:1]) is None


def test_memory_of_the_host_has_the_gradients_that_torch_holds() -> None:
    host, disk, process = tiers_of(RUN)
    assert host.bands[0].label == "gradients (set aside)"
    assert (host.peak_bytes, host.budget_bytes) == (85 * MIB, 100 * MIB)
    assert (disk.peak_bytes, disk.budget_bytes, process.name) == (60 * MIB, None, "process")
    on_device = replace(RUN, about=replace(ABOUT, device="cuda:0"))
    assert tiers_of(on_device)[0].peak_bytes == 65 * MIB


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (1.2345, "1.23 s"),
        (0.0123, "12.3 ms"),
        (8.5e-5, "85 µs"),
        (12345.6, "12,346 s"),
    ],
)
def test_seconds_for_people(seconds: float, text: str) -> None:
    assert show_seconds(seconds) == text


def test_shares_and_ratios_for_people() -> None:
    assert [show_share(s) for s in (0.0, 0.0123, 0.0996, 1.0)] == [
        "0.0 %",
        "1.2 %",
        "10 %",
        "100 %",
    ]
    assert [show_ratio(2.0, b) for b in (1.0, 2.0, 0.0, None)] == ["0.50×", "same", "to 0", ""]  # noqa: RUF001


# --- markup ---------------------------------------------------------------------------------------


class Elements(HTMLParser):
    """A parser that collects every element with its attributes. `open`: what was not closed."""

    VOID = frozenset({"meta", "link", "input"})

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, name: str, attributes: Any) -> None:
        self.found.append((name, dict(attributes)))
        if name not in self.VOID:
            self.open.append(name)

    def handle_startendtag(self, name: str, attributes: Any) -> None:
        self.found.append((name, dict(attributes)))

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, data: str) -> None:
        self.text += data

    def named(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for found, attributes in self.found if found == name]


def rendered(template: str, **names: object) -> str:
    return environment().from_string(template).render(**names)


def test_text_is_escaped_unless_it_is_markup() -> None:
    inner = "{% macro inner(text) %}<b>{{ text }}</b>{% endmacro %}"
    made = rendered(
        inner + '<p title="{{ quotes }}">{{ inner(text) }}</p>', quotes="\"'<", text="<i>"
    )
    assert made == '<p title="&#34;&#39;&lt;"><b>&lt;i&gt;</b></p>'
    cells = '{% import "parts.html" as show %}{{ show.row([text, text|seconds_or, "<hr>"]) }}'
    with pytest.raises(TemplateAssertionError, match="seconds_or"):
        rendered(cells, text="<i>")
    assert "<i>" not in rendered(cells.replace("|seconds_or", ""), text="<i>")
    with pytest.raises(UndefinedError, match="nothing"):
        rendered("{{ nothing }}")


def test_what_cannot_be_seen_is_spelled_out() -> None:
    text = "a\u202eb\ud800\x00\nc"
    assert rendered("{{ text }}", text=text) == "a\\u202eb\\ud800\\x00\nc"
    both = '{% import "parts.html" as show %}{{ show.row([text, text ~ "µ"]) }}'
    assert rendered(both, text=text).replace("\n", "").isprintable()


def hostile() -> Run:
    units = tuple(replace(unit, name=f"{HOSTILE}{n}") for n, unit in enumerate(ABOUT.units))
    params = tuple(replace(param, name=HOSTILE) for param in ABOUT.params)
    texts = dict.fromkeys(
        ("title", "made_by", "date", "cpu", "device", "kind", "prefetch_depth", "activations"),
        HOSTILE,
    )
    steps = tuple(
        replace(step, seconds={**step.seconds, f"step(): {HOSTILE}": 1.0}) for step in ABOUT.steps
    )
    about = replace(
        ABOUT,
        **texts,
        tuned=HOSTILE,
        plan=f"{HOSTILE}\n{HOSTILE}",
        units=units,
        params=params,
        fallbacks={HOSTILE: HOSTILE},
        shares={HOSTILE: 1},
        steps=steps,
    )
    events = tuple(e._replace(name=f"{e.name}{HOSTILE}") for e in EVENTS)
    waits = (Event(WAITING, f"parameter read: {HOSTILE}0", 2.1, 2.2),)
    return Run(about, events + waits, (f"host: {HOSTILE}", HOSTILE), ((0.0, (1, 2)), (1.0, (3, 4))))


@pytest.mark.parametrize("count", [1, 2])
def test_hostile_names_stay_text(count: int) -> None:
    page = make_page([hostile()] * count, [HOSTILE] * count)
    page.encode("utf-8")
    elements = Elements(page)
    assert elements.open == []
    assert [a.get("type") for a in elements.named("script")] == ["application/json", None]
    assert "\u202e" not in page
    assert page.count("<script>alert") == 0
    assert "<script>alert(" in elements.text
    assert "{{ 7*7 }}{% raw %}" in elements.text, "no text is a template"
    assert "A fall-back was taken, for the reasons below: <script>alert(" in elements.text
    for name, attributes in elements.found:
        assert not any(key.startswith("on") for key in attributes), name


def test_a_picture_of_hostile_names_is_one() -> None:
    formula = replace(RUN, about=replace(ABOUT, title=r"$\frac{$ \U0001f600"))
    for run in (hostile(), formula, EMPTY):
        assert make_picture([run, RUN], [HOSTILE, "$x_"])[:8] == b"\x89PNG\r\n\x1a\n"


# --- the document ---------------------------------------------------------------------------------


def policy_of(page: str) -> str:
    metas = Elements(page).named("meta")
    (content,) = [m["content"] for m in metas if m.get("http-equiv") == "Content-Security-Policy"]
    assert content is not None
    return content


def test_the_policy_lets_run_only_the_script_and_the_style_of_the_page() -> None:
    page = make_page([hostile()], ["x"])
    policy = dict(part.strip().split(" ", 1) for part in policy_of(page).split(";"))
    assert (policy["default-src"], policy["base-uri"]) == ("'none'", "'none'")
    for kind, pattern in (
        ("style-src", r"<style>(.*?)</style>"),
        ("script-src", r"<script>(.*?)</script>"),
    ):
        (inner,) = re.findall(pattern, page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert policy[kind] == f"'sha256-{digest}'"


def test_nothing_points_outside_of_the_page() -> None:
    elements = Elements(make_page([RUN, RUN], ["a", "b"]))
    ids = {attributes.get("id") for _, attributes in elements.found}
    for name, attributes in elements.found:
        assert "style" not in attributes, "a policy by hashes forbids it"
        assert not {"src", "srcset", "action", "data", "poster"} & set(attributes), name
        target = attributes.get("href")
        if target is not None:
            assert target == "data:," or target.removeprefix("#") in ids
    assert "http" not in make_page([RUN], ["a"]).replace("http-equiv", "")


def test_ids_are_used_once_and_what_is_labelled_is_there() -> None:
    for count in (1, 2):
        elements = Elements(make_page([RUN] * count, ["x"] * count))
        ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
        assert len(ids) == len(set(ids))
        for _, attributes in elements.found:
            assert attributes.get("aria-labelledby", ids[0]) in ids


def test_all_numbers_are_there_without_a_script() -> None:
    text = Elements(make_page([RUN], ["run.json"])).text
    for fact_told in (
        "Model",
        "CPU, 2 cores",
        "An iteration takes 4 s (median); 7.5 % of it is waiting",
        "outside step() for reads of parameters",
        "92 %",  # of the ceiling
        "75 %",  # hits
        "30 MiB",
        "taken of 100 MiB; peak RSS of the process 300 MiB",
        "second and 2 more",
        "verdict     fits",
        "None: everything ran in the way it should.",
    ):
        assert fact_told in text, fact_told


def test_the_page_begins_with_five_figures_and_what_helps() -> None:
    page = make_page([RUN], ["x"])
    assert page.count('<dd class="value">') == 5
    assert "prefetch hits" in page and "What helps" not in page and 'id="hints"' not in page
    numbers = {**ABOUT.numbers, "state_bytes_on_disk": 60.0 * MIB}
    steps = tuple(fact(n, 4.0 * n, 4.0 * n + 2, waited_s=1.0) for n in range(3))
    slow = replace(RUN, about=replace(ABOUT, steps=steps, numbers=numbers))
    text = Elements(make_page([slow], ["x"])).text
    assert "What helps" in text and 'host_memory="160MiB" (now 100 MiB) holds all' in text
    both = Elements(make_page([RUN, slow], ["x", "y"])).text
    assert "What helps B" in both and "What helps A" not in both


def test_two_runs_stand_beside_each_other_with_ratios() -> None:
    faster = tuple(replace(s, begin_s=s.begin_s / 2, end_s=s.end_s / 2) for s in ABOUT.steps)
    other = replace(RUN, about=replace(ABOUT, steps=faster, host_bytes=50 * MIB))
    text = Elements(make_page([RUN, other], ["before", "after"])).text
    assert "4 s in A, 2 s in B: B is 2 times as fast" in text
    assert "0.50×" in text  # noqa: RUF001
    assert "Timeline of A: before" in text and "Timeline of B: after" in text


def test_what_only_one_of_two_runs_has_is_shown() -> None:
    other = replace(RUN, about=replace(ABOUT, shares={"state": 30 * MIB, "activations": MIB}))
    text = Elements(make_page([RUN, other], ["before", "after"])).text
    assert re.search(r"host memory, parameters\s+40 MiB\s+none", text)
    assert re.search(r"host memory, activations\s+none\s+1 MiB", text)


@pytest.mark.parametrize("run", [EMPTY, replace(EMPTY, events=EVENTS), replace(RUN, events=())])
def test_what_was_not_recorded_is_said(run: Run) -> None:
    assert Elements(make_page([run], ["x"])).open == []
    assert Elements(make_page([run, RUN], ["x", "y"])).open == []
    assert "No step was recorded" in make_page([EMPTY], ["x"])


def test_a_page_has_one_run_or_two() -> None:
    with pytest.raises(ConfigError, match="one run or two"):
        make_page([RUN] * 3, ["x"] * 3)


def numbers_in(place: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """List the paths to all numbers, as keys from the outside in."""
    if isinstance(place, dict | list):
        keys = place if isinstance(place, dict) else range(len(place))
        return [found for key in keys for found in numbers_in(place[key], (*path, key))]
    return [path] if isinstance(place, int | float) and not isinstance(place, bool) else []


def test_a_run_of_absurd_numbers_is_a_page_all_the_same(seed: int) -> None:
    """Any numbers that the reader of the file lets through: zero, tiny, huge, in no order."""
    whole, chance = RUN.to_dict()["offload"], random.Random(seed)
    plain = json.loads(json.dumps(whole))
    places, pages = numbers_in(plain), 0
    for _ in range(150):
        data = copy.deepcopy(plain)
        for *outer, last in chance.sample(places, 4):
            place = data
            for key in outer:
                place = place[key]
            is_float = isinstance(place[last], float)
            place[last] = chance.choice([0.0, 5e-324, 1e17, 1e299] if is_float else [0, 1, 2**62])
        try:
            run = run_file.from_dict({"offload": data})
        except FormatError:
            continue
        assert Elements(make_page([run, RUN], ["x", "y"])).open == []
        json.dumps([to_perfetto([run], ["x"]), run.iterations.to_dict()], allow_nan=False)
        pages += 1
    assert pages > 20


# --- what is drawn --------------------------------------------------------------------------------


def test_every_event_is_drawn_in_a_lane_of_its_own() -> None:
    rows = [("read", 0.0, 4.0), ("read", 1.0, 2.0), ("read", 1.5, 5.0), ("read", 2.0, 3.0)]
    events = tuple(Event(DISK_READS, name, begin, end, 1) for name, begin, end in rows)
    drawn = draw(replace(RUN, events=events), ())
    assert [event[1] for event in drawn["events"]] == [0, 1, 2, 1]
    drawn = draw(RUN, tiers_of(RUN))
    assert len(drawn["events"]) == sum(event.row != STEP for event in EVENTS)
    assert drawn["first"] == [2e6, 6e6]
    assert drawn["memory"][0]["budget"] == 100 * MIB


def test_every_row_of_a_timeline_has_a_place_and_a_colour() -> None:
    events = tuple(Event(row, "x", 0.0, 1.0, 1) for row in ROWS)
    drawn = draw(replace(RUN, events=events), ())
    assert len(drawn["events"]) == len(ROWS) - 1
    assert (
        set(drawn["kinds"]) == set(COLOURS) == {kind for _, held in drawn["rows"] for kind in held}
    )


def test_embedded_data_ends_no_element() -> None:
    data = ["</script><!--", "&", "]]>", "\u2028\u202e\ud800", "'\""]
    text = rendered("{{ data|tojson }}", data=data)
    assert not set("<>&'") & set(text) and text.isascii()
    assert json.loads(text) == data
    with pytest.raises(ValueError):
        rendered("{{ data|tojson }}", data=[float("nan")])


def test_colours_stand_out_from_what_is_behind_them() -> None:
    """3:1 for what is drawn, 4.5:1 for text, in the light and in the dark theme; and the picture
    has the light theme's colours.
    """
    style = re.search(r"<style>(.*?)</style>", make_page([RUN], ["x"]), re.DOTALL)
    assert style
    day, night = (
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", part))
        for part in style[1].split("prefers-color-scheme: dark", 1)
    )
    night = {name: value for name, value in night.items() if name in day}
    for colours in (day, {**day, **night}):
        for kind in COLOURS:
            assert contrast(colours[kind], colours["panel"]) >= 3, kind
        for text in ("text", "soft", "accent"):
            assert contrast(colours[text], colours["panel"]) >= 4.5
            assert contrast(colours[text], colours["page"]) >= 4.5
    assert {kind: day[kind] for kind in COLOURS} == COLOURS


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio as WCAG 2 defines it."""

    def light(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


# --- other files ----------------------------------------------------------------------------------


def test_perfetto_gets_rows_and_memory_of_each_run() -> None:
    copied = replace(RUN, events=(*EVENTS, Event(TO_DEVICE, "first", 2.0, 2.1, MIB)))
    data = to_perfetto([copied, RUN], ["a.json", "b.json"])
    assert json.loads(json.dumps(data)) == data
    assert "offload" not in data
    events = data["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "Model (a.json)", 2: "Model (b.json)"}
    counters = [e for e in events if e["ph"] == "C" and e["pid"] == 1]
    assert {e["name"] for e in counters} == {"memory: host", "memory: disk", "memory: process"}
    assert max(sum(e["args"].values()) for e in counters if "host" in e["name"]) == 85 * MIB
    assert sum(e["ph"] == "X" for e in events) == 2 * len(EVENTS) + 1


def test_a_picture_has_300_dpi_and_two_runs_are_wider() -> None:
    one, two = make_picture([RUN], ["a"]), make_picture([RUN, RUN], ["a", "b"])
    assert width_of(one) == 2160 < width_of(two)
    assert b"pHYs" + (11811).to_bytes(4, "big") in one  # dots a metre


def width_of(png: bytes) -> int:
    assert png[12:16] == b"IHDR"
    return int.from_bytes(png[16:20], "big")
