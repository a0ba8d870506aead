"""All keys of files that people write, with the types and the bounds of their values, found by introspection."""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo


def types_of(annotation: Any, metadata: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The types that a value may have, unions and lists and mappings taken apart, each with its own metadata."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        yield from types_of(inner, (*metadata, *more))
    elif get_origin(annotation) in (Union, UnionType):
        for inner in get_args(annotation):
            yield from types_of(inner, metadata)
    else:
        yield annotation, metadata
        if get_origin(annotation) not in (Literal, None):
            for inner in get_args(annotation):
                yield from types_of(inner)


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Each key of a file and of the sections in it, with its types and what is known of these."""
    for name, field in model.model_fields.items():
        for kind, metadata in types_of(field.annotation, tuple(field.metadata)):
            yield f"{prefix}{name}", kind, metadata
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from keys_of(kind, f"{prefix}{name}.")


def bounds_of(metadata: tuple[Any, ...]) -> tuple[float | None, float | None]:
    """The lowest and the highest value that annotations allow."""
    flat = [one for some in metadata for one in (some.metadata if isinstance(some, FieldInfo) else [some])]
    low = [getattr(one, name) for one in flat for name in ("ge", "gt") if getattr(one, name, None) is not None]
    high = [getattr(one, name) for one in flat for name in ("le", "lt") if getattr(one, name, None) is not None]
    return max(low, default=None), min(high, default=None)
