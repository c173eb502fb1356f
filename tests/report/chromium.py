"""Pages looked at in a headless Chromium, where there is one."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")
COMMAND = next((path for path in map(shutil.which, _NAMES) if path is not None), None)

needs_chromium = pytest.mark.skipif(
    COMMAND is None, reason="pictures are looked at in Chromium, which is not installed"
)


def evaluate(page: str, script: str, folder: Path) -> Any:
    """What a script says of a page that is open: the value of its last ``return``."""
    path = folder / "page.html"
    runs = (
        "<pre id=found></pre><script>document.getElementById('found').textContent="
        f"JSON.stringify((function(){{{script}}})())</script>"
    )
    path.write_text(page + runs, encoding="utf-8")
    command = [
        *(COMMAND or "", "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"),
        *("--window-size=1600,1200", f"--user-data-dir={folder / 'chromium'}", path.as_uri()),
    ]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    found = re.search(r'<pre id="found">(.*?)</pre>', shown.stdout, re.DOTALL)
    assert found is not None, shown.stdout[-2000:] + shown.stderr[-2000:]
    return json.loads(html.unescape(found[1]))


FAULTS = """
const faults = [];
const said = (node) => node.textContent.slice(0, 40);
function inside(inner, outer, slack) {
  return inner.left >= outer.left - slack && inner.right <= outer.right + slack
    && inner.top >= outer.top - slack && inner.bottom <= outer.bottom + slack;
}
function meet(a, b) {
  return Math.min(a.right, b.right) - Math.max(a.left, b.left) > 0.5
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2;
}
for (const svg of document.querySelectorAll('svg')) {
  const texts = [...svg.querySelectorAll('text')].filter((node) => node.textContent.trim());
  const boxes = texts.map((node) => node.getBoundingClientRect());
  const frame = svg.getBoundingClientRect();
  texts.forEach((node, i) => {
    if (!inside(boxes[i], frame, 0)) faults.push(`cut by the picture: ${said(node)}`);
    for (let j = 0; j < i; j++)
      if (meet(boxes[i], boxes[j])) faults.push(`overlap: ${said(node)} | ${said(texts[j])}`);
  });
  for (const place of svg.querySelectorAll('.place')) {
    const card = place.querySelector('.card').getBoundingClientRect();
    for (const node of place.querySelectorAll('text'))
      if (!inside(node.getBoundingClientRect(), card, 0)) faults.push(`cut: ${said(node)}`);
  }
  const cards = [...svg.querySelectorAll('.card')].map((node) => node.getBoundingClientRect());
  cards.forEach((card, i) => {
    if (!inside(card, frame, 0)) faults.push(`card ${i} is cut`);
    for (let j = 0; j < i; j++) if (meet(card, cards[j])) faults.push(`cards ${i}, ${j} overlap`);
  });
  for (const line of svg.querySelectorAll('.link path.line')) {
    const matrix = line.getScreenCTM(), length = line.getTotalLength();
    for (let at = 0; at <= length; at += 3) {
      const point = line.getPointAtLength(at).matrixTransform(matrix);
      const hit = boxes.findIndex((box) => point.x > box.left && point.x < box.right
        && point.y > box.top + 1 && point.y < box.bottom - 2);
      if (hit >= 0) { faults.push(`line through ${said(texts[hit])}`); break; }
      cards.slice(1).forEach((card, i) => {
        if (point.x > card.left + 1 && point.x < card.right - 1
          && point.y > card.top + 1 && point.y < card.bottom - 1)
          faults.push(`line through card ${i + 1}`);
      });
    }
  }
}
"""
"""What is wrong with the pictures of a page, as a script's ``faults``."""


SIZES = (1500, 700)


def page(pictures: list[str]) -> str:
    """Every picture at both sizes."""
    shown = [f'<div style="width:{size}px">{svg}</div>' for svg in pictures for size in SIZES]
    style = '<meta charset="utf-8"><style>svg{width:100%;height:auto}</style>'
    return f"<!doctype html>{style}{''.join(shown)}"
