"""Write run-file.md: every key of a run file with its type, default and meaning, from the schema that checks run files.

A test generates it again and compares. Run `python docs/generate_run_file.py` after a change of lookonce.run.sections.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

from lookonce.datasets.augment import Augment
from lookonce.run.config import RunFile
from lookonce.run.sections import CacheSection, ContextSection, DataSection
from lookonce.settings import OnResume

INTRODUCTION = """\
# The run file

<!-- Generated from src/lookonce/run/sections.py by docs/generate_run_file.py; edit there. -->

One YAML file describes a run: the model, the data, the cache, the training and the evaluation. Three keys are
required: `model.path`, `data.train` and `output`. All others are optional.

```yaml
model: {path: Qwen/Qwen3-VL-8B-Instruct}
data: {train: train.jsonl, val: val.jsonl, image_root: images}
cache: {dir: caches}
output: runs/first
```

- Unknown keys are refused, so a misspelt one cannot be silently ignored.
- A key that takes a list takes one value too: `train: train.jsonl`, `targets: q_proj`.
- `lookonce init run.yaml` writes one from a few questions; `lookonce check run.yaml` says what would stop a run.
- Paths are relative to the folder in which a command is started, and the run folder records them absolute. `~` and
  environment variables are replaced. A variable that is not set, or is empty, is an error, except in `cache.stage`.
- `--set` replaces keys for one command: `lookonce train run.yaml --set train.epochs=5 --set output=runs/longer`.
- The resolved run file is saved in the run folder, as `run.yaml`, with absolute paths.
"""


ON_RESUME = {
    "never": "",
    "content": "; may change on `--resume`, with the same content",
    "free": "; may change on `--resume`",
}


INNER: dict[Any, dict[str, Any]] = {DataSection: {"context": ContextSection}, CacheSection: {"augment": Augment}}
"""Keys of sections whose values have keys of their own."""


def page() -> str:
    """The whole page."""
    schema = RunFile.model_json_schema()
    parts = [INTRODUCTION]
    for name, field in RunFile.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and hasattr(section, "model_fields"):
            parts.append(f"## {name}\n\n{section_table(section, schema['$defs'][section.__name__])}")
        for outer, key, inner in (
            (DataSection, "data.context", ContextSection),
            (CacheSection, "cache.augment", Augment),
        ):
            if section is outer:
                keys = section_table(inner, schema["$defs"][inner.__name__])
                parts.append(f"### {key}\n\n{keys}")
    own = {name: values for name, values in schema["properties"].items() if "$ref" not in values}
    parts.append("## At the top level\n\n" + table([row(RunFile, name, values) for name, values in own.items()]))
    return "\n".join(parts)


def section_table(section: Any, schema: dict[str, Any]) -> str:
    """What the section is for, and a row for each key."""
    purpose = " ".join((section.__doc__ or "").split())
    return f"{purpose}\n\n" + table([row(section, name, value) for name, value in schema["properties"].items()])


def row(section: Any, name: str, schema: dict[str, Any]) -> tuple[str, str]:
    """A key; its type, default and meaning."""
    field = section.model_fields[name]
    meaning = " ".join((field.description or "").split()).replace("|", "\\|")
    [rule] = [one.may_differ for one in field.metadata if isinstance(one, OnResume)] or ["never"]
    return f"`{name}`", f"*{kind(schema)}; {default(field)}{ON_RESUME[rule]}*<br>{meaning}"


def default(field: Any) -> str:
    """A key's default as YAML has it; a key without one is required."""
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if value is None or value in ([], {}):
        return "optional"
    return "default `" + (f"[{', '.join(map(str, value))}]" if isinstance(value, list) else shown(value)) + "`"


def shown(value: Any) -> str:
    """A value as YAML has it."""
    return str(value).lower() if isinstance(value, bool) else str(value).replace("\n", "\\n")


def kind(schema: dict[str, Any]) -> str:
    """What a value may be, in words, from its JSON schema."""
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(kind(one) for one in choices if one.get("type") != "null")
    if "$ref" in schema:
        return "mapping"
    if "enum" in schema:
        return ", ".join(f"`{shown(value)}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema["type"] == "array" and not schema["items"]:
        return "list of values"
    if schema["type"] == "array":
        if schema["items"].get("type") == "number":
            return "list of numbers"
        return "path or list of paths" if kind(schema["items"]) == "path" else "list of text"
    words = {"boolean": "true or false", "object": "mapping", "string": schema.get("format", "text")}
    return words.get(schema["type"], schema["type"]) + limits(schema)


def limits(schema: dict[str, Any]) -> str:
    """The range of a number, if it has one."""
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    ends = {name: schema[name] for name in signs if name in schema}
    if ends.keys() == {"minimum", "maximum"} and all(value >= 1 or value == 0 for value in ends.values()):
        return f", {ends['minimum']:,.0f} to {ends['maximum']:,.0f}"
    return " and".join(f" {signs[name]} {value:,}" for name, value in ends.items())


def table(rows: list[tuple[str, str]]) -> str:
    """A Markdown table."""
    head = [("key", "type, default and meaning"), ("---", "---")]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [*head, *rows]) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("run-file.md").write_text(page())
