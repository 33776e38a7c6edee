"""The base of all configuration sections: frozen, strict, and clear when refused."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from meshwright.errors import UserError


class Section(BaseModel):
    """A frozen group of keys. Unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


def closest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the known name nearest to `name`, else the list of known names."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean '{near[0]}'?" if near else f"; known: {', '.join(names)}"


def known_keys(section: type[BaseModel], path: Iterable[str | int]) -> Iterable[str]:
    """The keys of the section that `path` (without its last part) leads to."""
    for part in list(path)[:-1]:
        field = section.model_fields.get(str(part))
        annotation = field.annotation if field else None
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            section = annotation
    return section.model_fields


def explain(error: ValidationError, section: type[BaseModel], prefix: str = "") -> UserError:
    """All violations of one validation, as one UserError with a sentence a line."""
    lines = []
    for item in error.errors():
        key = prefix + ".".join(str(part) for part in item["loc"])
        value: Any = item.get("input")
        if item["type"] == "extra_forbidden":
            known = known_keys(section, item["loc"])
            lines.append(f"unknown key '{key}'{closest(str(item['loc'][-1]), known)}")
        elif item["type"] == "missing":
            lines.append(f"missing key '{key}': it has no default")
        elif item["type"] == "value_error":
            lines.append(str(item["ctx"]["error"]))
        else:
            message = item["msg"][0].lower() + item["msg"][1:]
            lines.append(f"{key} = {value!r}: {message}")
    return UserError("\n".join(lines))
