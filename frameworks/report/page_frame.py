"""The page around a report: style for light and dark, no script, nothing to load."""

from __future__ import annotations

from html import escape

from ringlet.report import sorted_table

_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --panel: #f6f7f9; --ink: #1b1f24;
  --soft: #5b6470; --grid: #dfe3e8; --wire: #2463b4; --plain: #8b95a1; --saved: #d3dae3;
  --compress: #c2641b; --communicate: #2463b4; --decompress: #7a4fb0;
  --paid: #1a7f4b; --cost: #b3372f; --even: #7a6510;
  --s0: #2463b4; --s1: #c2641b; --s2: #1a8f86; --s3: #7a4fb0; --s4: #a83a6b; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171b; --panel: #1d2127; --ink: #e8eaed;
  --soft: #a2abb6; --grid: #343b44; --wire: #6aa5ee; --plain: #8f99a6; --saved: #3a434e;
  --compress: #eb9a57; --communicate: #6aa5ee; --decompress: #b895e6;
  --paid: #5fcf95; --cost: #f08a80; --even: #d9c15e;
  --s0: #6aa5ee; --s1: #eb9a57; --s2: #54c4ba; --s3: #b895e6; --s4: #e887b1; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 20px 28px 40px; background: var(--paper);
  color: var(--ink); font: 15px/1.45 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
header { border-left: 6px solid var(--plain); padding-left: 16px; }
header.paid { border-color: var(--paid); } header.cost { border-color: var(--cost); }
header.even { border-color: var(--even); }
h1 { overflow-wrap: anywhere; font-size: 22px; line-height: 1.3;
  margin: 0 0 6px; max-width: 62em; font-weight: 650; }
header p { margin: 2px 0; color: var(--soft); font-size: 13px; max-width: 100em;
  white-space: pre-line; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 0; } figure p { margin: 2px 0 8px; color: var(--soft);
  font-size: 13px; }
.tiles { display: grid; grid-template-columns: repeat(5, 1fr); gap: 12px; margin: 16px 0 12px; }
.tiles div { background: var(--panel); border-radius: 8px; padding: 10px 14px; }
.tiles b { display: block; font-size: 22px; font-weight: 650; }
.tiles span { color: var(--soft); font-size: 13px; }
.columns { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 12px; }
figure { margin: 0; background: var(--panel); border-radius: 8px; padding: 14px 16px 10px; }
figure.wide { margin-top: 12px; } body > h2 { margin: 18px 0 8px; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }
svg text.value { fill: var(--ink); }
.grid { stroke: var(--grid); stroke-width: 1; } .hit { fill: transparent; }
.hit:hover { fill: var(--grid); fill-opacity: .5; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; pointer-events: none; }
.line.plain { stroke-dasharray: 5 4; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 13px; margin: 0 0 6px; }
.swatch { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px;
  vertical-align: -1px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: left; padding: 4px 10px; border-bottom: 1px solid var(--grid);
  white-space: nowrap; }
th { color: var(--soft); font-weight: 600; }
td:first-child { max-width: 26em; overflow: clip; text-overflow: ellipsis; }
.n { text-align: right; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; } summary { cursor: pointer; font-size: 13px; margin: 8px 0; }
@media (max-width: 600px) { body { padding: 14px 12px 28px; } h1 { font-size: 19px; } }
@media (max-width: 980px) { .columns { grid-template-columns: minmax(0, 1fr); }
  .tiles { grid-template-columns: repeat(2, 1fr); } }
"""

_COLOURS = {
    "wire": "wire", "plain": "plain", "saved": "saved", "compress": "compress",
    "communicate": "communicate", "decompress": "decompress",
    "series0": "s0", "series1": "s1", "series2": "s2", "series3": "s3", "series4": "s4",
}  # fmt: skip


BEGINNING = '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>'  # of each page


def page(title: str, kind: str, verdict: str, caveat: str, facts: str, body: str) -> str:
    """Return a whole HTML page; ``body`` is HTML, the rest text. ``kind`` colours the verdict."""
    colours = "".join(
        f".line.{name} {{ stroke: var(--{var}); }} .fill.{name} {{ fill: var(--{var}); }} "
        f".swatch.{name} {{ background: var(--{var}); }}\n"
        for name, var in _COLOURS.items()
    )
    return f"""{BEGINNING}{escape(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>{_STYLE}{sorted_table.STYLE}{colours}</style></head>
<body><header class="{escape(kind)}"><h1>{escape(verdict)}</h1><p>{escape(facts)}</p>
<p>{escape(caveat)}</p></header>
{body}
</body></html>
"""
