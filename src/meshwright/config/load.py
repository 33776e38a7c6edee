"""Configuration from TOML files, presets and `--set key=value`, in that order; later ones win."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from meshwright.config.base import explain
from meshwright.config.layout import check_layout, parse_layout_text
from meshwright.config.presets import model_preset
from meshwright.config.train import TrainConfig
from meshwright.errors import UserError


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises UserError when it is missing, unreadable or not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give a TOML configuration") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def parse_setting(text: str) -> tuple[list[str], Any]:
    """`optimizer.lr=3e-4` as (["optimizer", "lr"], 3e-4).

    The value is read as TOML (numbers, true, false, quoted text, lists); what is no TOML value is text.
    """
    key, equals, value = (piece.strip() for piece in text.partition("="))
    path = key.split(".")
    if not equals or not all(path):
        raise UserError(f"--set '{text}' is not key=value, as in --set optimizer.lr=3e-4")
    try:
        return path, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return path, value


def apply_setting(tables: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Writes `value` at the dotted `path` into nested tables, in place."""
    for depth, part in enumerate(path[:-1]):
        table = tables.setdefault(part, {})
        if not isinstance(table, dict):
            raise UserError(
                f"--set {'.'.join(path)}: '{'.'.join(path[: depth + 1])}' is a value, not a section"
            )
        tables = table
    tables[path[-1]] = value


def load_config(
    path: Path | None = None,
    *,
    model: str | None = None,
    layout: str | None = None,
    settings: Sequence[str] = (),
    world_size: int | None = None,
) -> TrainConfig:
    """The run's configuration, checked as a whole.

    `path`: TOML file; `model`: preset name (also `model.preset` in the file); `layout`: layout text, replaces
    single keys of the file's; `settings`: `key=value` texts; `world_size`: ranks there are, if already started.
    Raises UserError with every violation, a line each.
    """
    tables = read_toml(path) if path else {}
    if isinstance(tables.get("layout"), str):
        tables["layout"] = parse_layout_text(tables["layout"])
    for text in settings:
        keys, value = parse_setting(text)
        if keys == ["layout"]:
            value = parse_layout_text(str(value))
        apply_setting(tables, keys, value)
    if model:
        apply_setting(tables, ["model", "preset"], model)
    if layout is not None:
        given = tables.get("layout", {})
        if not isinstance(given, dict):
            raise UserError("layout: a table or a text such as 'tp=2,pp=2' is needed")
        tables["layout"] = {**given, **parse_layout_text(layout)}
    return config_from(tables, world_size)


def config_from(tables: dict[str, Any], world_size: int | None = None) -> TrainConfig:
    """The configuration of nested tables, with presets filled in. Raises UserError."""
    tables = dict(tables)
    chosen = tables.get("model", {})
    if isinstance(chosen, str):
        chosen = {"preset": chosen}
    if not isinstance(chosen, dict):
        raise UserError(f"model = {chosen!r}: a table or the name of a preset is needed")
    chosen = dict(chosen)
    preset = chosen.pop("preset", None)
    if preset is not None:
        base = _preset_tables(str(preset), chosen)
        batch = tables.get("batch", {})
        if isinstance(batch, dict) and "seq_len" not in batch and base["max_positions"]:
            tables["batch"] = {**batch, "seq_len": base["max_positions"]}
        chosen = {**base, **chosen}
    elif not chosen:
        raise UserError("no model: give --model PRESET (see `meshwright models`) or a [model] table")
    if isinstance(chosen.get("max_positions", 0), int) and not chosen.get("max_positions"):
        batch = tables.get("batch", {})
        chosen["max_positions"] = batch.get("seq_len", 256) if isinstance(batch, dict) else 256
    tables["model"] = chosen
    if isinstance(tables.get("layout"), str):
        tables["layout"] = parse_layout_text(tables["layout"])
    try:
        config = TrainConfig.model_validate(tables)
    except ValidationError as error:
        raise explain(error, TrainConfig) from None
    check_layout(config.model, config.layout, config.batch, world_size)
    return config


def _preset_tables(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The preset's keys, less those that follow from a key that `changes` sets anew."""
    preset = model_preset(name)
    derived = set()
    if "hidden" in changes or "family" in changes:
        derived.add("ffn")
    if "family" in changes:
        derived.add("tied_embeddings")
    if "heads" in changes and preset.kv_heads == preset.heads:
        derived.add("kv_heads")
    return preset.model_dump(exclude=derived)


def config_to_toml(config: TrainConfig) -> str:
    """The fully resolved configuration as TOML."""
    return tomli_w.dumps(config.model_dump(mode="json"))
