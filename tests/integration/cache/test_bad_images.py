"""`lookonce cache build` of a run with bad images: its messages and exit codes."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from lookonce.cli import main

pytestmark = pytest.mark.usefixtures("one_tower", "no_fsync")


@pytest.fixture
def run_file(make_run, tmp_path) -> str:
    """A run on one good image and three bad ones."""
    pixels = np.random.default_rng(0).integers(0, 256, (88, 120, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "plain.jpg")
    (tmp_path / "text.jpg").write_text("no image")
    (tmp_path / "empty.jpg").touch()
    names = ["plain.jpg", "text.jpg", "empty.jpg", "absent.jpg"]
    lines = [json.dumps({"image_filename": name, "question": "Is it?", "answer": "yes"}) for name in names]
    (tmp_path / "records.jsonl").write_text("\n".join(lines))
    run = make_run(data={"train": str(tmp_path / "records.jsonl"), "val": [], "test": []})
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    return str(tmp_path / "run.yaml")


def test_the_command_encodes_good_images_prints_the_reasons_and_exits_with_1(run_file: str) -> None:
    for _ in range(2):
        done = CliRunner().invoke(main, ["cache", "build", run_file])
        assert done.exit_code == 1, done.output
        assert "3 images could not be encoded" in done.stdout
        for name in ("text.jpg", "empty.jpg", "absent.jpg"):
            assert name in done.stdout
        assert "Traceback" not in done.output
    report = json.loads(CliRunner().invoke(main, ["cache", "build", run_file, "--json"]).stdout)
    assert (report["num_reused"], report["num_encoded"], len(report["quarantined"])) == (1, 0, 3)


@pytest.mark.parametrize(("allowed", "code"), [(0, 1), (2, 1), (3, 0), (100, 0)])
def test_the_command_exits_with_0_for_as_many_bad_images_as_allowed(run_file: str, allowed: int, code: int) -> None:
    done = CliRunner().invoke(main, ["cache", "build", run_file, "--max-quarantined", str(allowed)])
    assert done.exit_code == code, done.output
    assert "3 images could not be encoded" in done.stdout
