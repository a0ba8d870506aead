"""`train.start_from`: a path, or an adapter on the Hub."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from lookonce.run.sections import HubAdapter, hub_adapter

COMMIT = "a1" * 20


@pytest.mark.parametrize(
    ("text", "adapter"),
    [
        (f"hf://owner/name@{COMMIT}", HubAdapter("owner/name", COMMIT)),
        ("hf://owner/name", HubAdapter("owner/name", None)),
        ("hf://o.w-n/na.me_2@v1/beta", HubAdapter("o.w-n/na.me_2", "v1/beta")),
    ],
)
def test_an_adapter_on_the_hub_stays_text_and_is_written_as_it_was(make_run, text, adapter):
    run = make_run(train={"start_from": text})
    assert run.train.start_from == text and hub_adapter(text) == adapter and str(adapter) == text
    assert f"start_from: {text}" in run.to_yaml()


@pytest.mark.parametrize("text", ["hf://owner", "hf://", "hf://owner/name@", "hf://owner/name@a@b", "hf://a/b/c"])
def test_a_malformed_one_is_refused(make_run, text):
    with pytest.raises(ValidationError, match="an adapter on the Hub is hf://OWNER/NAME@COMMIT"):
        make_run(train={"start_from": text})


def test_all_others_are_paths(make_run, monkeypatch):
    monkeypatch.setenv("PLACE", "/data")
    for text, path in (("owner/name", "owner/name"), ("$PLACE/first", "/data/first")):
        assert make_run(train={"start_from": text}).train.start_from == Path(path)
    assert hub_adapter(Path("hf:/owner/name")) is None and hub_adapter(None) is None
    with pytest.raises(ValidationError, match="the environment variable NONE is not set"):
        make_run(train={"start_from": "$NONE/first"})
