"""What is uploaded names no folder of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookonce.adapter.card import BaseModel
from lookonce.adapter.push import check_files, reduced_run, without_folders
from lookonce.errors import UsageError

BASE = BaseModel("owner/base", "a" * 40, None)
NAMES = st.text("abcXYZ019-_.", min_size=1, max_size=8).filter(lambda name: name.strip("."))


def test_each_path_of_a_run_file_becomes_its_last_part(make_run):
    run = make_run(
        data={"train": ["/home/me/a.jsonl", "sets/b.jsonl"], "image_root": "/data/of/me", "stage_map": "/x/map.yaml"},
        cache={"dir": "~/caches", "stage": "/scratch/me"},
        train={"start_from": "/home/me/runs/first"},
        output="/home/me/runs/second",
    )
    reduced = reduced_run(run, BASE)
    assert [str(path) for path in reduced.data.train] == ["a.jsonl", "b.jsonl"]
    assert (str(reduced.data.image_root), str(reduced.cache.dir), str(reduced.output)) == ("me", "caches", "second")
    assert (str(reduced.train.start_from), str(reduced.data.stage_map)) == ("first", "map.yaml")
    assert (reduced.model.path, reduced.model.revision) == (BASE.name, BASE.commit)
    assert "/" not in reduced.to_yaml().replace(BASE.name, "")
    start = f"hf://owner/adapter@{'b' * 40}"
    assert reduced_run(make_run(train={"start_from": start}), BASE).train.start_from == start


@given(st.lists(NAMES, min_size=2, max_size=5), st.sampled_from(["/", "~/"]))
def test_a_text_that_is_an_absolute_path_becomes_its_last_part(parts, root):
    path = root + "/".join(parts)
    assert without_folders({"a": [path, {"b": path}]}) == {"a": [parts[-1], {"b": parts[-1]}]}


@pytest.mark.parametrize("text", ["owner/name", "a/b.json", "{% if a %}/{% endif %}", "", "/", "<image>\n/x", "1/2"])
def test_other_texts_stay(text):
    assert without_folders([text, 3, None]) == [text, 3, None]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("made in /me/secret", "card names a folder of this machine, /me;"),
        ('"/srv/runs/me"', "card names a folder of this machine, /srv/runs/me;"),
        ("with hf_" + "a1" * 20, "card has an access token of the Hub"),
    ],
)
def test_a_file_with_a_folder_or_a_token_is_refused(text, message, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: Path("/me"))
    check_files({"card": "owner/name and /srv/runs/mega, hf_hub"}, [Path("/srv/runs/me"), Path("/")])
    with pytest.raises(UsageError, match=message):
        check_files({"card": text}, [Path("/srv/runs/me")])
