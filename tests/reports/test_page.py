import io
import itertools
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from rich.console import Console

from nnunet_cpr.reports import write_report
from nnunet_cpr.reports.page import breakable
from nnunet_cpr.studies.definition import TrainerEntry
from tests.helpers.report_folds import DATASET, both, study, whole, write_fold, write_history

SECTIONS = [
    "result", "comparisons", "classes", "cases", "curves", "time", "cpr", "pictures", "methods",
]  # fmt: skip
VOID = {"br", "img", "link", "meta", "input", "hr", "wbr"}


class Page(HTMLParser):
    """Parsed elements and texts of a page."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements = []  # (tag, attributes)
        self.texts = []  # (tag, text) of headings and captions
        self.open = []
        self.feed(text)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("h1", "h2", "h3", "h4", "caption", "li", "p"):
            self.texts.append([tag, ""])

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        if self.texts and self.texts[-1][0] in self.open:
            self.texts[-1][1] += data

    def all(self, *tags):
        return [attributes for tag, attributes in self.elements if tag in tags]

    def words(self):
        return [" ".join(text.split()) for _, text in self.texts]


def report(tmp_path, planned, results, raw=None, preprocessed=None):
    files = write_report(
        planned, results, raw, preprocessed, tmp_path / "report", Console(file=io.StringIO())
    )
    return files[0]


def everything(tmp_path, **changes):
    planned = study(
        TrainerEntry("nnUNetTrainerSGD", "3e-5", "weight <decay>", {DATASET: 89.45}),
        TrainerEntry("nnUNetTrainerCPR", "2k & more", "CPR"),
        TrainerEntry("TheirTrainer"),
        source='"Somebody" & others',
        **changes,
    )
    return report(tmp_path, planned, *whole(tmp_path, planned))


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    return everything(tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def page(page_file):
    return Page(page_file.read_text())


def check_page(page):
    """Check what holds for every page."""
    assert [a["id"] for a in page.all("section")] == SECTIONS
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids)), "duplicate ids"
    for _, attributes in page.elements:
        for reference in ("aria-labelledby", "for"):
            assert attributes.get(reference) is None or attributes[reference] in ids
        for link in ("href", "xlink:href", "src", "srcset", "data"):
            target = attributes.get(link)
            if target is not None:
                assert target.startswith(("#", "data:")), f"external resource: {target[:80]}"
                assert not target.startswith("#") or target[1:] in ids, f"{target} leads nowhere"
        for value in attributes.values():
            for target in re.findall(r"url\(([^)]*)\)", value or ""):
                assert target.startswith("#") and target[1:] in ids
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(later <= earlier + 1 for earlier, later in itertools.pairwise(levels))
    assert page.all("html")[0]["lang"] == "en"
    for landmark in ("header", "nav", "main", "footer"):
        assert len(page.all(landmark)) == 1
    assert all(len(a.get("alt", "")) > 20 for a in page.all("img"))
    for svg in page.all("svg"):
        named = svg.get("role") == "img" and len(svg.get("aria-label", "")) > 20
        assert named or svg.get("aria-hidden") == "true"
    assert page.all("script") == [{}] and not page.all("iframe", "object", "embed")
    assert (
        len(page.all("table"))
        == len(page.all("caption"))
        == len(
            [
                a
                for a in page.all("div")
                if a.get("tabindex") == "0" and a["role"] == "region" and a["aria-label"]
            ]
        )
    )
    assert all(a.get("scope") in ("col", "row", "colgroup", "rowgroup") for a in page.all("th"))


def test_page_is_complete_and_accessible(page, page_file):
    check_page(page)
    assert page_file.stat().st_size < 1_500_000
    assert "http" not in re.sub(r"base64,[\w+/=]*", "", page_file.read_text())


def test_page_has_every_table_and_figure(page, page_file):
    words = page.words()
    text = page_file.read_text()
    assert "weight &lt;decay&gt;" in text and "&#34;Somebody&#34; &amp; others" in text
    assert "<strong>89.45</strong>" not in text  # one published number alone is not the best
    assert any("of CPR 2k & more differ from those of weight <decay> 3e-5" in w for w in words)
    pictures = [a["aria-label"] for a in page.all("svg") if "aria-label" in a]
    for kind, number in (
        ("Scatter plot of 16 cases", 2),
        ("Histogram of 16 differences", 2),
        ("Line chart of the", 3),
        ("Heat map of CPR's multipliers, 4 matrices over epochs 0 to 5", 1),
        ("Heat map of measure / bound", 1),
    ):
        assert len([p for p in pictures if p.startswith(kind)]) == number
    assert any("median 1.0050, from 0.9900 to 1.0200" in p for p in pictures)
    assert sum("case_" in w and "(fold" in w for w in words) == 0  # in a table, not in the text
    table = text[text.index('<table class="sortable">') :]
    table = table[: table.index("</table>")]
    assert table.count('<th scope="row">') == 16
    assert sum("Forest plot of the differences of Dice" in p for p in pictures) == 1


def test_extreme_cases_have_pictures_or_a_reason(page):
    """The images of the first three cases exist; seed 0 selects one of them and two others."""
    panels = [a["alt"] for a in page.all("img")]
    reasons = [w for w in page.words() if w.startswith("No picture of")]
    assert panels and len(panels) % 9 == 0 and len(panels) // 9 + len(reasons) == 3
    assert all("imagesTr" in r for r in reasons)


@pytest.mark.slow
def test_case_pictures_have_alternative_texts(tmp_path):
    planned = study("A", "B", folds=(0,))
    folders = whole(tmp_path, planned, cases=3)
    page = Page(report(tmp_path, planned, *folders).read_text())
    check_page(page)
    alts = [a["alt"] for a in page.all("img")]
    assert len(alts) == 27 and all(a["src"].startswith("data:image/webp") for a in page.all("img"))
    assert re.match(
        r"Axial slice \d+ of 12 of case_000\d with the ground truth: \d+ foreground", alts[0]
    )
    assert "pixels differ from the truth" in alts[1] and "prediction of B" in alts[2]
    assert sum(alt.startswith("Sagittal slice") for alt in alts) == 9
    figures = tmp_path / "report" / "figures"
    assert len(list(figures.glob("case-*.pdf"))) == len(list(figures.glob("case-*.svg"))) == 3


@pytest.mark.slow
def test_figures_of_many_trainers_are_bounded(tmp_path):
    names = [f"Trainer{i}" for i in range(20)]
    for i, name in enumerate(names):
        for fold in (0, 1):
            cases = {f"c{fold}{k}": both(0.5 + 0.01 * i + 0.001 * k) for k in range(7)}
            write_fold(tmp_path, name, fold, cases)
    path = report(tmp_path, study(*names), tmp_path)
    page = Page(path.read_text())
    check_page(page)
    labels = [a["aria-label"] for a in page.all("svg") if "aria-label" in a]
    scatter = [x for x in labels if x.startswith("Scatter plot")]
    assert len(scatter) == 8 and not any("against Trainer5 " in x for x in scatter)
    assert any("the 8 trainers with the best mean Dice; 11 trainers are in" in w for w in page.words())
    assert sum(x.startswith("Forest plot") for x in labels) == 2
    assert len(list((path.parent / "figures").iterdir())) < 100
    assert path.read_text().count("<wbr>") > 0


def test_long_names_can_break():
    assert breakable("nnUNetTrainerSGD_seed1") == "nnUNetTrainer<wbr>SGD_<wbr>seed1"
    assert breakable("<b> P(equivalent)") == "&lt;b&gt; P(equivalent)"


def test_missing_raw_data_is_reported(tmp_path):
    planned = study("A", "B")
    results, _, preprocessed = whole(tmp_path, planned)
    page = Page(report(tmp_path, planned, results, None, preprocessed).read_text())
    check_page(page)
    assert not page.all("img")
    assert sum("nnUNet_raw is not set" in w for w in page.words()) == 3


def test_page_of_one_finished_trainer(tmp_path):
    write_fold(tmp_path, "A", 0, {"a": both(0.8)})
    page = Page(report(tmp_path, study("A", "nnUNetTrainerCPR"), tmp_path).read_text())
    check_page(page)
    words = page.words()
    for sentence in (
        "nnUNetTrainerCPR and A cannot be compared by Dice: expected a run with values that both have "
        "finished, got none.",
        "No comparison has cases to show.",
        "There are no training logs.",
        "No run has a cpr_history.csv.",
    ):
        assert sentence in words
    path = report(tmp_path, study("A"), tmp_path)
    alone = Page(path.read_text())
    check_page(alone)
    assert (
        path.with_name("comparisons.csv")
        .read_text()
        .startswith("dataset,configuration,plans,metric,unit,reference,")
    )
    words = alone.words()
    assert "The study has one trainer, so there is nothing to compare." in words
    assert "Warning: A: 1 of 2 runs have finished." in words


def test_regions_and_cases_without_foreground(tmp_path):
    labels = {"background": 0, "whole": [1, 2], "core": 2}
    nan = float("nan")
    for trainer, more in (("A", 0), ("B", 0.01)):
        dice = {f"c{i}": {"(1, 2)": 0.7 + more * i, "2": nan} for i in range(7)}
        write_fold(tmp_path, trainer, 0, {**dice, "empty": {"(1, 2)": nan, "2": nan}}, labels=labels)
    path = report(tmp_path, study("A", "B", folds=(0,)), tmp_path)
    check_page(Page(path.read_text()))
    text = " ".join(path.read_text().split())
    assert '<th scope="col">whole</th><th scope="col">core</th>' in text
    assert '<th scope="row">A</th><td>70.00</td><td>-</td>' in text
    assert '<th scope="row">B</th><td>73.00</td><td>-</td>' in text
    plain = re.sub(r"base64,[\w+/=]*|<script>.*</script>", "", path.read_text(), flags=re.DOTALL)
    assert "nan" not in plain.lower()


def test_history_without_bounds(tmp_path):
    folder = write_fold(tmp_path, "nnUNetTrainerCPR", 0, {"a": both(0.8)})
    write_history(folder, epochs=1, bound_from=9)
    page = Page(report(tmp_path, study("nnUNetTrainerCPR"), tmp_path).read_text())
    check_page(page)
    labels = [a["aria-label"] for a in page.all("svg") if "aria-label" in a]
    assert [x for x in labels if x.endswith("no matrix has a bound yet.")]


def test_each_setting_has_its_sections(tmp_path):
    page = Page(everything(tmp_path, datasets=(DATASET, "Dataset002_Other"), folds=(0,)).read_text())
    check_page(page)
    assert sum(w == "Dataset002_Other" for w in page.words()) == 7


# In a browser

BROWSER = next(
    (p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None
)
in_browser = pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed")


def browse(path, profile, *options, width=360):
    done = subprocess.run(
        [
            BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu",
            "--enable-logging=stderr", "--v=0", f"--user-data-dir={profile}",
            f"--window-size={width},800", *options, path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "CONSOLE" not in done.stderr, done.stderr[-2000:]
    return done.stdout


@in_browser
def test_browser_shows_page_without_errors(page_file, tmp_path):
    dom = browse(page_file, tmp_path / "profile", "--dump-dom")
    for section in SECTIONS:
        assert f'<section id="{section}"' in dom
    check_page(Page(dom))


@in_browser
@pytest.mark.parametrize("width", [360, 1280])
def test_page_fits_the_window(page_file, tmp_path, width):
    # The window of a headless browser may be wider than asked for: a frame is as wide as it says.
    copy = tmp_path / "copy.html"
    script = (
        "<script>document.querySelectorAll('details').forEach(d => d.open = true);"
        "const seen = document.documentElement;"
        "const outside = [...document.querySelectorAll('body *')]"
        ".filter(e => !e.closest('.scroll, svg, .skip'))"
        ".filter(e => e.getBoundingClientRect().right > seen.clientWidth + 1).map(e => e.tagName);"
        "parent.postMessage([seen.clientWidth, seen.scrollWidth, outside.join()].join(' '), '*');"
        "</script>"
    )
    copy.write_text(page_file.read_text().replace("</body>", script + "</body>"))
    frame = tmp_path / "frame.html"
    frame.write_text(
        "<script>addEventListener('message', e => document.body.dataset.widths = e.data)</script>"
        f'<body><iframe src="copy.html" style="width:{width}px;height:800px;border:0"></iframe></body>'
    )
    dom = browse(frame, tmp_path / "profile", "--dump-dom", "--virtual-time-budget=3000", width=1400)
    found = re.search(r'data-widths="(\d+) (\d+) ([^"]*)"', dom)
    assert found, dom[-500:]
    assert int(found[1]) in range(width - 20, width + 1)
    assert int(found[2]) <= int(found[1]) and found[3] == ""


@in_browser
def test_case_table_is_sorted_by_its_buttons(page_file, tmp_path):
    copy = tmp_path / "copy.html"
    script = (
        "<script>const t = document.querySelector('table.sortable');"
        "const column = () => [...t.tBodies[0].rows].map(r => parseFloat(r.cells[2].textContent));"
        "const heading = t.tHead.rows[0].cells[2];"
        "heading.querySelector('button').click();"
        "const up = column(), first = heading.getAttribute('aria-sort');"
        "heading.querySelector('button').click();"
        "const down = column(), second = heading.getAttribute('aria-sort');"
        "const sorted = up.every((v, i) => !i || up[i - 1] <= v);"
        "const turned = down.every((v, i) => !i || down[i - 1] >= v);"
        "document.body.dataset.sorted = [sorted, turned, first, second].join(' ');</script>"
    )
    copy.write_text(page_file.read_text().replace("</body>", script + "</body>"))
    dom = browse(copy, tmp_path / "profile", "--dump-dom")
    assert 'data-sorted="true true ascending descending"' in dom
