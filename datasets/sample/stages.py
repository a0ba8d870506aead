"""The questions of a sample with stages, each about every frame: what is seen, what follows from it, what follows next.

Design: an answer of stage 2 follows from two answers of stage 1, and that of stage 3 from both of stage 2. The four
facts of a frame are drawn independently, and neither of two answers alone tells anything about what follows from both.
So what a study of this sample must find is known: a model that is shown the earlier answers has 4 cases to learn for
stage 3, and one that sees the frame alone has 16, too many for the 46 frames that it is trained on; no order of the
questions can help. The facts are those that the tiny model sees well, since a wrong answer leads to the next. Half of
the frames are in the test, so that differences are beyond chance. Protocols, classes and forms are made up and have no
meaning in endoscopy.
"""

from __future__ import annotations

from dataclasses import replace

from lookonce.datasets.sample.scene import Scene

PROCEDURE, TEXT, BOX, SIDE = (
    "What type of procedure is the image taken from?",
    "Is there text?",
    "Is there a green/black box artefact?",
    "Where in the image is the abnormality?",
)
"""Questions of stage 1: what is seen."""
PROTOCOL = "Which protocol applies?"
"""Stage 2, from procedure and text: "a" for a colonoscopy with text or another procedure without, and else "b"."""
CLASS = "Which class applies?"
"""Stage 2, from box and side: 1 for a box and polyps on the left or neither, and else 2."""
FORM = "Which form applies?"
"""Stage 3: "a" for protocol a with class 1 or protocol b with class 2, and else "b"."""
KIND = "polyps"
"""All frames are of the kind that has all four facts."""
NUM_IMAGES = 128
SPLIT_SHARES = {"train": 0.36, "val": 0.14, "test": 0.5}
HEIGHTS = (0.2, 0.5, 0.8)
"""Where the polyps are, in heights of the view."""


def with_three_polyps(scene: Scene) -> Scene:
    """The scene with three polyps on the side of the first one, which shows this side well."""
    x, _ = scene.polyps[0]
    return replace(scene, polyps=tuple((x, y) for y in HEIGHTS))


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
