"""Draw the rooms of the four packages, what imports what, and the way of a gradient, as an SVG.

    python docs/draw_rooms.py [--check]

Rooms and floors are those of ``tests/test_architecture.py``, lines the real imports. The way is
the one that ``docs/design.md`` tells. Writes ``docs/figures/rooms.svg``; ``--check`` fails instead
where that is not what would be written.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "figures" / "rooms.svg"
PACKAGES = ("frameworks", "fusion", "compressors", "ring")
WIDTH, GAP, HIGH, TOP, LEFT = 210, 70, 24, 46, 20  # pixels
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2328 }
.paper { fill: #ffffff }
.name { font-weight: 600; font-size: 14px }
.room { fill: #eef2f7; stroke: #8c959f }
.import { fill: none; stroke: #8c959f; opacity: 0.35 }
.way { fill: none; stroke: #bc4c00; stroke-width: 2; stroke-linejoin: round }
.stop { fill: #bc4c00 }
.number { fill: #ffffff; font-size: 10px; text-anchor: middle }
@media (prefers-color-scheme: dark) {
  .paper { fill: #0d1117 }
  text { fill: #e6edf3 } .room { fill: #161b22; stroke: #6e7681 } .import { stroke: #8b949e }
  .way { stroke: #f0883e } .stop { fill: #f0883e } .number { fill: #0d1117 }
}
"""

Room = tuple[str, str]  # package, and the room in it


def floors() -> dict[str, list[str]]:
    """Return the rooms of each package from the ground up."""
    tree = ast.parse((ROOT / "tests" / "test_architecture.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "FLOORS":
            return {name: text.split() for name, text in ast.literal_eval(node.value).items()}
    raise SystemExit("tests/test_architecture.py has no FLOORS")


def room_of(path: str, rooms: dict[str, list[str]]) -> Room | None:
    """Return the room that a file is in, None if it is in none."""
    package, *rest = path.removesuffix(".py").split("/")
    names = ("/".join(rest[:n]) for n in range(len(rest), 0, -1))
    found = next((name for name in names if name in rooms.get(package, ())), None)
    return None if found is None else (package, found)


def imports(rooms: dict[str, list[str]]) -> set[tuple[Room, Room]]:
    """Return which rooms import from which others."""
    found: set[tuple[Room, Room]] = set()
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            own = room_of(path.relative_to(ROOT).as_posix(), rooms)
            for node in ast.walk(ast.parse(path.read_text())):
                if own is None or not isinstance(node, ast.ImportFrom):
                    continue
                for alias in node.names:
                    other = _room_of_module(f"{node.module}.{alias.name}", rooms)
                    if other is not None and other != own:
                        found.add((own, other))
    return found


def _room_of_module(name: str, rooms: dict[str, list[str]]) -> Room | None:
    first, *rest = name.split(".")
    if first != "ringlet" or not rest:
        return None
    inside = rest if rest[0] in PACKAGES else ["frameworks", *rest]
    return room_of("/".join(inside), rooms)


def way(rooms: dict[str, list[str]]) -> list[tuple[int, Room]]:
    """Return the steps of a gradient's way in docs/design.md, with the rooms they enter."""
    text = (ROOT / "docs" / "design.md").read_text()
    told = text.partition("## The way of a gradient")[2].partition("\n## ")[0]
    stops: list[tuple[int, Room]] = []
    for step in re.findall(r"^(\d+)\. (.*?)(?=^\d+\. |\Z)", told, re.MULTILINE | re.DOTALL):
        for path in re.findall(r"`([\w/]+\.py)`", step[1]):
            room = room_of(path, rooms) or room_of(f"fusion/{path}", rooms)
            if room is not None and (not stops or stops[-1][1] != room):
                stops.append((int(step[0]), room))
    return stops


def draw() -> str:
    """Return the figure."""
    rooms = floors()
    tallest = max(len(rooms[package]) for package in PACKAGES)
    height = TOP + tallest * (HIGH + 8) + 20
    places: dict[Room, tuple[int, int]] = {}
    out: list[str] = []
    for column, package in enumerate(PACKAGES):
        x = LEFT + column * (WIDTH + GAP)
        out.append(f'<text class="name" x="{x}" y="28">{package}/</text>')
        for floor, room in enumerate(rooms[package]):
            y = height - 20 - (floor + 1) * (HIGH + 8)
            places[package, room] = x, y
    lines = []
    for own, other in sorted(imports(rooms)):
        (x1, y1), (x2, y2) = places[own], places[other]
        y1, y2 = y1 + HIGH // 2, y2 + HIGH // 2
        if x1 == x2:  # beside the column
            bend = x1 - 6 - min(14, abs(y2 - y1) // 20)
            curve = f"M{x1} {y1} C{bend} {y1} {bend} {y2} {x2} {y2}"
        else:
            start, end = (x1 + WIDTH, x2) if x2 > x1 else (x1, x2 + WIDTH)
            middle = (start + end) // 2
            curve = f"M{start} {y1} C{middle} {y1} {middle} {y2} {end} {y2}"
        lines.append(f'<path class="import" d="{curve}"/>')
    for (_, room), (x, y) in places.items():
        out.append(f'<rect class="room" x="{x}" y="{y}" width="{WIDTH}" height="{HIGH}" rx="4"/>')
        out.append(f'<text x="{x + 8}" y="{y + 16}">{escape(room)}</text>')
    stops: list[tuple[int, int, int]] = []
    used: Counter[Room] = Counter()
    for step, room in way(rooms):
        x, y = places[room]
        stops.append((step, x + WIDTH - 12 - 22 * used[room], y + HIGH // 2))
        used[room] += 1
    points = " ".join(f"{x},{y}" for _, x, y in stops)
    out.append(f'<polyline class="way" points="{points}"/>')
    for step, x, y in stops:
        out.append(f'<circle class="stop" cx="{x}" cy="{y}" r="8"/>')
        out.append(f'<text class="number" x="{x}" y="{y + 4}">{step}</text>')
    wide = LEFT + len(PACKAGES) * (WIDTH + GAP)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {height}" role="img">'
    title = "<title>Rooms from the ground up, imports, and the way of a gradient</title>"
    paper = f'<rect class="paper" width="{wide}" height="{height}" rx="6"/>'
    return "\n".join([head, title, f"<style>{STYLE}</style>", paper, *lines, *out, "</svg>", ""])


if __name__ == "__main__":
    figure = draw()
    if "--check" in sys.argv[1:]:
        if not TARGET.exists() or TARGET.read_text() != figure:
            raise SystemExit(f"{TARGET.relative_to(ROOT)} is old: run python docs/draw_rooms.py")
    else:
        TARGET.parent.mkdir(exist_ok=True)
        TARGET.write_text(figure)
