"""The page: complete, self-contained, safe, and drawn by a real browser without a fault."""

import base64
import dataclasses
import json
import re
import shutil
import struct
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from postlude.checking.accuracy import Error
from postlude.checking.clock import Latency, speedup
from postlude.checking.machine import Roofs
from postlude.checking.result import Check, Compiling, LeftAlone, Limits, RegionFound, Side, Speed, Tensors
from postlude.checking.verdict import judge
from postlude.report.charts import LogAxis
from postlude.select.choice import Candidate, Choice

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)

PROGRAM = """region(m, n, k)
  %x = operand [m, k] f32
  %w = operand [n, k] f32
  %acc = contract %x, %w : f32
  %0 = relu %acc
  yield [m, n] f32 %0"""


def latency(milliseconds: float) -> Latency:
    second = milliseconds * 1e-3
    return Latency(second, second * 1.1, second * 1.3, tuple(second * (1 + 0.01 * i) for i in range(-2, 3)), 500)


def region(name: str, error: float = 1e-7, backward: bool = False) -> RegionFound:
    choice = Choice("cpp", "measured", "it was fastest", (Candidate("cpp", 1e-4, 0.02), Candidate("unfused", 2e-4, 0.03)))
    return RegionFound(
        name=name,
        backward=backward,
        description="GEMM + bias, GELU",
        program=PROGRAM,
        source='extern "C" void run(const float* x) { /* <b>not a tag</b> */ }',
        target="cpp",
        absorbed=["relu.default"],
        stopped_by=["a view <that> stops"],
        shapes="f32[8, 16], f32[32, 16] -> f32[8, 32]",
        dtype="float32",
        flops=8192.0 * 1000,
        traffic=400_000,
        saved=100_000,
        errors={"eager": Error(1.2e-7, 1e-6), "postlude": Error(error, 1e-6)},
        bar=6e-7,
        against="nodes",
        blame="kernel" if error > 6e-7 else "",
        seconds={"eager": 3e-4, "inductor": 2e-4, "postlude": 1e-4},
        spreads={"eager": 0.02, "inductor": 0.02, "postlude": 0.01},
        choice=choice,
    )


def example(*, faulty: bool = False) -> Check:
    """A check's result with something in every part of it."""
    latencies = {"eager": latency(3), "inductor": latency(2), "postlude": latency(1)}
    ratios = {side: speedup(latencies["postlude"], latencies[side]) for side in ("eager", "inductor")}
    errors = {"eager": Error(3e-7, 1e-6), "inductor": Error(3e-7, 1e-6), "postlude": Error(9e-3 if faulty else 2e-7, 1e-6)}
    check = Check(
        target="<script>alert(1)</script>",
        device="cpu",
        training=True,
        draws=False,
        input_sets=["float32[8, 16]", "float32[64, 16]"],
        limits=Limits(),
        reference="the model in float64",
        environment={"processor": "a processor", "threads": 2, "torch": "2.13", "gpus": [], "packages": {"numpy": "2"}},
        sides={
            "eager": Side(memory=[1000, 2000]),
            "inductor": Side(memory=[900, 1800], compiling=Compiling(10.0, 2.0, 2, 2)),
            "postlude": Side(
                memory=[800, 1600], compiling=Compiling(9.0, 2.0, 2, 3, ["print in the model"]), warnings=["a warning"]
            ),
        },
        tensors=[Tensors("output", index, "float32", (8, 32), errors, 1e-6, not faulty) for index in range(2)],
        speeds=[Speed(index, latencies, ratios) for index in range(2)],
        regions=[
            region("layers.0.up"),
            region("layers.1.up", 5e-2 if faulty else 1e-7),
            region("backward of layers.0.up", backward=True),
        ],
        left=[LeftAlone("head", "too small")],
        roofs=Roofs(2e11, 2e10, 9e10, "a product"),
        compiled_how="in processes",
        memory_how="resident memory",
        seconds=30.0,
    )
    judge(check)
    return check


class Tags(HTMLParser):
    """Checks that tags are closed in order, and keeps what refers to something else."""

    VOID = ("meta", "line", "circle", "br", "wbr")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                assert value not in self.ids
                self.ids.add(value or "")
            if name in ("href", "src"):
                self.links.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in self.VOID

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("faulty", [False, True])
def test_the_page_is_whole_and_needs_nothing_else(faulty: bool) -> None:
    check = example(faulty=faulty)
    page = check.to_html()
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert all(link.startswith("#") and link[1:] in tags.ids for link in tags.links)
    assert not re.search(r"https?:|@import|url\(", page)
    assert "<script>alert" not in page
    assert "<b>not a tag" not in page
    assert {"speed", "accuracy", "roofline", "times", "errors", "left", "cost", "region-1", "region-2"} <= tags.ids
    assert check.verdict in page
    assert ("Missed" in page) == faulty
    if faulty:
        assert "layers.1.up" in check.verdict
        assert "fault in kernel" in page


def test_a_page_of_a_check_that_found_little() -> None:
    check = dataclasses.replace(
        example(), tensors=[], speeds=[], regions=[], left=[], roofs=None, draws=True,
        sides={name: Side(failed="no luck") for name in ("eager", "inductor", "postlude")},
    )  # fmt: skip
    judge(check)
    tags = Tags()
    tags.feed(check.to_html())
    assert tags.open == []
    assert "roofline" not in tags.ids


def test_axes_hold_what_they_are_made_for() -> None:
    axis = LogAxis.over([2e-7, 0.0, float("inf"), 3e-4])
    assert (axis.low, axis.high) == (-7, -3)
    assert axis.percent(1e-5) == pytest.approx(50)
    assert axis.percent(0.0) == 0
    assert axis.percent(float("inf")) == 100
    assert LogAxis.over([]).decades


PROBE = """<script>
addEventListener("load", () => {
  const frame = document.querySelector("iframe").contentDocument;
  const root = frame.documentElement;
  const marks = [...frame.querySelectorAll("[data-tip]")].filter(mark => mark.getBoundingClientRect().width > 0);
  marks[0].dispatchEvent(new PointerEvent("pointerover", {bubbles: true}));
  const tip = frame.getElementById("tip");
  const plots = [...frame.querySelectorAll("svg")].filter(svg => svg.getBoundingClientRect().width > 0);
  const outside = [...frame.querySelectorAll("section, .figure, details")]
    .filter(part => part.getBoundingClientRect().right > root.clientWidth + 1).length;
  const found = {
    scrolls: root.scrollWidth > root.clientWidth, marks: marks.length, tip: tip.hidden ? "" : tip.textContent,
    plots: plots.length, plot: plots[0].getBoundingClientRect().width, outside,
  };
  document.body.dataset.found = btoa(unescape(encodeURIComponent(JSON.stringify(found))));
});
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_draws_it(width: int, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(example(faulty=True).to_html())
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<body style="margin:0"><iframe src="report.html" style="width:{width}px;height:3000px;border:0"></iframe>{PROBE}'
    )
    picture = tmp_path / "picture.png"
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--hide-scrollbars",
        f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1300,3000", "--virtual-time-budget=3000",
    ]  # fmt: skip
    dom = subprocess.run([*command, "--dump-dom", frame.as_uri()], capture_output=True, text=True, timeout=120, check=True).stdout
    encoded = re.search(r'data-found="([^"]+)"', dom)
    assert encoded, dom[:2000]
    found = json.loads(base64.b64decode(encoded[1]))
    assert not found["scrolls"], "the page is wider than the screen"
    assert found["outside"] == 0
    assert found["plots"] == 1
    assert 0.7 * min(width, 1120) < found["plot"] <= width
    assert found["marks"] > 20
    assert found["tip"].startswith("eager: median 3.00 ms")
    subprocess.run([*command, f"--screenshot={picture}", frame.as_uri()], capture_output=True, timeout=120, check=True)
    assert struct.unpack(">II", picture.read_bytes()[16:24]) == (1300, 3000)
