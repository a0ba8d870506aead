"""The report at the end of a training: a page that cannot be written is a note, and the training is whole."""

from __future__ import annotations

from types import SimpleNamespace

import lookonce.workflow as workflow
from lookonce.run.folder import RunFolder


def test_a_report_that_cannot_be_written_is_a_note(make_run, tmp_path, monkeypatch):
    def fail(*arguments):
        raise MemoryError("no memory left")

    notes = []
    opened = SimpleNamespace(
        run=make_run(),
        records={"train": []},
        images=SimpleNamespace(key_of={}),
        folder=RunFolder(tmp_path / "run"),
        notify=notes.append,
    )
    monkeypatch.setattr(workflow, "report_training", fail)
    assert workflow._report(opened, SimpleNamespace(to_json=dict)) is None
    assert notes == [f"no report was written (no memory left); to try again: lookonce report {tmp_path / 'run'}"]
