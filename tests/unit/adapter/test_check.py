"""What cannot be merged is refused before anything is written, and the message names the way."""

from __future__ import annotations

import pytest

from lookonce.adapter.merge import check_frozen, merge
from lookonce.errors import UsageError


@pytest.mark.parametrize(
    ("frozen", "is_refused"), [("precision", False), ("fp8", False), ("int8", True), ("nf4", True)]
)
def test_an_adapter_of_rounded_weights_needs_the_flag(make_run, frozen, is_refused):
    run, command = make_run(train={"frozen": frozen}), "lookonce adapter merge RUN DIR"
    check_frozen(run, command, allows_unquantised=True)
    if not is_refused:
        return check_frozen(run, command, allows_unquantised=False)
    with pytest.raises(UsageError, match=rf"quantised to {frozen}.*: {command} --onto-unquantised\n"):
        check_frozen(run, command, allows_unquantised=False)


def test_the_target_is_looked_at_first(tmp_path):
    with pytest.raises(UsageError, match="choose another DIR"):
        merge(tmp_path / "no-run", tmp_path)
