"""YAML settings files, checked by pydantic: all mistakes are reported at once, each with what is allowed; and how two
nested settings differ, which messages about caches and run folders list."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, LiteralString, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from lookonce.errors import UsageError, explain_os_error
from lookonce.files import read_limited
from lookonce.text import nfc, shown

Settings = TypeVar("Settings", bound=BaseModel)
SCALARS = (str, int, Path)


@dataclass(frozen=True)
class OnResume:
    """What a key of the run file says of a training that is resumed: whether the key's value may be another one."""

    may_differ: Literal["never", "content", "free"]
    """`never`: it decides what is trained. `content`: it names files, whose content is compared instead. `free`: what
    is trained does not depend on it."""
    unless_best: tuple[str, ...] = ()
    """Values of `train.best` with which it may not differ after all, because it decides which checkpoint is the
    result."""


Key = TypeVar("Key")
Same = Annotated[Key, OnResume("never")]
ByContent = Annotated[Key, OnResume("content")]
Free = Annotated[Key, OnResume("free")]
FreeUnlessAnswersDecide = Annotated[Key, OnResume("free", unless_best=("metric",))]


class Section(BaseModel):
    """Settings that belong together; docstrings of fields are pydantic's descriptions.

    A key that takes a list takes one value too, which means a list of one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _reads_values(cls, values: Any) -> Any:
        """A key without a value means its default, unless the key may be null.

        What pydantic lets pass is refused: `true` as a number, which Python counts as 1, and NUL characters.
        """
        if not isinstance(values, dict):
            return values
        read, wrong = {}, list[InitErrorDetails]()
        for name, value in values.items():
            if field := cls.model_fields.get(name):
                if value is None and type(None) not in get_args(field.annotation):
                    continue
                kinds = {get_origin(kind) or kind for kind in _alternatives(field.annotation)}
                value = as_list(value) if list in kinds and kinds <= {list, type(None)} else value
                if problem := _wrong_kind(value, field.annotation):
                    error = PydanticCustomError("kind", problem)
                    wrong.append({"type": error, "loc": (name,), "input": values[name]})
            read[name] = value
        if wrong:
            raise ValidationError.from_exception_data(cls.__name__, wrong)
        return read


def _wrong_kind(value: Any, annotation: Any) -> LiteralString | None:
    """What is wrong with a value, or with one in a list, that pydantic lets pass; None if nothing is."""
    kinds = _alternatives(annotation)
    if isinstance(value, list):
        inner = next((get_args(kind)[0] for kind in kinds if get_origin(kind) is list), Any)
        return next((problem for item in value if (problem := _wrong_kind(item, inner))), None)
    if isinstance(value, str) and "\0" in value:
        return "Input should have no NUL character"
    if isinstance(value, bool) and {int, float} & set(kinds) and not {bool, Any} & set(kinds):
        is_word = any(value in get_args(kind) for kind in kinds if get_origin(kind) is Literal)
        return None if is_word else "Input should be a number"
    return None


def as_list(value: Any) -> Any:
    """One value as a list of one."""
    return [value] if isinstance(value, SCALARS) else value


def read_settings(path: Path, kind: type[Settings], called: str, hint: str, form: str) -> Settings:
    """Read a YAML file.

    In messages, `called` names the file, `hint` follows if it cannot be read, and `form` says what it must contain.

    Raises:
        UsageError: the file is missing or not YAML, or a key or value is wrong.
    """
    return checked(load_values(path, called, hint, form), kind, called)


def checked(values: dict[str, Any], kind: type[Settings], called: str) -> Settings:
    """Settings of these values; raises UsageError with all mistakes if a key or value is wrong."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problems = "\n".join(f"  {explain(problem, kind)}" for problem in error.errors())
        raise UsageError(f"{called} is wrong:\n{problems}") from None


MAX_YAML_BYTES = 1 << 24
MAX_DEPTH, MAX_VALUES = 50, 1_000_000
"""The deepest nesting of a YAML file, and the most values."""
MAX_SEED = 2**32 - 1
"""The largest seed that numpy takes."""
MAX_COUNT = 1_000_000_000
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
MAX_VALUE_CHARS = 200
TRUTH_VALUES = "YAML reads yes, no, on and off as truth values; put such a word into quotes"
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The loader with libyaml is ten times as fast; not every build of PyYAML has it."""


class _Loader(_SafeLoader):  # type: ignore[misc]
    """PyYAML's safe loader, which refuses a key that is there twice; PyYAML itself keeps the last one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = Counter(nfc(key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for key in (key for key, number in keys.items() if number > 1):
            problem = f"the key {key!r} appears twice"
            raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)
        values: dict[Any, Any] = super().construct_mapping(node, deep)
        return values


def parse_yaml(text: str) -> Any:
    """The value of a YAML text; raises ValueError if it is not YAML, or too deep or large with aliases replaced."""
    try:
        _check_size(text)
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"a value cannot be read ({shown(repr(error))})") from None  # `!!bool x`, `!!int ""`, ...


def _check_size(text: str) -> None:
    """Check the nesting, and the number of values with each alias counted as what it stands for.

    libyaml overflows the stack at a depth of some ten thousand, and aliases of aliases stand for any number of values
    ("billion laughs"), which a message or a merge would write out. So events are counted before values are made.
    """
    counts, anchors, sizes = [0], [""], dict[str, int]()
    for event in yaml.parse(text, _SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            known = sizes.get(event.anchor or "")  # none if there is no such anchor, or it is around the alias
            counts[-1] += MAX_VALUES if known is None else known
        elif isinstance(event, yaml.ScalarEvent):
            counts[-1] += 1
            sizes[event.anchor or ""] = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            counts.append(1)
            anchors.append(event.anchor or "")
        elif isinstance(event, yaml.CollectionEndEvent):
            sizes[anchors.pop()] = counts[-1]
            counts[-2:] = [counts[-2] + counts[-1]]
        if len(counts) > MAX_DEPTH:
            raise ValueError(f"its values are nested more than {MAX_DEPTH} deep")
        if counts[-1] > MAX_VALUES:
            raise ValueError(f"it has more than {MAX_VALUES:,} values, each alias counted as what it stands for")


def load_values(path: Path, called: str, hint: str, form: str) -> dict[str, Any]:
    """The values in a YAML file, before they are checked; the other arguments are those of `read_settings`.

    Raises:
        UsageError: the file is missing or not YAML.
    """
    try:
        values = parse_yaml(read_limited(path, MAX_YAML_BYTES).decode("utf-8"))
    except PermissionError as error:
        raise UsageError(explain_os_error(error)) from None
    except OSError as error:
        raise UsageError(f"cannot read {called}: {(error.strerror or str(error)).lower()}; {hint}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"cannot read {called}: {error}; {hint}") from None
    except ValueError as error:
        raise UsageError(f"{called} is not YAML: {error}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{called} must be {form}")
    return values


def set_key(values: dict[str, Any], assignment: str) -> None:
    """Set a value by its dotted name: "section.key=value" in YAML; raises UsageError for any other form."""
    name, sign, text = assignment.partition("=")
    *sections, key = name.strip().split(".")
    if not sign or not key:
        raise UsageError(f"--set {assignment!r} is not of the form section.key=value, for example train.epochs=5")
    for section in sections:
        if values.get(section) is None:
            values[section] = {}
        values = values[section]
        if not isinstance(values, dict):
            raise UsageError(f"--set {assignment!r}: {section} is not a section")
    try:
        values[key] = parse_yaml(text)
    except ValueError:
        raise UsageError(f"--set {assignment!r}: {text!r} is not a YAML value") from None


def number_from_text(value: Any) -> Any:
    """A number for a text such as "1e-5", which YAML does not read as a number; all else unchanged."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def explain(problem: Any, kind: type[BaseModel]) -> str:
    """One of pydantic's errors as a line for users."""
    location = [str(part) for part in problem["loc"]]
    name = re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", ".".join(location))
    if problem["type"] == "extra_forbidden":
        removed = getattr(kind, "removed", {})
        if hint := removed.get(name) or removed.get(location[-1]):
            return f"{name}: this key was removed; {hint}"
        keys = _keys(kind, location[:-1])
        near = difflib.get_close_matches(location[-1], keys, n=1, cutoff=0.5)
        hint = f"; did you mean `{near[0]}`?" if near else f"; known keys: {', '.join(keys)}" if keys else ""
        return f"{name}: unknown key{hint}"
    if problem["type"] == "missing":
        return f"{name}: is missing"
    message = problem["msg"].removeprefix("Value error, ")
    value = problem["input"]
    got = "" if isinstance(value, dict) and value else f" (got {_repr(value)})"
    if problem["type"] == "string_type" and isinstance(value, bool):
        got += f"; {TRUTH_VALUES}"
    where = f"{name}: " if name else ""  # mistakes of the whole file have no name
    return f"{where}{message}{got}"


def _alternatives(annotation: Any) -> list[Any]:
    """The types of an annotation, unions taken apart."""
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [alternative for argument in get_args(annotation) for alternative in _alternatives(argument)]
    return [annotation]


def _repr(value: Any) -> str:
    """A value for a message, cut if long; Python refuses to write integers of thousands of digits."""
    try:
        return shown(repr(value), MAX_VALUE_CHARS)
    except ValueError:
        return "an integer of thousands of digits"


def _keys(kind: Any, location: Sequence[str]) -> list[str]:
    """The keys of the section at this location; none inside lists."""
    for part in location:
        field = getattr(kind, "model_fields", {}).get(part)
        kind = field.annotation if field else None
    return list(getattr(kind, "model_fields", []))


Difference = tuple[str, Any, Any]
"""Dotted name, the first value, the second value; None where the key is missing."""


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Difference]:
    """The keys whose values differ, sorted by name."""
    mine, theirs = flatten(mine), flatten(theirs)
    names = sorted(mine.keys() | theirs.keys())
    return [(name, mine.get(name), theirs.get(name)) for name in names if mine.get(name) != theirs.get(name)]


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one level with dotted names."""
    flat: dict[str, Any] = {}
    for name, item in value.items():
        flat |= flatten(item, f"{prefix}{name}.") if isinstance(item, Mapping) else {f"{prefix}{name}": item}
    return flat
