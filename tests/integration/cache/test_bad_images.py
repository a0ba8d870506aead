"""`lookonce cache build` of a run with bad images: its messages and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.rows import png_claiming, run, write_lines

pytestmark = pytest.mark.usefixtures("one_tower", "no_fsync")


def run_on(make_run, folder: Path, *names: str) -> Path:
    """A run file on these images, with records.jsonl beside it."""
    rows = [{"image_filename": name, "question": "Is it?", "answer": "yes"} for name in names]
    records = write_lines(folder / "records.jsonl", *rows)
    (folder / "run.yaml").write_text(make_run(data={"train": str(records), "val": [], "test": []}).to_yaml())
    return folder / "run.yaml"


@pytest.fixture
def run_file(make_run, tmp_path) -> Path:
    """A run on one good image and three bad ones."""
    pixels = np.random.default_rng(0).integers(0, 256, (88, 120, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "plain.jpg")
    (tmp_path / "text.jpg").write_text("no image")
    (tmp_path / "empty.jpg").touch()
    names = ["plain.jpg", "text.jpg", "empty.jpg", "absent.jpg"]
    return run_on(make_run, tmp_path, *names)


def test_the_command_encodes_good_images_prints_the_reasons_and_exits_with_1(run_file):
    for _ in range(2):
        done = run("cache", "build", run_file)
        assert done.exit_code == 1, done.output
        assert "3 images could not be encoded" in done.stdout
        for name in ("text.jpg", "empty.jpg", "absent.jpg"):
            assert name in done.stdout
        assert "Traceback" not in done.output
    for options in (["--json"], ["--json", "--retry-quarantined"]):
        report = json.loads(run("cache", "build", run_file, *options).stdout)
        assert (report["num_reused"], report["num_encoded"], len(report["quarantined"])) == (1, 0, 3)
    for allowed, code in ((2, 1), (3, 0)):
        done = run("cache", "build", run_file, "--max-quarantined", allowed)
        assert done.exit_code == code, done.output


UNUSABLE = {
    "empty.jpg": (b"", "cannot decode image {}: unknown image format (the file is empty)"),
    "text.jpg": (b"no image", "cannot decode image {}: unknown image format"),
    "program.jpg": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "an EPS file is a program"),
    "long.png": (png_claiming(4020, 20), "{}: absolute aspect ratio must be smaller than 200, got 201.0"),
    "tall.png": (png_claiming(20, 4020), "{}: absolute aspect ratio must be smaller than 200, got 201.0"),
    "huge.png": (png_claiming(20_000, 20_000), "cannot decode image {}: Image size (400000000 pixels) exceeds limit"),
    "none.png": (png_claiming(0, 20), "cannot decode image {}: "),
}


@pytest.mark.guarantee("`check` and `data audit` give the reason for which an image is quarantined, from its header.")
@pytest.mark.parametrize("name", UNUSABLE)
def test_check_and_audit_give_the_reason_of_the_build_from_the_header(make_run, tmp_path, name):
    content, expected = UNUSABLE[name]
    (tmp_path / name).write_bytes(content)
    Image.effect_noise((64, 64), 90).save(tmp_path / "plain.png")
    run_file = run_on(make_run, tmp_path, "plain.png", name)

    def output_of(*words: str | Path) -> dict:
        return json.loads(run(*words, "--json").stdout)

    checked = [result["value"] for result in output_of("check", run_file)["results"] if result["what"] == "images"]
    findings = {one["code"]: one["items"] for one in output_of("data", "audit", tmp_path / "records.jsonl")["findings"]}
    [reason] = output_of("cache", "build", run_file)["quarantined"].values()
    assert expected.format(tmp_path / name) in reason
    assert [reason] == [item["reason"] for item in findings["images-broken"]]
    assert len(checked) == 1 and reason in checked[0]
