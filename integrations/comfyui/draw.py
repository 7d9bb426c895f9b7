"""Draws a workflow's JSON as a picture of its nodes, without ComfyUI: python draw.py workflows/first_image.json picture.webp"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

SCALE = 2  # drawn larger than the coordinates of the workflow, for sharp letters
MARGIN, TITLE, ROW, DOT, FONT = 30, 26, 20, 5, 12
COLORS = {"NEXTSCALE_PIPELINE": "#c9a0ff", "NEXTSCALE_RESULT": "#ffb86b", "IMAGE": "#64b5f6", "MASK": "#81c784", "STRING": "#b0bec5"}
BACKGROUND, BODY, HEAD, OURS, TEXT, FAINT, FIELD = "#202124", "#35363a", "#45464b", "#3d5a80", "#f1f3f4", "#9aa0a6", "#2a2b2e"
CURVE = 24  # straight pieces of a link
LONGEST_VALUE = 34


class Picture:
    """Drawing in the coordinates of the workflow."""

    def __init__(self, workflow: dict[str, Any]) -> None:
        self.nodes = {node["id"]: node for node in workflow["nodes"]}
        self.links = workflow["links"]
        corners = [(node["pos"][0] + node["size"][0], node["pos"][1] + node["size"][1]) for node in self.nodes.values()]
        self.left, self.top = (min(node["pos"][axis] for node in self.nodes.values()) for axis in (0, 1))
        width, height = max(x for x, _ in corners) - self.left, max(y for _, y in corners) - self.top
        self.image = Image.new("RGB", (SCALE * int(width + 2 * MARGIN), SCALE * int(height + 2 * MARGIN)), BACKGROUND)
        self.draw = ImageDraw.Draw(self.image)
        self.font = ImageFont.load_default(SCALE * FONT)

    def place(self, x: float, y: float) -> tuple[float, float]:
        return SCALE * (x - self.left + MARGIN), SCALE * (y - self.top + MARGIN)

    def box(self, x: float, y: float, width: float, height: float, color: str, radius: float = 6) -> None:
        self.draw.rounded_rectangle([*self.place(x, y), *self.place(x + width, y + height)], SCALE * radius, fill=color)

    def text(self, x: float, y: float, text: str, color: str = TEXT, anchor: str = "lm") -> None:
        self.draw.text(self.place(x, y), text, color, self.font, anchor=anchor)

    def socket(self, node: dict[str, Any], slot: int, is_output: bool) -> tuple[float, float]:
        x, y = node["pos"]
        return x + (node["size"][0] if is_output else 0), y + TITLE + ROW * (slot + 0.8)

    def dot(self, at: tuple[float, float], kind: str) -> None:
        x, y = self.place(*at)
        radius = SCALE * DOT
        self.draw.ellipse([x - radius, y - radius, x + radius, y + radius], fill=COLORS.get(kind, FAINT))

    def link(self, start: tuple[float, float], end: tuple[float, float], kind: str) -> None:
        reach = max(40.0, abs(end[0] - start[0]) / 2)
        points = [start, (start[0] + reach, start[1]), (end[0] - reach, end[1]), end]
        curve = [self.place(*bezier(points, step / CURVE)) for step in range(CURVE + 1)]
        self.draw.line(curve, COLORS.get(kind, FAINT), SCALE * 2, joint="curve")

    def node(self, node: dict[str, Any]) -> None:
        (x, y), (width, height) = node["pos"], node["size"]
        self.box(x, y, width, height, BODY)
        self.box(x, y, width, TITLE, OURS if node["type"].startswith("NextScale") else HEAD)
        self.text(x + 10, y + TITLE / 2, node.get("title", node["type"]))
        sockets = [socket for socket in node["inputs"] if "widget" not in socket]
        for slot, socket in enumerate(sockets):
            at = self.socket(node, slot, is_output=False)
            self.dot(at, socket["type"])
            self.text(at[0] + 12, at[1], socket["name"], FAINT)
        for slot, socket in enumerate(node["outputs"]):
            at = self.socket(node, slot, is_output=True)
            self.dot(at, socket["type"])
            self.text(at[0] - 12, at[1], socket["name"], FAINT, "rm")
        self.widgets(node, y + TITLE + ROW * (max(len(sockets), len(node["outputs"])) + 0.5))

    def widgets(self, node: dict[str, Any], y: float) -> None:
        x, width = node["pos"][0] + 10, node["size"][0] - 20
        for row, (name, value) in enumerate(named_values(node)):
            self.box(x, y + ROW * row, width, ROW - 4, FIELD, 4)
            self.text(x + 8, y + ROW * row + ROW / 2 - 2, name, FAINT)
            self.text(x + width - 8, y + ROW * row + ROW / 2 - 2, value[:LONGEST_VALUE], anchor="rm")


def named_values(node: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the names and values of a node's widgets. A seed is followed by its control."""
    names = [socket["name"] for socket in node["inputs"] if "widget" in socket]
    if "seed" in names:
        names.insert(names.index("seed") + 1, "control after generate")
    return [(name, str(value)) for name, value in zip(names, node["widgets_values"], strict=True)]


def bezier(points: list[tuple[float, float]], at: float) -> tuple[float, float]:
    while len(points) > 1:
        points = [((1 - at) * x0 + at * x1, (1 - at) * y0 + at * y1) for (x0, y0), (x1, y1) in pairwise(points)]
    return points[0]


def draw_workflow(workflow: dict[str, Any]) -> Image.Image:
    picture = Picture(workflow)
    for _, source, slot, target, socket, kind in workflow["links"]:
        nodes = picture.nodes
        picture.link(picture.socket(nodes[source], slot, True), picture.socket(nodes[target], socket, False), kind)
    for node in workflow["nodes"]:
        picture.node(node)
    return picture.image


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    draw_workflow(json.loads(source.read_text(encoding="utf-8"))).save(target, lossless=True)
