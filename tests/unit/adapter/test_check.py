"""What cannot be merged is refused before anything is written, and the message names the way."""

from __future__ import annotations

import json

import pytest

from lookonce.adapter.merge import check_frozen, check_model, merge
from lookonce.errors import ModelError, UsageError


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


@pytest.mark.parametrize("part", ["top", "text_config"])
def test_a_quantised_model_is_refused_with_the_ways(tmp_path, part):
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(quantised if part == "top" else {part: quantised}))
    with pytest.raises(ModelError, match=r"is quantised .*: fp8.* train\.frozen: int8 or nf4"):
        check_model(tmp_path)


def test_the_target_is_looked_at_first(tmp_path):
    with pytest.raises(UsageError, match="choose another DIR"):
        merge(tmp_path / "no-run", tmp_path)
