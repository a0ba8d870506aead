"""Draw pack.svg: five questions about two images, as stock training reads them and as one pack.

The coloured cells are those that the attention of training allows (`lookonce.train.model.attention`), so the
picture cannot disagree with the code; a test draws it again and compares. Run `python docs/draw_pack.py` to write it.
"""

from __future__ import annotations

from pathlib import Path

import torch

from lookonce.train.model.attention import dense_mask

IMAGES = {"image 1": (6, (3, 2, 3)), "image 2": (4, (2, 3))}
"""Tokens of each image and of each of its questions; real images have hundreds, and questions some tens."""
CELL = 16
STYLE = """
  .card { fill: #ffffff; stroke: #d0d7de }
  text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328 }
  .head { font-weight: 600; font-size: 14px }
  .quiet { fill: #59636e }
  .none { fill: #f3f5f7 }
  .image1 { fill: #0a5bb5 } .question1 { fill: #6cb0f5 }
  .image2 { fill: #b04a00 } .question2 { fill: #f5a45c }
  .edge { fill: none; stroke: #8c959f }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117; stroke: #3d444d }
    text { fill: #f0f6fc }
    .quiet { fill: #9198a1 }
    .none { fill: #1c222b }
    .image1 { fill: #3f8fee } .question1 { fill: #a9d1ff }
    .image2 { fill: #e07b2c } .question2 { fill: #ffcb99 }
    .edge { stroke: #656c76 }
  }
"""
DESCRIPTION = (
    "Left: stock training reads five sequences, each with the tokens of its image and of one question, {stock} tokens "
    "in all. lookonce reads one pack of {pack} tokens: image 1 and its three questions, then image 2 and its two. "
    "Right: the attention of the pack. Every token attends to the tokens before it in its own question and to its own "
    "image; questions do not see each other, and images do not see each other."
)


def parts_of_pack() -> list[tuple[str, str, int, int]]:
    """Name, colour and number of tokens of each part of the pack, and the index that its tokens are seen until."""
    found: list[tuple[str, str, int, int]] = []
    end = 0
    for number, (image, (num_tokens, questions)) in enumerate(IMAGES.items(), start=1):
        found.append((image, f"image{number}", num_tokens, end + num_tokens + sum(questions)))
        end += num_tokens
        for question, length in enumerate(questions, start=1):
            end += length
            found.append((f"question {question}", f"question{number}", length, end))
    return found


def strip(x: int, y: int, lengths: list[tuple[str, int]], cell: int = 12) -> list[str]:
    """Tokens side by side."""
    cells = []
    for colour, num_tokens in lengths:
        for _ in range(num_tokens):
            cells.append(f'<rect class="{colour}" x="{x}" y="{y}" width="{cell - 1}" height="{cell + 2}"/>')
            x += cell
    return cells


def sequences(x: int, y: int) -> tuple[list[str], int, int]:
    """The left half, and the tokens of stock training and of the pack."""
    shapes = [f'<text class="head" x="{x}" y="{y}">Stock training: 5 sequences</text>']
    num_stock, y = 0, y + 14
    for number, (num_image, questions) in enumerate(IMAGES.values(), start=1):
        for num_question in questions:
            shapes += strip(x, y, [(f"image{number}", num_image), (f"question{number}", num_question)])
            num_stock, y = num_stock + num_image + num_question, y + 22
    pack = [(colour, num_tokens) for _, colour, num_tokens, _ in parts_of_pack()]
    num_pack = sum(num_tokens for _, num_tokens in pack)
    shapes.append(
        f'<text class="quiet" x="{x}" y="{y + 12}">{num_stock} tokens; the image again for every question</text>'
    )
    shapes.append(f'<text class="head" x="{x}" y="{y + 68}">lookonce: 1 pack</text>')
    shapes += strip(x, y + 82, pack)
    shapes.append(f'<text class="quiet" x="{x}" y="{y + 114}">{num_pack} tokens; each image once</text>')
    legend = [("image1", "tokens of image 1"), ("question1", "its three questions"), ("image2", "tokens of image 2")]
    for number, (colour, words) in enumerate([*legend, ("question2", "its two questions")]):
        left, top = x + 148 * (number % 2), y + 164 + 26 * (number // 2)
        shapes += strip(left, top, [(colour, 1)])
        shapes.append(f'<text x="{left + 18}" y="{top + 11}">{words}</text>')
    return shapes, num_stock, num_pack


def attention(x: int, y: int) -> list[str]:
    """The right half: a row for each token, coloured where it attends to the token of the column."""
    parts = parts_of_pack()
    of_token = [number for number, (_, _, num_tokens, _) in enumerate(parts) for _ in range(num_tokens)]
    allowed = dense_mask(torch.tensor([parts[number][3] for number in of_token]))[0, 0]
    shapes = [f'<text class="head" x="{x}" y="{y - 26}">Each row attends to the coloured columns</text>']
    for row, columns in enumerate(allowed.tolist()):
        for column, seen in enumerate(columns):
            colour = parts[of_token[column]][1] if seen else "none"
            left, top = x + column * CELL, y + row * CELL
            shapes.append(f'<rect class="{colour}" x="{left}" y="{top}" width="{CELL - 1}" height="{CELL - 1}"/>')
    start = 0
    for name, _, num_tokens, _ in parts:
        length, middle = num_tokens * CELL - 1, start + num_tokens * CELL / 2
        shapes.append(f'<rect class="edge" x="{x + start}" y="{y + start}" width="{length}" height="{length}"/>')
        shapes.append(f'<text x="{x - 8}" y="{y + middle + 4:g}" text-anchor="end">{name}</text>')
        if name in IMAGES:
            shapes.append(f'<text x="{x + middle:g}" y="{y - 6}" text-anchor="middle">{name}</text>')
        start += num_tokens * CELL
    return shapes


def drawing() -> str:
    """The whole picture."""
    left, num_stock, num_pack = sequences(24, 40)
    right = attention(410, 66)
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 456" width="800" height="456" role="img"'
            ' aria-labelledby="title description">',
            '<title id="title">Five questions about two images: one pack instead of five sequences</title>',
            f'<desc id="description">{DESCRIPTION.format(stock=num_stock, pack=num_pack)}</desc>',
            f"<style>{STYLE}</style>",
            '<rect class="card" x="0.5" y="0.5" width="799" height="455" rx="8"/>',
            *left,
            *right,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    Path(__file__).with_name("pack.svg").write_text(drawing())
