"""The page in a real browser, where there is one, in light and dark mode: no number wraps, nothing is cut or wider than the window, and
all text can be read.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvgen._resources import generated
from kvgen.bench.results import read_results
from kvgen.registry import Store
from kvgen.report.page import render
from kvgen.toolchain import ArtifactCache

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (360, 1280)
MODES = {"dark": 0, "light": 1}
"""Chromium's numbers for what a reader prefers."""
CONTRAST = 4.5
"""Least contrast of text: WCAG 2, level AA."""
LOOK = """
<pre id=told></pre><script>
function look(frame) {
  const page = frame.contentDocument, lines = e => {
    const range = page.createRange(); range.selectNodeContents(e);
    return new Set([...range.getClientRects()].map(r => Math.round(r.top))).size; };
  for (const one of page.querySelectorAll("details")) one.open = true;
  const style = e => frame.contentWindow.getComputedStyle(e);
  const light = color => { const [r, g, b] = color.match(/[\\d.]+/g).map(v => v / 255).map(
    v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
  const contrast = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + .05) / (y + .05); };
  const behind = e => { while (style(e).backgroundColor === "rgba(0, 0, 0, 0)") e = e.parentElement; return style(e).backgroundColor; };
  const under = t => { const { x, y, width, height } = t.getBoundingClientRect(), cx = x + width / 2, cy = y + height / 2;
    const over = [...t.ownerSVGElement.querySelectorAll("rect")].filter(r => { const b = r.getBoundingClientRect();
      return b.x < cx && cx < b.right && b.y < cy && cy < b.bottom && style(r).fill !== "none"; });
    return over.length ? style(over.at(-1)).fill : behind(t); };
  const pale = [...page.querySelectorAll("p, li > *, th, td, h1, h2, h3, h4, a, code, summary, figcaption")]
    .filter(e => contrast(style(e).color, behind(e)) < CONTRAST)
    .concat([...page.querySelectorAll("svg text")].filter(t => contrast(style(t).fill, under(t)) < CONTRAST));
  const outside = t => { const b = t.getBBox(), v = t.ownerSVGElement.viewBox.baseVal; return b.x < -.5 || b.x + b.width > v.width + .5; };
  return { wider: page.documentElement.scrollWidth - page.documentElement.clientWidth,
           wrapped: [...page.querySelectorAll(".n, .tiles b, .keep")].filter(e => lines(e) > 1).map(e => e.textContent),
           cut: [...page.querySelectorAll("svg text, svg circle")].filter(outside).map(e => e.textContent),
           pale: [...new Set(pale.map(e => `${e.tagName} ${e.getAttribute("class")} ${e.textContent}`.slice(0, 80)))],
           mode: light(style(page.body).backgroundColor) < .5 ? "dark" : "light",
           charts: page.querySelectorAll("svg.chart, body > svg").length };
}
onload = () => { told.textContent = JSON.stringify([...document.querySelectorAll("iframe")].map(look)); };
</script>
"""


def seen(page: str, folder: Path, mode: str) -> list[dict[str, object]]:
    """What a browser makes of a page at each width."""
    frames = "".join(f'<iframe width="{width}" height="800" srcdoc="{html.escape(page)}"></iframe>' for width in WIDTHS)
    file = folder / "look.html"
    look = LOOK.replace("CONTRAST", str(CONTRAST))
    file.write_text(f'<!doctype html><meta charset=utf-8><meta name=color-scheme content="light dark">{frames}{look}')
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
    options.append(f"--blink-settings=preferredColorScheme={MODES[mode]}")
    done = subprocess.run([str(BROWSER), *options, file.as_uri()], capture_output=True, text=True, check=False, timeout=120)
    if 'id="told"' not in done.stdout:
        pytest.skip(f"{BROWSER} does not show files of {folder}: {done.stderr[-200:]}")
    told = re.search(r'<pre id="told">(.+?)</pre>', done.stdout, re.DOTALL)
    assert told is not None, "the page could not be looked at"
    found: list[dict[str, object]] = json.loads(html.unescape(told[1]))
    return found


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
@pytest.mark.parametrize("mode", MODES)
def test_nothing_wraps_is_cut_too_wide_or_pale(tmp_path: Path, mode: str):
    entries = [found.entry for found in Store(generated()).all() if found.entry is not None]
    rows = read_results(Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "h200_attend.csv")
    for one in seen(render(entries, ArtifactCache(tmp_path / "cache"), rows), tmp_path, mode):
        assert one.pop("charts") == sum(len(entry.timings) for entry in entries) + len(entries)
        assert one == {"wider": 0, "wrapped": [], "cut": [], "pale": [], "mode": mode}
