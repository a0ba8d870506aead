"""What is wrong with a chat template is said once, with the key that mends it; rendering decides, not the name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lookonce.checks.inputs import refusal, without_thinking
from lookonce.train.data.token_stats import TokenCounter

END = "'<|im_end|>\\n'"


@pytest.fixture
def endless(sample, tmp_path) -> Path:
    """A model whose template puts no end token after answers."""
    folder = tmp_path / "endless"
    shutil.copytree(sample / "model", folder)
    path = folder / "chat_template.jinja"
    assert END in path.read_text()
    path.write_text(path.read_text().replace(END, "'\\n'"))
    return folder


def test_a_template_that_thinks_is_told_not_to(thinking_model):
    counter = TokenCounter(thinking_model)
    assert "every record: the chat template does not render answer" in (refusal(counter) or "")
    told = without_thinking(thinking_model, counter)
    assert told is not None and refusal(told) is None
    assert without_thinking(thinking_model, told) is None


def test_other_templates_are_left_alone(sample, endless):
    """Also one that is refused with either value, and does not know the variable."""
    plain, counter = TokenCounter(sample / "model"), TokenCounter(endless)
    assert refusal(plain) is None and without_thinking(sample / "model", plain) is None
    assert "puts no end token" in (refusal(counter) or "") and without_thinking(endless, counter) is None


def test_a_template_that_is_refused_although_it_knows_thinking_is_left_alone(endless):
    path = endless / "chat_template.jinja"
    path.write_text("{%- if enable_thinking is false %}{%- endif %}" + path.read_text())
    assert without_thinking(endless, TokenCounter(endless)) is None


@pytest.mark.parametrize("thinks", [None, True])
def test_a_check_names_the_key_once_and_counts_tokens_as_with_it(checked, thinking_model, thinks):
    found = checked(model={"path": str(thinking_model)}, data={"enable_thinking": thinks})
    wrong = found.one("template")
    assert wrong.value == "training refuses every record: the chat template lets the model think before it answers"
    assert wrong.do == "set `data.enable_thinking: false`; docs/models.md#thinking"
    assert found.levels()["error"] == 1 and found.problems("lengths") == []
    mended = checked(model={"path": str(thinking_model)}, data={"enable_thinking": False})
    assert mended.levels()["error"] == 0
    lengths = [[one.value for one in each.report.results if one.what == "lengths"] for each in (found, mended)]
    assert lengths[0] == lengths[1] and len(lengths[0]) == 2


def test_a_template_that_no_key_mends_is_an_error_of_the_template_and_not_of_records(checked, endless):
    found = checked(model={"path": str(endless)})
    wrong = found.one("template")
    assert wrong.value.startswith("training refuses every record: the chat template puts no end token <|im_end|> after")
    assert wrong.do == "use the model's own chat template" and found.levels()["error"] == 1
