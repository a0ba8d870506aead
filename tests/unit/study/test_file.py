"""What a study file may say, and what is refused before anything is read."""

from __future__ import annotations

import pytest

from lookonce.errors import UsageError
from lookonce.study.file import read_study


def test_a_variant_is_a_mapping_of_keys_to_values(write_study):
    study = read_study(write_study({"plain": None, "later": {"starts_from": "plain", "train.epochs": 2}}))
    assert study.variants["plain"].changes == {} and study.seeds == [42]
    assert (study.variants["later"].starts_from, study.variants["later"].changes) == ("plain", {"train.epochs": 2})


def test_a_variant_with_a_route_is_not_trained(write_study):
    variants = {"one": None, "two": None, "both": {"route": {"variants": {1: "one", "2": "two"}}}}
    study = read_study(write_study(variants))
    assert list(study.trained) == ["one", "two"] and study.compared() == ["one", "two", "both"]
    assert (study.routes["both"].by, study.routes["both"].variants) == ("stage", {"1": "one", "2": "two"})


@pytest.mark.parametrize(
    ("compare", "compared"),
    [
        ({}, ["a", "b", "c"]),
        ({"baseline": "b"}, ["b", "a", "c"]),
        ({"baseline": "c", "variants": ["a"]}, ["c", "a"]),
        ({"variants": ["c", "a"]}, ["c", "a"]),
    ],
    ids=str,
)
def test_the_baseline_is_compared_first(write_study, compare, compared):
    assert read_study(write_study({"a": None, "b": None, "c": None}, compare=compare)).compared() == compared


@pytest.mark.parametrize(
    ("variants", "values", "said"),
    [
        ({}, {}, "variants: .* at least 1"),
        ({"a b": None}, {}, "variants.a b"),
        (
            {"a": {"eval.metric": "bleu"}},
            {},
            "eval.metric: variants are compared by one metric; set it in the base run",
        ),
        ({"a": {"train.seed": 1}}, {}, "train.seed is set for all variants; set `seeds` of the study file instead"),
        ({"a": {"train": {"epochs": 1}}}, {}, "train: name single keys of the run file, such as train.epochs"),
        ({"a": {"start_from": "b"}}, {}, "start_from: name single keys of the run file, .*, or starts_from"),
        ({"a": {"starts_from": "b"}}, {}, "variants.a.starts_from: there is no variant 'b'; the variants are a"),
        ({"a": None, "b": {"starts_from": "a", "train.start_from": "x"}}, {}, "use one of them"),
        ({"a": {"answers_of": ["b", "c"]}}, {}, r"a.answers_of\[0\]: there is no variant 'b'.*\[1\]: .* 'c'"),
        ({"a": {"answers_of": ["b", "a"]}, "b": {"starts_from": "a"}}, {}, "the variants (a|b) -> .* are a circle of"),
        ({"a": {"answers_of": ["b"]}}, {}, "answers_of: .* at least 2"),
        ({"b": {"route": {"variants": {1: "c"}}}}, {}, "variants.b.route.variants.1: there is no variant 'c'"),
        ({"a": {"route": {"variants": {1: "a"}}}}, {}, "route.variants.1: the variant a has a `route` and no adapter"),
        ({"a": {"route": {"variants": {1: "a"}}, "train.epochs": 2}}, {}, "is not trained, so it takes no other key"),
        ({"a": {"route": {"by": "colour", "variants": {1: "a"}}}}, {}, "route.by: .*'stage', 'category' or 'source'"),
        ({"a": None}, {"seeds": [1, 1]}, "\n  seeds: a seed appears twice"),
        ({"a": None}, {"seeds": True}, r"seeds: Input should be a number \(got True\)"),
        ({"a": None}, {"seeds": [-1]}, "seeds.0.: .* greater than or equal to 0"),
        ({"a": None}, {"compare": {"baseline": "z", "variants": ["y"]}}, "(?s)no variant 'z'.*no variant 'y'"),
        ({"a": None}, {"seed": [1]}, "seed: unknown key; did you mean `seeds`"),
        ({"a": None}, {"arms": {"a": None}}, "arms: this key was removed; write `variants`"),
    ],
)
def test_mistakes_are_named(write_study, variants, values, said):
    with pytest.raises(UsageError, match=said):
        read_study(write_study(variants, **values))


def test_a_variant_that_is_there_twice_is_refused(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text("base: x\noutput: y\nvariants:\n  a: {}\n  a: {train.epochs: 1}\n")
    with pytest.raises(UsageError, match="the key 'a' appears twice"):
        read_study(path)
