"""The questions of a sample with stages, each about every frame: what is seen, what follows from it, what follows next.

Design: an answer of stage 2 follows from two answers of stage 1, and that of stage 3 from both of stage 2. The four
facts of a frame are drawn independently, and neither of two answers alone tells anything about what follows from both.
So what a study of this sample must find is known: a model that is shown the earlier answers has 6 cases to learn for
stage 3, and one that sees the frame alone has 36, too many for the 46 frames that it is trained on; the order in which
questions are trained on changes nothing. Protocols, classes and forms are made up and have no meaning in endoscopy.
"""

from __future__ import annotations

from lookonce.datasets.sample.scene import LESIONS, Scene

PROCEDURE, TEXT, NUMBER, COLOR = (
    "What type of procedure is the image taken from?",
    "Is there text?",
    "How many polyps are in the image?",
    "What color is the abnormality? If more than one separate with ;",
)
"""Questions of stage 1: what is seen."""
PROTOCOL = "Which protocol applies?"
"""Stage 2, from procedure and text: "a" for a colonoscopy with text or another procedure without, and else "b"."""
CLASS = "Which class applies?"
"""Stage 2, from number and colour: 1 to 3; each colour gives each number another one."""
FORM = "Which form applies?"
"""Stage 3: with protocol a the class as a letter, with protocol b the letter after it, and "a" after "c"."""
KIND = "polyps"
"""All frames are of the kind that has all four facts."""


def ask_in_stages(scene: Scene) -> list[tuple[str, str, int]]:
    """The questions about a frame with their answers and stages, those of stage 1 first."""
    protocol = int((scene.procedure == "colonoscopy") != scene.has_text)
    number, color = len(scene.polyps), LESIONS.index(scene.lesion)
    group = (number + color) % len(LESIONS)
    return [
        (PROCEDURE, scene.procedure, 1),
        (TEXT, "yes" if scene.has_text else "no", 1),
        (NUMBER, str(number), 1),
        (COLOR, scene.lesion.color, 1),
        (PROTOCOL, "ab"[protocol], 2),
        (CLASS, str(group + 1), 2),
        (FORM, "abc"[(group + protocol) % len(LESIONS)], 3),
    ]
