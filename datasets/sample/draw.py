"""A `Scene` as pixels: mucosa with folds and a lumen, lesions, instrument, landmark, text and the green box.

Colours are stronger than in real frames. A frozen tower with random weights keeps little but colour and position; with
realistic contrast the tiny model learned nothing from forty frames (LOG.md).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from lookonce.datasets.sample.scene import Instrument, Scene

Pixels = NDArray[np.float64]
"""An array `[height, width, 3]` of values from 0 to 255."""

PANEL_WIDTH = 0.2
"""The width of the black strip on the left, which holds text and box, as a share of the frame's width."""
MUCOSA = {"colonoscopy": (195, 95, 75), "gastroscopy": (225, 180, 135)}
INFLAMED_TINT = (0.85, 0.35, 0.35)
INSTRUMENT_RGB = {"tube": (30, 215, 235), "biopsy forceps": (215, 60, 215)}
LANDMARK_RGB = {"z-line": (190, 80, 70)}


def draw(scene: Scene) -> Image.Image:
    """Draw the frame as an RGB image of `scene.width` x `scene.height`; the same scene gives the same pixels."""
    panel = int(scene.width * PANEL_WIDTH)
    view = _View(scene.width - panel, scene.height, np.random.default_rng(scene.seed))
    pixels = _mucosa(scene, view)
    for x, y in scene.polyps:
        pixels = _with_polyp(pixels, view, x, y, scene.lesion.radius, scene.lesion.rgb)
    pixels = np.clip(pixels, 0, 255) * view.inside[..., None]
    image = Image.fromarray(pixels.astype(np.uint8))
    if scene.instrument:
        _draw_instrument(image, scene.instrument)
    frame = Image.new("RGB", (scene.width, scene.height))
    frame.paste(image, (panel, 0))
    if scene.has_text:
        _draw_text(frame, scene.seed)
    if scene.has_box:
        _draw_box(frame)
    return frame


class _View:
    """Coordinates of the octagonal view: `u`, `v` run from 0 to 1, `radius` is the distance from the lumen."""

    def __init__(self, width: int, height: int, rng: np.random.Generator) -> None:
        rows, columns = np.mgrid[0:height, 0:width]
        self.rng, self.width, self.height = rng, width, height
        self.u, self.v, self.aspect = columns / width, rows / height, width / height
        center_u, center_v = 0.5 + rng.uniform(-0.05, 0.05), 0.5 + rng.uniform(-0.05, 0.05)
        self.radius = self.distance(center_u, center_v)
        off_u, off_v = np.abs(self.u - 0.5) / 0.49, np.abs(self.v - 0.5) / 0.48
        self.inside = (np.maximum(off_u, off_v) < 1) & (off_u + off_v < 1.6)

    def distance(self, u: float, v: float) -> Pixels:
        """Return the distance of each pixel from the point (u, v), in heights of the view; `[height, width]`."""
        distance: Pixels = np.hypot((self.u - u) * self.aspect, self.v - v)
        return distance

    def clouds(self) -> Pixels:
        """Return smooth noise of about -0.5 to 0.5; `[height, width]`."""
        coarse = Image.fromarray((self.rng.random((7, 8)) * 255).astype(np.uint8))
        smooth: Pixels = np.asarray(coarse.resize((self.width, self.height), Image.Resampling.BICUBIC)) / 255 - 0.5
        return smooth


def _mucosa(scene: Scene, view: _View) -> Pixels:
    color = np.array(MUCOSA[scene.procedure], float)
    if scene.kind == "inflamed":
        color = color * np.array(INFLAMED_TINT)
    clouds, grain = view.clouds(), view.rng.normal(0, 2, (view.height, view.width))
    folds = 0.1 * np.sin(view.radius * 28 + clouds * 1.5)
    light = (1.05 - 0.35 * view.radius) * (1 + folds + 0.1 * clouds)
    pixels: Pixels = color * light[..., None] + grain[..., None]
    if scene.landmark:
        ring = np.clip(1 - np.abs(view.radius - 0.19) / 0.06, 0, 1)[..., None]
        pixels = pixels * (1 - ring) + ring * np.array(LANDMARK_RGB[scene.landmark], float)
    lumen = np.clip(1 - view.radius / 0.11, 0, 1)[..., None]
    return pixels * (1 - 0.75 * lumen)


def _with_polyp(pixels: Pixels, view: _View, x: float, y: float, radius: float, rgb: tuple[int, int, int]) -> Pixels:
    """Draw a lit ball with a tinted rim, which makes it span several patches of the tower."""
    color = np.array(rgb, float)
    distance = view.distance(x, y) / radius
    rim = 0.5 * np.clip(1.8 - distance, 0, 1)[..., None]
    pixels = pixels * (1 - rim) + rim * color
    body = np.clip((1 - distance) * 6, 0, 1)[..., None]
    pixels = pixels * (1 - body) + body * color * (1.1 - 0.3 * distance)[..., None]
    glint = view.distance(x - 0.35 * radius / view.aspect, y - 0.35 * radius) / (0.25 * radius)
    return pixels + 120 * body * np.clip(1 - glint, 0, 1)[..., None]


def _draw_instrument(view: Image.Image, instrument: Instrument) -> None:
    """Draw a rod from the nearest lower corner to its tip."""
    pen, (width, height) = ImageDraw.Draw(view), view.size
    tip = instrument.x * width, instrument.y * height
    corner = (width if instrument.x > 0.5 else 0, height)
    rgb: Any = INSTRUMENT_RGB[instrument.name]
    shadow = tuple(channel // 3 for channel in rgb)
    pen.line((*corner, *tip), fill=shadow, width=int(height * 0.23))
    pen.line((*corner, *tip), fill=rgb, width=int(height * 0.20))
    reach = height * 0.12
    head = tuple(min(255, channel + 20) for channel in rgb)
    pen.ellipse((tip[0] - reach, tip[1] - reach, tip[0] + reach, tip[1] + reach), fill=head)


def _draw_text(frame: Image.Image, seed: int) -> None:
    pen, height = ImageDraw.Draw(frame), frame.height
    font = ImageFont.load_default(size=height // 12)
    lines = ("Name:", "Sex: M", "D.O.B.:", f"{seed % 28 + 1:02d}/11", f"{seed % 24:02d}:{seed % 60:02d}", "CVP:A")
    for row, line in enumerate(lines):
        pen.text((4, 4 + row * height // 11), line, fill=(255, 235, 90), font=font, stroke_width=height // 140)


def _draw_box(frame: Image.Image) -> None:
    """Draw the scope guide: a green box with the bend of the scope, in the lower left corner."""
    pen, (width, height) = ImageDraw.Draw(frame), frame.size
    pen.rectangle((2, height * 0.66, width * 0.22, height - 3), fill=(10, 160, 60))
    pen.rectangle((4, height * 0.68, width * 0.21, height - 5), outline=(60, 240, 90), width=3)
    pen.arc((width * 0.04, height * 0.72, width * 0.17, height * 0.94), 30, 330, fill=(120, 255, 140), width=4)
