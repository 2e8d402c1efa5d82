"""Draw the architecture diagram in a light and a dark form: python scripts/draw_architecture.py FOLDER"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape


@dataclass(frozen=True, kw_only=True)
class Palette:
    """Colours of one form."""

    text: str
    faint: str
    line: str
    process: str
    folder: str
    outside: str


PALETTES = {
    "light": Palette(
        text="#1f2328", faint="#59636e", line="#59636e", process="#ddf4ff", folder="#fff8c5", outside="#f6f8fa"
    ),
    "dark": Palette(
        text="#f0f6fc", faint="#9198a1", line="#9198a1", process="#0c2d6b", folder="#4b2900", outside="#212830"
    ),
}
WIDTH, HEIGHT = 860, 380
#: Boxes as (x, y, width, height, colour, title, lines).
BOXES = (
    (20, 150, 150, 80, "outside", "hpcdist run", ("hpcdist submit", "validate the config")),
    (230, 40, 190, 90, "process", "supervisor", ("starts, watches, restarts", "the ranks; no torch")),
    (230, 250, 190, 90, "process", "shipper", ("reads journals,", "retries until they arrive")),
    (490, 150, 180, 80, "folder", "run folder", ("config, code, state,", "checkpoints, journals")),
    (660, 40, 180, 80, "process", "ranks", ("train(ctx, cfg)", "local, container or srun")),
    (20, 260, 150, 80, "outside", "MLflow", ("sqlite or a server",)),
)
#: Arrows as (x1, y1, x2, y2, label, x and y of the label, anchor).
ARROWS = (
    (170, 180, 250, 130, "", 0, 0, "start"),
    (420, 70, 660, 70, "start, signals", 540, 62, "middle"),
    (420, 120, 500, 150, "state, lease", 470, 132, "start"),
    (740, 120, 650, 150, "journals, checkpoints", 712, 142, "start"),
    (520, 230, 420, 280, "read", 478, 272, "start"),
    (230, 300, 170, 300, "", 0, 0, "start"),
    (325, 130, 325, 250, "start", 332, 194, "start"),
)


def draw(palette: Palette) -> str:
    """Return the diagram as SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        ' role="img" font-family="system-ui, sans-serif" font-size="14">',
        "<title>The supervisor starts the ranks; ranks write to the run folder; the shipper sends it to MLflow</title>",
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 10 5 0 10z" fill="{palette.line}"/></marker></defs>',
    ]
    for x1, y1, x2, y2, label, x, y, anchor in ARROWS:
        parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{palette.line}" stroke-width="1.5"'
            ' marker-end="url(#head)"/>'
        )
        if label:
            parts.append(
                f'<text x="{x}" y="{y}" fill="{palette.faint}" font-size="12" text-anchor="{anchor}">'
                f"{escape(label)}</text>"
            )
    for x, y, width, height, colour, title, lines in BOXES:
        centre = x + width / 2
        top = y + height / 2 - 8 * len(lines) + 2
        parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{getattr(palette, colour)}"'
            f' stroke="{palette.line}"/>'
        )
        parts.append(
            f'<text x="{centre:g}" y="{top:g}" fill="{palette.text}" font-weight="600" text-anchor="middle">'
            f"{escape(title)}</text>"
        )
        for number, line in enumerate(lines, 1):
            parts.append(
                f'<text x="{centre:g}" y="{top + 19 * number:g}" fill="{palette.text}" font-size="13"'
                f' text-anchor="middle">{escape(line)}</text>'
            )
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    for name, palette in PALETTES.items():
        (Path(sys.argv[1]) / f"architecture-{name}.svg").write_text(draw(palette))
