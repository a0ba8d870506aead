"""What one made-up endoscopy frame shows, drawn from a seed and free of pixels.

Design: a frame is a small bundle of facts (`Scene`); `draw.py` turns it into pixels and `questions.py` into questions
and answers, so an answer is true of the picture by construction. Facts come from shuffled decks rather than from
independent coins: with about forty informative frames, coins leave attributes so correlated by chance that a model
learns the wrong one. The cost is that frames are less varied than real ones; they are for trying things, not for
research.

The number of questions an image follows what was counted on Kvasir-VQA (https://arxiv.org/abs/2409.01437): 38 % of
the images carry one question, 28 % seventeen, 9.2 on average.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Card = TypeVar("Card")

DEFAULT_SEED = 3
"""With about ten held-out frames a split, the accuracy of a training varies by ten points from sample to sample; this
one is among the clearer (LOG.md has them all)."""

NUM_IMAGES = 64
"""Distinct frames in the sample."""

SIZES = ((311, 265), (360, 288), (384, 288), (640, 512), (960, 536))
"""Half of Kvasir-VQA's most frequent image sizes, (width, height), ..."""
SIZE_WEIGHTS = (30, 30, 28, 8, 4)
"""... and how often each occurs there, in percent."""


@dataclass(frozen=True)
class Lesion:
    """How one kind of polyp looks and what is said of it."""

    color: str
    rgb: tuple[int, int, int]
    radius: float
    """In heights of the view."""
    size: str
    paris_type: str


LESIONS = (
    Lesion("white", (252, 250, 246), 0.120, "5-10mm", "paris is"),
    Lesion("yellow", (255, 225, 30), 0.150, ">20mm", "paris iia"),
    Lesion("blue", (40, 70, 235), 0.135, "11-20mm", "paris ip"),
)


@dataclass(frozen=True)
class Instrument:
    """An instrument in the view and the point its tip reaches, in widths and heights of the view."""

    name: str
    x: float
    y: float


@dataclass(frozen=True)
class Scene:
    """The facts of one frame; positions are in widths and heights of the round view, from its upper left corner."""

    width: int
    height: int
    kind: str
    """`normal`, `polyps`, `inflamed` or `instrument`: the four sources the real set is made of."""
    procedure: str
    polyps: tuple[tuple[float, float], ...]
    lesion: Lesion
    instrument: Instrument | None
    landmark: str | None
    """Around the lumen."""
    has_text: bool
    has_box: bool
    num_questions: int
    seed: int
    """Of the texture; changes pixels and no answer."""


class Deck(Generic[Card]):
    """Cards dealt in a shuffled order, shuffled anew when they run out: every value comes up equally often."""

    def __init__(self, rng: random.Random, cards: Sequence[Card]) -> None:
        self._rng, self._cards, self._hand = rng, tuple(cards), list[Card]()

    def deal(self) -> Card:
        if not self._hand:
            self._hand = list(self._cards)
            self._rng.shuffle(self._hand)
        return self._hand.pop()


KINDS = ("normal",) * 24 + ("polyps",) * 18 + ("inflamed",) * 9 + ("instrument",) * 13
QUESTIONS_AN_IMAGE = (17,) * 18 + (8,) * 5 + (13,) * 3 + (9,) * 3 + (12,) * 3 + (16,) * 3 + (14,) * 2 + (15,) * 3
"""Of the forty frames that show something; the normal ones carry one question each."""

_OVERLAYS = [(p, text, box) for p in ("colonoscopy", "gastroscopy") for text in (False, True) for box in (False, True)]
_POLYP_HEIGHTS: dict[int, tuple[float, ...]] = {0: (), 1: (0.5,), 2: (0.27, 0.73), 3: (0.2, 0.5, 0.8)}


def make_scenes(seed: int, num_images: int = NUM_IMAGES) -> Iterator[Scene]:
    """Yield `num_images` scenes; the same seed gives the same scenes."""
    rng = random.Random(seed)
    dealer = _Dealer(rng)
    for index in range(num_images):
        yield dealer.deal(KINDS[index % len(KINDS)])


class _Dealer:
    """The decks that all frames of one sample are dealt from."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.overlays = {"normal": Deck(rng, _OVERLAYS), "other": Deck(rng, _OVERLAYS)}
        self.num_polyps = {"polyps": Deck(rng, (1, 2, 3)), "instrument": Deck(rng, (0, 1, 0, 2))}
        self.lesions = Deck(rng, LESIONS)
        self.sides = Deck(rng, ("left", "right"))
        self.has_instrument = Deck(rng, (False, False, False, True))
        self.instruments = Deck(rng, ("tube", "biopsy forceps"))
        self.num_questions = Deck(rng, QUESTIONS_AN_IMAGE)

    def deal(self, kind: str) -> Scene:
        normal = kind == "normal"
        width, height = self.rng.choices(SIZES, SIZE_WEIGHTS)[0]
        procedure, has_text, has_box = self.overlays["normal" if normal else "other"].deal()
        num_polyps = self.num_polyps[kind].deal() if kind in self.num_polyps else 0
        side = self.sides.deal()
        return Scene(
            width=width,
            height=height,
            kind=kind,
            procedure=procedure,
            polyps=tuple(self._polyp(side, y) for y in _POLYP_HEIGHTS[num_polyps]),
            lesion=self.lesions.deal() if num_polyps else LESIONS[0],
            instrument=self._instrument(kind, side),
            landmark="z-line" if procedure == "gastroscopy" else None,
            has_text=has_text,
            has_box=has_box,
            num_questions=1 if normal else self.num_questions.deal(),
            seed=self.rng.getrandbits(32),
        )

    def _polyp(self, side: str, y: float) -> tuple[float, float]:
        x = 0.24 if y == 0.5 else 0.27
        jitter_x, jitter_y = self.rng.uniform(-0.02, 0.02), self.rng.uniform(-0.02, 0.02)
        return (x if side == "left" else 1 - x) + jitter_x, y + jitter_y

    def _instrument(self, kind: str, polyp_side: str) -> Instrument | None:
        """From the side without polyps, so that it never covers one and no answer is wrong."""
        if kind == "normal" or not (kind == "instrument" or self.has_instrument.deal()):
            return None
        return Instrument(self.instruments.deal(), 0.70 if polyp_side == "left" else 0.30, 0.70)
