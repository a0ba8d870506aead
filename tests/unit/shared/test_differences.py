"""The fields in which two nested settings differ, by dotted name."""

from __future__ import annotations

from typing import Any

import pytest

from lookonce.differences import Difference, differences


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 2]}}, []),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, []),
        ({"a": 1}, {}, [("a", 1, None)]),
        ({"a": {"b": {"c": 1, "d": 2}}}, {"a": {"b": {"c": 1, "d": 3}}}, [("a.b.d", 2, 3)]),
        ({"a": [1, 2]}, {"a": [2, 1]}, [("a", [1, 2], [2, 1])]),
        ({"a": 1}, {"a": {"b": 1}}, [("a", 1, None), ("a.b", None, 1)]),
        ({"z": 1, "m": {"b": 1, "a": 1}}, {"z": 2, "m": {"b": 2, "a": 2}}, [("m.a", 1, 2), ("m.b", 1, 2), ("z", 1, 2)]),
    ],
    ids=["equal", "order", "only mine", "nested", "list", "other shape", "sorted"],
)
def test_differences_are_named_by_dotted_name_in_order(
    mine: dict[str, Any], theirs: dict[str, Any], expected: list[Difference]
) -> None:
    assert differences(mine, theirs) == expected
    assert differences(theirs, mine) == [(name, other, one) for name, one, other in expected]
