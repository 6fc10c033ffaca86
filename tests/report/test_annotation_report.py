from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from annotations import real, repeated, with_durations, with_gap, with_manifest, with_tables
from browser import Tab, run_chromium
from click.testing import CliRunner

from tlk_tracking.analysis.comparison import Comparison, compare_annotations
from tlk_tracking.annotation.kernel_annotation import REPORT_FILE, KernelAnnotation
from tlk_tracking.cli import tlk
from tlk_tracking.core.gaps import GapReason
from tlk_tracking.core.records import Availability
from tlk_tracking.report.annotation_report import render_report
from tlk_tracking.report.charts import Bar, draw_bars
from tlk_tracking.report.comparison_report import render_comparison
from tlk_tracking.report.page import MAX_PAGE_BYTES
from tlk_tracking.tracking.mlflow_tracking import log_annotation

HOSTILE = (
    "</script><script>window.harmed = 1</script>",
    "<img src=x onerror='window.harmed = 1'>",
    "\"' onmouseover='window.harmed = 1' x='",
    "$x^{$ \\frac{ %n {{ 7 * 7 }} {% raw %}",
    "\x1b[31mred\x00\x7f\u202egnihton\ud7ff\ufffe\U0001f9ea",
)


def _comparison() -> Comparison:
    return compare_annotations(real("eager_transformer"), real("compiled_transformer"))


def _slowed() -> Comparison:
    name = real("eager_transformer").launch_table["launch_name"].to_pylist()[10]
    before, after = (repeated(real("eager_transformer"), steps=9, noise=0.02, seed=seed) for seed in (0, 1))
    return compare_annotations(
        before, with_durations(after, lambda row: 3.0 if row["launch_name"] == name else 1.0)
    )


def _with_names(annotation: KernelAnnotation, names: list[str]) -> KernelAnnotation:
    launches = annotation.launch_table
    repeated_names = [names[row % len(names)] for row in range(len(launches))]
    place = launches.schema.get_field_index("launch_name")
    column = pa.array(repeated_names).dictionary_encode()
    return with_tables(annotation, launches=launches.set_column(place, launches.schema.field(place), column))


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with run_chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser.new_tab()


def _open(tab: Tab, html: str, folder: Path) -> None:
    path = folder / "page.html"
    path.write_text(html, encoding="utf-8")
    tab.open(path.as_uri())


def _cells(tab: Tab, section: str, column: int) -> list[str]:
    texts: list[str] = tab.evaluate(
        f"[...document.querySelectorAll('#{section} tbody tr')].filter(row => !row.hidden)"
        f".map(row => row.cells[{column}].textContent)"
    )
    return texts


@pytest.mark.parametrize("name", ["eager_transformer", "compiled_transformer", "ddp_rank0", "warmup_leak"])
def test_a_page_of_a_real_window_is_small_and_names_no_other_address(name: str) -> None:
    html = render_report(real(name))
    assert len(html.encode()) < MAX_PAGE_BYTES
    assert set(re.findall(r"https?://[^\"'\s<]+", html)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


def test_a_page_of_a_huge_window_stays_under_the_limit_and_counts_what_it_leaves_out() -> None:
    names = [f"kernel_{number}_{'<&>' * 700}" for number in range(138)]
    many = _with_names(real("eager_transformer"), names)
    html = render_report(many)
    assert len(html.encode()) < MAX_PAGE_BYTES
    one_step = _with_names(
        repeated(real("eager_transformer"), steps=20), [f"{n}{'é' * 900}" for n in range(2760)]
    )
    html = render_report(one_step)
    assert len(html.encode()) < MAX_PAGE_BYTES
    assert re.search(r"\d+ more rows are not on this page; all of them are in the annotation", html)


def test_every_number_of_a_lower_bound_has_its_sign() -> None:
    html = render_report(with_gap(real("eager_transformer"), GapReason.LAUNCH_WITHOUT_RECORD))
    numbers = re.findall(r'<td class="number" data-order="[^"]+"[^>]*>([^<]+)</td>', html)
    gap_counts = ["1"]
    assert [number for number in numbers if not number.startswith(("≥ ", "? "))] == gap_counts


def test_a_gap_is_shown_with_its_count_and_evidence() -> None:
    html = render_report(real("compiled_transformer"))
    (gap,) = real("compiled_transformer").manifest.gaps
    assert f"<td>{gap.reason.value}</td>" in html
    assert f">{gap.count}</td>" in html
    assert f"<td>{gap.evidence}</td>" in html or f'<td class="long">{gap.evidence}</td>' in html


def test_a_window_without_a_gap_says_so() -> None:
    assert "<p>No gap was found.</p>" in render_report(real("eager_transformer"))


def test_unavailable_device_telemetry_is_said_on_top_and_has_no_device_number() -> None:
    eager = real("eager_transformer")
    unavailable = with_manifest(
        with_tables(
            eager, launches=eager.launch_table.slice(0, 0), relations=eager.relation_table.slice(0, 0)
        ),
        availability=Availability.UNAVAILABLE,
        availability_reason="no CUDA device <here>",
        lower_bound=True,
        lower_bound_reasons=(GapReason.NO_DEVICE_EVIDENCE,),
    )
    html = render_report(unavailable)
    assert "device telemetry was unavailable: no CUDA device &lt;here&gt;" in html
    assert "device time ms" not in html
    assert "No gap was found." not in html
    assert "≥ 338" in html


@pytest.mark.parametrize("window", [real("eager_transformer"), repeated(real("eager_transformer"), steps=9)])
def test_one_annotation_makes_one_page(window: KernelAnnotation) -> None:
    assert render_report(window) == render_report(window)


def test_only_the_script_of_the_page_itself_may_run() -> None:
    html = render_report(real("eager_transformer"))
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in html


def test_a_chart_draws_any_name_as_text_without_a_warning() -> None:
    svg = draw_bars([Bar(label=name, value=1.0, text=name) for name in HOSTILE], title=HOSTILE[0], unit="ms")
    assert svg.startswith("<svg")
    assert "<script" not in svg
    assert "<img" not in svg


@pytest.mark.parametrize("letter", ["W", "i"])
def test_bars_keep_their_room_beside_the_widest_texts(letter: str) -> None:
    svg = draw_bars([Bar(label=letter * 60, value=1.0, text=letter * 60)], title="bars", unit="ms")
    left, right = _edges_of_the_bar(svg)
    assert 0 < left < right < 72 * 7.2


def test_a_long_name_and_a_long_text_fit_beside_the_bars() -> None:
    text = "≥12,345.67 → 12,345.67 ms"
    left, right = _edges_of_the_bar(
        draw_bars([Bar(label="kernel_of_a_long_name" * 2, value=1.0, text=text)], title="bars", unit="ms")
    )
    # At least half the height of a font is the width of its average letter.
    assert left > 42 * 5
    assert right < 72 * 7.2 - len(text) * 8.5 / 2


def _edges_of_the_bar(svg: str) -> tuple[float, float]:
    """Return the left and the right edge of the only bar, in points."""
    (path,) = re.findall(r'<path d="M ([^"]*)"[^>]*fill: var\(--first\)', svg)
    across = [float(pair.split()[0]) for pair in re.split("[Lz]", path) if pair.strip()]
    return min(across), max(across)


def test_a_comparison_page_shows_circumstances_bounds_verdicts_and_reasons() -> None:
    html = render_comparison(_comparison())
    assert "launched_outside_dispatcher" in html
    assert "138 → 117" in html
    assert "≥ 63" in html
    assert ">DECREASED</td>" in html
    assert "the candidate&#39;s value is only a lower bound (launched_outside_dispatcher)" in html


def test_a_page_of_several_candidates_has_sections_for_each() -> None:
    eager, compiled = real("eager_transformer"), real("compiled_transformer")
    html = render_comparison(
        compare_annotations(eager, eager, compiled, labels=["base", "same <one>", "compiled"])
    )
    assert "What changed of same &lt;one&gt;" in html
    assert "What changed of compiled" in html
    anchors = re.findall(r'<section id="([^"]+)"', html)
    assert len(anchors) == len(set(anchors))


def test_the_command_line_writes_both_pages(tmp_path: Path) -> None:
    for name in ("eager_transformer", "compiled_transformer"):
        real(name).save(tmp_path / name)
    pages = tmp_path / "one.html", tmp_path / "two.html"
    eager, compiled = str(tmp_path / "eager_transformer"), str(tmp_path / "compiled_transformer")
    one = CliRunner().invoke(tlk, ["report", eager, "--html", str(pages[0])])
    two = CliRunner().invoke(tlk, ["compare", eager, compiled, "--html", str(pages[1])])
    assert (one.exit_code, two.exit_code) == (0, 0)
    assert [page.read_text(encoding="utf-8")[:15] for page in pages] == ["<!DOCTYPE html>"] * 2


def test_a_page_asks_for_nothing_and_complains_of_nothing_in_a_browser(tab: Tab, tmp_path: Path) -> None:
    for html in (render_report(real("eager_transformer")), render_comparison(_slowed())):
        _open(tab, html, tmp_path)
        assert tab.requests == [(tmp_path / "page.html").as_uri()]
        assert tab.complaints == []


def test_names_stay_text_in_a_browser(tab: Tab, tmp_path: Path) -> None:
    hostile = _with_names(real("eager_transformer"), list(HOSTILE))
    pages = [
        render_report(hostile),
        render_comparison(compare_annotations(hostile, real("eager_transformer"), labels=HOSTILE[:2])),
    ]
    for html in pages:
        _open(tab, html, tmp_path)
        assert tab.evaluate("window.harmed") is None
        assert tab.evaluate("document.scripts.length") == 1
        assert tab.evaluate("document.images.length") == 0
        assert tab.complaints == []
        assert not re.search(r"[\x00\x1b\x7f\u202e]", html)
        assert HOSTILE[0] in tab.evaluate("document.body.textContent")


def test_a_click_on_a_heading_sorts_numbers_by_value(tab: Tab, tmp_path: Path) -> None:
    _open(tab, render_report(real("eager_transformer")), tmp_path)
    titles = tab.evaluate("[...document.querySelectorAll('#kernels th')].map(th => th.textContent)")
    column = titles.index("launches")
    for sort in ("descending", "ascending"):
        tab.evaluate(f"document.querySelectorAll('#kernels th button')[{column}].click()")
        values = [float(text.replace(",", "")) for text in _cells(tab, "kernels", column)]
        assert values == sorted(values, reverse=sort == "descending")
        assert (
            tab.evaluate(f"document.querySelectorAll('#kernels th')[{column}].getAttribute('aria-sort')")
            == sort
        )


def test_a_table_is_sorted_with_the_keyboard_alone(tab: Tab, tmp_path: Path) -> None:
    _open(tab, render_report(real("eager_transformer")), tmp_path)
    before = _cells(tab, "kernels", 0)
    reached = "document.activeElement === document.querySelector('#kernels th button')"
    for _ in range(40):
        tab.press("Tab", code=9)
        if tab.evaluate(reached):
            break
    assert tab.evaluate(reached)
    tab.press("Enter", code=13)
    assert tab.evaluate("document.querySelector('#kernels th').getAttribute('aria-sort')") == "ascending"
    after = _cells(tab, "kernels", 0)
    assert sorted(after) == sorted(before)
    assert after != before


def test_a_filter_hides_rows_without_its_words_and_counts_the_rest(tab: Tab, tmp_path: Path) -> None:
    _open(tab, render_comparison(_comparison()), tmp_path)
    everything = len(_cells(tab, "kernel", 0))
    tab.evaluate("document.querySelector('#kernel input').focus()")
    tab.call("Input.insertText", text="TRITON added launches")
    shown = _cells(tab, "kernel", 0)
    assert shown
    assert all(name.startswith("triton_") for name in shown)
    said = tab.evaluate("document.querySelector('#kernel output').textContent")
    assert said == f"{len(shown)} of {everything} rows"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_page_contrast_in_light_and_dark(tab: Tab, tmp_path: Path, scheme: str) -> None:
    tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    _open(tab, render_comparison(_slowed()), tmp_path)
    for where in ("body", "td.increased", "td.unchanged", "nav a", ".legend", "dt", "svg text"):
        contrast = _contrast(tab, where)
        assert contrast >= 4.5, (where, contrast)
    tab.call("Emulation.setEmulatedMedia", features=[])


def _contrast(tab: Tab, selector: str) -> float:
    """Return the contrast of an element's text against what is behind it, as WCAG defines it."""
    colours = tab.evaluate(
        f"""(() => {{
            const element = document.querySelector({selector!r});
            let behind = element;
            while (getComputedStyle(behind).backgroundColor === 'rgba(0, 0, 0, 0)') behind = behind.parentElement;
            const style = getComputedStyle(element);
            const ink = element instanceof SVGElement ? style.fill : style.color;
            return [ink, getComputedStyle(behind).backgroundColor];
        }})()"""
    )
    light, dark = sorted((_luminance(colour) for colour in colours), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    red, green, blue = (int(part) / 255 for part in re.findall(r"\d+", colour)[:3])
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in (red, green, blue)
    ]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def test_print_shows_whole_tables_and_no_tools(tab: Tab, tmp_path: Path) -> None:
    tab.call("Emulation.setEmulatedMedia", media="print")
    _open(tab, render_report(real("eager_transformer")), tmp_path)
    assert tab.evaluate("getComputedStyle(document.querySelector('.tools')).display") == "none"
    assert tab.evaluate(
        "[...document.querySelectorAll('.scroll')].every(box => box.scrollHeight === box.clientHeight)"
    )
    pages = base64.b64decode(tab.call("Page.printToPDF")["data"])
    assert pages.startswith(b"%PDF-")
    tab.call("Emulation.setEmulatedMedia", media="")


def test_a_narrow_screen_scrolls_tables_but_not_the_page(tab: Tab, tmp_path: Path) -> None:
    tab.call("Emulation.setDeviceMetricsOverride", width=420, height=800, deviceScaleFactor=1, mobile=False)
    for html in (render_report(real("eager_transformer")), render_comparison(_comparison())):
        _open(tab, html, tmp_path)
        assert tab.evaluate("document.documentElement.scrollWidth") <= 420
    tab.call("Emulation.clearDeviceMetricsOverride")


def test_every_control_and_drawing_has_a_name(tab: Tab, tmp_path: Path) -> None:
    _open(tab, render_comparison(_slowed()), tmp_path)
    nameless = tab.evaluate(
        """[...document.querySelectorAll('button, input, svg, [role=region]')].filter(
            element => !(element.getAttribute('aria-label') || element.textContent.trim())).length"""
    )
    assert nameless == 0
    ids = tab.evaluate("[...document.querySelectorAll('[id]')].map(element => element.id)")
    own = [each for each in ids if not re.fullmatch(r"[mp][0-9a-f]{10}", each)]  # of matplotlib's drawings
    assert len(own) == len(set(own))


def test_the_mlflow_ui_shows_the_report_as_an_artifact_that_sorts(
    tab: Tab, mlflow_server: str, tmp_path: Path
) -> None:
    from mlflow import MlflowClient

    window = real("compiled_transformer")
    window.save(tmp_path / "window")
    (tmp_path / "window" / REPORT_FILE).write_text(render_report(window), encoding="utf-8")
    client = MlflowClient(tracking_uri=mlflow_server)
    run = client.create_run(client.create_experiment("report in the UI"))
    log_annotation(tmp_path / "window", run.info.run_id, mlflow_server)

    place = f"kernel_telemetry/{window.folder_name}/{REPORT_FILE}"
    tab.open(
        f"{mlflow_server}/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}/artifacts/{place}"
    )
    frame = tab.attach_frame()
    frame.evaluate(
        """new Promise(done => {
            const look = () => document.querySelector('#kernels th button') ? done() : setTimeout(look, 50);
            look();
        })"""
    )
    assert (
        frame.evaluate("document.querySelector('h1').textContent") == f"Kernel telemetry {window.folder_name}"
    )
    frame.evaluate("document.querySelector('#kernels th button').click()")
    assert frame.evaluate("document.querySelector('#kernels th').getAttribute('aria-sort')") == "ascending"
