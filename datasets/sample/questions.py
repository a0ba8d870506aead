"""The questions about a frame, and the answers that follow from what is drawn on it.

Wording and answer vocabulary are those of Kvasir-VQA (https://arxiv.org/abs/2409.01437), with the misspelt
"instrumnets" corrected. Several labels are joined by "; " in alphabetical order, as in the cleaned dataset.
"""

from __future__ import annotations

import random

from lookonce.datasets.sample.scene import Scene

NORMAL_QUESTION = "Does this image contain any finding?"
QUESTIONS = (
    "What type of procedure is the image taken from?",
    "Is there text?",
    "Is there a green/black box artefact?",
    "Have all polyps been removed?",
    "Is this finding easy to detect?",
    "How many findings are present?",
    "How many polyps are in the image?",
    "What type of polyp is present?",
    "What is the size of the polyp?",
    "What color is the abnormality? If more than one separate with ;",
    "Where in the image is the abnormality?",
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
    found = num_polyps > 0 or inflamed
    inflammation = "ulcerative colitis" if scene.procedure == "colonoscopy" else "oesophagitis"
    return (
        scene.procedure,
        "yes" if scene.has_text else "no",
        "yes" if scene.has_box else "no",
        "no" if num_polyps else "not relevant",
        ("no" if num_polyps and lesion.size == "5-10mm" else "yes") if found else "not relevant",
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
