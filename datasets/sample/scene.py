"""What a synthetic endoscopy frame shows, as plain facts drawn from a seed; its questions, and its pixels.

Design: a frame is a small set of facts (`Scene`). `draw` turns it into pixels, and `ask` and `ask_in_stages` into
questions and answers, so every answer is true of its image by construction. Facts come from shuffled cycles of values
and not from independent draws: among about forty informative frames, independent draws correlate attributes by chance
so much that a model learns the wrong one. Frames vary less than real ones; they are for trials, not for research.

The number of questions per image, their wording and their answers follow Kvasir-VQA
(https://arxiv.org/abs/2409.01437), with the misspelt "instrumnets" corrected: 38 % of the images have one question,
28 % have seventeen, and the mean is 9.2. Several labels are joined by "; " in alphabetical order, as in the cleaned
dataset.

With stages, each question is about every frame. An answer of stage 2 follows from two answers of stage 1, and that of
stage 3 from both of stage 2. The four facts of a frame are independent, and neither of two answers alone tells anything
about what follows from both. So the result of a study is known: a model that is shown the earlier answers has 4 cases
to learn for stage 3, and one that sees the frame alone has 16, too many for 46 training frames. The facts are those
that the tiny model sees well. Half of the frames are in the test, so that differences are beyond chance. Protocols,
classes and forms are made up and have no meaning in endoscopy.

For measurements, frames have the sizes of a real dataset, stratified and not drawn: the few large images of Kvasir-VQA
have many of its tokens, and chance would make the mean number of tokens per question anything from 390 to 710. Every
split has each size in its exact share, as far as the number of frames allows, both among frames with few questions and
among frames with many.

Colours are stronger than in real frames. A frozen tower with random weights keeps little but colour and position; with
realistic contrast the tiny model learned nothing from forty frames (LOG.md).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

Value = TypeVar("Value")

DEFAULT_SEED = 3
"""With about ten frames in a held-out split, accuracy varies by ten points from seed to seed; this seed is among those
with clearer results (LOG.md lists them all)."""

NUM_IMAGES = 64

SIZES = ((311, 265), (360, 288), (384, 288), (640, 512), (960, 536))
"""The most frequent image sizes of Kvasir-VQA, (width, height), at half their scale."""
SIZE_WEIGHTS = (30, 30, 28, 8, 4)
"""How often each of `SIZES` occurs in Kvasir-VQA, in percent."""


@dataclass(frozen=True)
class Lesion:
    """How one kind of polyp looks, and the answers about it."""

    color: str
    rgb: tuple[int, int, int]
    radius: float
    """The radius in heights of the view."""
    size: str
    paris_type: str


LESIONS = (
    Lesion("white", (252, 250, 246), 0.120, "5-10mm", "paris is"),
    Lesion("yellow", (255, 225, 30), 0.150, ">20mm", "paris iia"),
    Lesion("blue", (40, 70, 235), 0.135, "11-20mm", "paris ip"),
)


@dataclass(frozen=True)
class Instrument:
    """An instrument in the view, and the position of its tip in widths and heights of the view."""

    name: str
    x: float
    y: float


@dataclass(frozen=True)
class Scene:
    """The facts of one frame; positions are in widths and heights of the view, from its upper left corner."""

    width: int
    height: int
    kind: str
    """`normal`, `polyps`, `inflamed` or `instrument`: the kinds of frames in the real dataset."""
    procedure: str
    polyps: tuple[tuple[float, float], ...]
    lesion: Lesion
    instrument: Instrument | None
    landmark: str | None
    """The landmark around the lumen, if there is one."""
    has_text: bool
    has_box: bool
    num_questions: int
    seed: int
    """The seed of the texture, which changes pixels and no answer."""


def shuffled_cycle(rng: random.Random, values: Sequence[Value]) -> Iterator[Value]:
    """Values in a shuffled order, shuffled again when they run out, so that each comes equally often."""
    while True:
        remaining = list(values)
        rng.shuffle(remaining)
        while remaining:
            yield remaining.pop()


KINDS = ("normal",) * 24 + ("polyps",) * 18 + ("inflamed",) * 9 + ("instrument",) * 13
QUESTIONS_PER_IMAGE = (17,) * 18 + (8,) * 5 + (13,) * 3 + (9,) * 3 + (12,) * 3 + (16,) * 3 + (14,) * 2 + (15,) * 3
"""The numbers of questions of the forty frames that are not normal; normal ones have one question each."""

_OVERLAYS = [(p, text, box) for p in ("colonoscopy", "gastroscopy") for text in (False, True) for box in (False, True)]
_POLYP_HEIGHTS: dict[int, tuple[float, ...]] = {0: (), 1: (0.5,), 2: (0.27, 0.73), 3: (0.2, 0.5, 0.8)}
"""Where polyps are, by their number, in heights of the view."""


def make_scenes(seed: int, num_images: int = NUM_IMAGES, kinds: Sequence[str] = KINDS) -> Iterator[Scene]:
    """Yield `num_images` scenes, whose kinds repeat; the same seed gives the same scenes."""
    rng = random.Random(seed)
    maker = _SceneMaker(rng)
    for index in range(num_images):
        yield maker.make(kinds[index % len(kinds)])


class _SceneMaker:
    """The shuffled cycles that all frames of one sample take their values from."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.overlays = {"normal": shuffled_cycle(rng, _OVERLAYS), "other": shuffled_cycle(rng, _OVERLAYS)}
        self.num_polyps = {"polyps": shuffled_cycle(rng, (1, 2, 3)), "instrument": shuffled_cycle(rng, (0, 1, 0, 2))}
        self.lesions = shuffled_cycle(rng, LESIONS)
        self.sides = shuffled_cycle(rng, ("left", "right"))
        self.has_instrument = shuffled_cycle(rng, (False, False, False, True))
        self.instruments = shuffled_cycle(rng, ("tube", "biopsy forceps"))
        self.num_questions = shuffled_cycle(rng, QUESTIONS_PER_IMAGE)

    def make(self, kind: str) -> Scene:
        normal = kind == "normal"
        width, height = self.rng.choices(SIZES, SIZE_WEIGHTS)[0]
        procedure, has_text, has_box = next(self.overlays["normal" if normal else "other"])
        num_polyps = next(self.num_polyps[kind]) if kind in self.num_polyps else 0
        side = next(self.sides)
        return Scene(
            width=width,
            height=height,
            kind=kind,
            procedure=procedure,
            polyps=tuple(self._polyp(side, y) for y in _POLYP_HEIGHTS[num_polyps]),
            lesion=next(self.lesions) if num_polyps else LESIONS[0],
            instrument=self._instrument(kind, side),
            landmark="z-line" if procedure == "gastroscopy" else None,
            has_text=has_text,
            has_box=has_box,
            num_questions=1 if normal else next(self.num_questions),
            seed=self.rng.getrandbits(32),
        )

    def _polyp(self, side: str, y: float) -> tuple[float, float]:
        x = 0.24 if y == 0.5 else 0.27
        jitter_x, jitter_y = self.rng.uniform(-0.02, 0.02), self.rng.uniform(-0.02, 0.02)
        return (x if side == "left" else 1 - x) + jitter_x, y + jitter_y

    def _instrument(self, kind: str, polyp_side: str) -> Instrument | None:
        """Return an instrument on the side without polyps, so that it covers none and all answers stay true."""
        if kind == "normal" or not (kind == "instrument" or next(self.has_instrument)):
            return None
        return Instrument(next(self.instruments), 0.70 if polyp_side == "left" else 0.30, 0.70)


NORMAL_QUESTION = "Does this image contain any finding?"
PROCEDURE = "What type of procedure is the image taken from?"
TEXT = "Is there text?"
BOX = "Is there a green/black box artefact?"
SIDE = "Where in the image is the abnormality?"
"""These four are also the questions of stage 1: what is seen."""
QUESTIONS = (
    PROCEDURE,
    TEXT,
    BOX,
    "Have all polyps been removed?",
    "Is this finding easy to detect?",
    "How many findings are present?",
    "How many polyps are in the image?",
    "What type of polyp is present?",
    "What is the size of the polyp?",
    "What color is the abnormality? If more than one separate with ;",
    SIDE,
    "Are there any abnormalities in the image? Check all that are present.",
    "How many instruments are in the image?",
    "Are there any instruments in the image? Check all that are present.",
    "Where in the image is the instrument?",
    "Are there any anatomical landmarks in the image? Check all that are present.",
    "Where in the image is the anatomical landmark?",
)
NUM_QUESTIONS = len(QUESTIONS)


def ask(scene: Scene) -> list[tuple[str, str]]:
    """Return `scene.num_questions` pairs of question and answer; the same scene gives the same pairs."""
    if scene.kind == "normal":
        return [(NORMAL_QUESTION, "no")]
    answers = dict(zip(QUESTIONS, _answers(scene), strict=True))
    chosen = set(random.Random(scene.seed).sample(QUESTIONS, scene.num_questions))
    return [(question, answers[question]) for question in QUESTIONS if question in chosen]


def _answers(scene: Scene) -> tuple[str, ...]:
    """Return the answers to `QUESTIONS`, in that order."""
    num_polyps, inflamed = len(scene.polyps), scene.kind == "inflamed"
    lesion, instrument = scene.lesion, scene.instrument
    has_finding = num_polyps > 0 or inflamed
    inflammation = "ulcerative colitis" if scene.procedure == "colonoscopy" else "oesophagitis"
    return (
        scene.procedure,
        "yes" if scene.has_text else "no",
        "yes" if scene.has_box else "no",
        "no" if num_polyps else "not relevant",
        ("no" if num_polyps and lesion.size == "5-10mm" else "yes") if has_finding else "not relevant",
        str(num_polyps + inflamed),
        str(num_polyps),
        lesion.paris_type if num_polyps else "none",
        lesion.size if num_polyps else "none",
        lesion.color if num_polyps else "red" if inflamed else "none",
        "; ".join(sorted({cell(x, y) for x, y in scene.polyps})) or "none",
        "polyp" if num_polyps else inflammation if inflamed else "none",
        "1" if instrument else "0",
        instrument.name if instrument else "none",
        cell(instrument.x, instrument.y) if instrument else "none",
        scene.landmark or "none",
        "center" if scene.landmark else "none",
    )


def cell(x: float, y: float) -> str:
    """Name the ninth of the view with the point: "upper-left" ... "center" ... "lower-right"."""
    row = ("upper", "center", "lower")[min(2, int(y * 3))]
    column = ("left", "center", "right")[min(2, int(x * 3))]
    return "center" if row == column == "center" else f"{row}-{column}"


PROTOCOL = "Which protocol applies?"
"""Stage 2, from procedure and text: "a" for a colonoscopy with text or another procedure without, and else "b"."""
CLASS = "Which class applies?"
"""Stage 2, from box and side: 1 for a box and polyps on the left or neither, and else 2."""
FORM = "Which form applies?"
"""Stage 3: "a" for protocol a with class 1 or protocol b with class 2, and else "b"."""
STAGED_KIND = "polyps"
"""All frames are of the kind that has all four facts."""
STAGED_IMAGES = 128
STAGED_SHARES = {"train": 0.36, "val": 0.14, "test": 0.5}


def with_three_polyps(scene: Scene) -> Scene:
    """The scene with three polyps on the side of the first one, which shows this side well."""
    x, _ = scene.polyps[0]
    return replace(scene, polyps=tuple((x, y) for y in _POLYP_HEIGHTS[3]))


def ask_in_stages(scene: Scene) -> list[tuple[str, str, int]]:
    """The questions about a frame with their answers and stages, those of stage 1 first."""
    is_left = scene.polyps[0][0] < 0.5
    protocol = int((scene.procedure == "colonoscopy") != scene.has_text)
    group = int(scene.has_box != is_left)
    return [
        (PROCEDURE, scene.procedure, 1),
        (TEXT, "yes" if scene.has_text else "no", 1),
        (BOX, "yes" if scene.has_box else "no", 1),
        (SIDE, "left" if is_left else "right", 1),
        (PROTOCOL, "ab"[protocol], 2),
        (CLASS, "12"[group], 2),
        (FORM, "ab"[group != protocol], 3),
    ]


KVASIR_SHARES = {(622, 530): 38, (720, 576): 25, (768, 576): 26, (1280, 1024): 8, (1920, 1072): 3}
"""How many of a hundred images have the most frequent widths and heights of Kvasir-VQA, with about as many tokens per
image (500 on average)."""
GOLDEN_RATIO = (5**0.5 - 1) / 2
"""Steps of this fraction of a circle fall evenly into every arc, however many there are
(https://en.wikipedia.org/wiki/Low-discrepancy_sequence#Additive_recurrence)."""

FrameSize = tuple[int, int]
KVASIR_SIZES: list[FrameSize] = [size for size, share in KVASIR_SHARES.items() for _ in range(share)]


def stratify_sizes(
    numbered: Sequence[tuple[int, Scene]], sizes: Sequence[FrameSize], seed: int | str
) -> list[tuple[int, Scene]]:
    """Give numbered scenes these sizes, each in its share of them; the same seed gives the same result."""
    smallest_first = sorted(sizes, key=lambda size: size[0] * size[1])
    angle = random.Random(seed).random()
    result = []
    for number, scene in sorted(numbered, key=lambda member: (member[1].num_questions, member[0])):
        width, height = smallest_first[int(angle * len(sizes))]
        result.append((number, replace(scene, width=width, height=height)))
        angle = (angle + GOLDEN_RATIO) % 1
    return sorted(result, key=lambda member: member[0])


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
