"""Draws screens with buttons in a grid, and records of clicks on them: python examples/screens.py data/screens

They stand for screenshots of one's own in docs/clicks.md. Training records have the point to click, the others the box
that it must be in, both in pixels.
"""

import json
import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw

COLORS = ["red", "green", "blue", "yellow", "white"]
SPLITS = {"train": 240, "val": 20, "test": 60}

folder, rng = Path(sys.argv[1]), random.Random(0)
(folder / "images").mkdir(parents=True)
for split, num_screens in SPLITS.items():
    lines = []
    for number in range(num_screens):
        width, height = rng.choice([(319, 241), (241, 319)])
        screen, name = Image.new("RGB", (width, height), "black"), f"images/{split}-{number}.png"
        draw, cells = ImageDraw.Draw(screen), rng.sample([(column, row) for column in range(3) for row in range(4)], 5)
        for color, (column, row) in zip(COLORS, cells, strict=True):
            kind = rng.choice(["text", "icon"])
            across, down = (64, 32) if kind == "text" else (44, 44)
            left, top = width * (2 * column + 1) // 6 - across // 2, height * (2 * row + 1) // 8 - down // 2
            box = [left, top, left + across, top + down]
            (draw.rectangle if kind == "text" else draw.ellipse)(box, fill=color)
            answer = f"({left + across // 2}, {top + down // 2})" if split == "train" else str(box)
            question = f"Where is the {color} button?"
            platform = "desktop" if width > height else "mobile"
            lines.append({"image": name, "question": question, "answer": answer, "source": platform, "category": kind})
        screen.save(folder / name)
    (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
