"""Records files of every format and type, damaged: each is read, or refused in our words."""

from __future__ import annotations

from pathlib import Path
from random import Random

from support.fuzzing import cases, mutations

from lookonce.datasets.images import index_images
from lookonce.datasets.records import RecordsFile

TURN = {"question": "Is there text?", "answer": "yes"}
CHAT = [{"role": "user", "content": "<image>Is there text?"}, {"role": "assistant", "content": "yes"}]
PARTS = [{"type": "image"}, {"type": "text", "text": "Is there text?"}]
ROWS = (
    {
        "images": ["a.png", "b.tar/c.png"],
        "turns": [TURN, TURN],
        "system": "Be brief.",
        "metadata": {"stage": 1, "x": None},
    },
    {"image_filename": "a.png", **TURN, "stage": 1},
    {
        "id": "1",
        "image": "a.png",
        "conversations": [{"from": "human", "value": "<image>\nWhy?"}, {"from": "gpt", "value": "No."}],
    },
    {"messages": CHAT, "images": ["a.png"]},
    {"messages": [{"role": "user", "content": PARTS}, CHAT[1]], "images": ["a.png"]},
    {"instruction": "Is there text?", "input": "", "output": "yes", "images": ["a.png"], "history": []},
)
CSV = b'image_filename,question,answer,stage\na.png,"Is there, ""now"", text?",yes,1\nb.png,Why?,no,2\n'


def make(random: Random) -> bytes:
    if random.random() < 0.15:
        return mutations.damaged(CSV, random)
    row = random.choice(ROWS)
    rows = [mutations.several(row, random) for _ in range(random.choice((1, 1, 3)))]
    if random.random() < 0.3:
        return mutations.as_json(rows, random)
    return b"\n".join(mutations.as_json(one, random) for one in rows)


def read(path: Path) -> None:
    broken = []
    file = RecordsFile(path, path.parent, broken=lambda origin, error: broken.append(error))
    index_images(list(file), needs_one=False)
    path.rename(table := path.with_suffix(".csv"))
    cases.each(lambda: RecordsFile(table))


def test_damaged_records_are_read_or_refused(tmp_path):
    assert cases.fuzz("records", make, read, tmp_path / "records.jsonl").holds
