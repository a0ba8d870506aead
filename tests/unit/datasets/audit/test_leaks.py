"""Images that several files share are found by content."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

CLEAN = [("a.png", "Is there text?", "yes"), ("b.png", "Is there text?", "no"), ("a.png", "What is it?", "a polyp")]


def test_shared_images_are_found_under_other_names_too(folder, picture, write, look, finding_of):
    train = write(folder / "train.jsonl", [*CLEAN, ("c.png", "What is it?", "cecum")])
    test = write(folder / "test.jsonl", [("copy.png", "Is there text?", "yes"), ("new.png", "What is it?", "ileum")])
    (folder / "new.png").write_bytes(picture(9))
    result = look(train, test)
    [leak] = result.leaks
    assert (leak.num_images, leak.num_renamed, leak.num_asked_in_both, leak.num_answered_otherwise) == (1, 1, 1, 1)
    assert (leak.one.images_share, leak.other.images_share) == (pytest.approx(1 / 3), 0.5)
    assert (leak.one.questions_share, leak.other.questions_share) == (0.25, 0.5)
    assert finding_of(result, "leaks").level == "error"


def test_the_same_questions_about_other_images_are_no_leak(folder, write, look):
    train = write(folder / "train.jsonl", [("a.png", "What is it?", "polyp")])
    test = write(folder / "test.jsonl", [("b.png", "What is it?", "polyp")])
    assert look(train, test).leaks == ()


@settings(max_examples=15)
@given(data=st.data())
def test_leaks_are_the_intersections_of_the_files(data, tmp_path_factory, write, look):
    folder = tmp_path_factory.mktemp("leaks")
    names = {f"{number}.png" for number in range(6)}
    chosen = [data.draw(st.sets(st.sampled_from(sorted(names)), min_size=1)) for _ in range(3)]
    files = [write(folder / f"{n}.jsonl", [(i, "Is it so?", "yes") for i in sorted(c)]) for n, c in enumerate(chosen)]
    found = {(leak.one.file, leak.other.file): leak.num_images for leak in look(*files).leaks}
    pairs = [(0, 1), (0, 2), (1, 2)]
    expected = {(f"{a}.jsonl", f"{b}.jsonl"): len(chosen[a] & chosen[b]) for a, b in pairs if chosen[a] & chosen[b]}
    assert found == expected
