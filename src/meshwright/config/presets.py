"""Named models: those of the Frontier study, Llama 3, GPT-2, and models of laptop size."""

from __future__ import annotations

import functools
import tomllib
from importlib import resources

from meshwright.config.base import closest
from meshwright.config.model import ModelConfig
from meshwright.errors import UserError


@functools.cache
def model_presets() -> dict[str, ModelConfig]:
    """All presets by name, in the order of the file."""
    text = resources.files("meshwright.config").joinpath("models.toml").read_text(encoding="utf-8")
    return {
        name: ModelConfig.model_validate({"name": name, **{k: v for k, v in table.items() if k != "source"}})
        for name, table in tomllib.loads(text).items()
    }


@functools.cache
def preset_sources() -> dict[str, str]:
    """Where each preset's figures come from."""
    text = resources.files("meshwright.config").joinpath("models.toml").read_text(encoding="utf-8")
    return {name: table["source"] for name, table in tomllib.loads(text).items()}


def model_preset(name: str) -> ModelConfig:
    """The preset called `name`. Raises UserError with the nearest known name."""
    presets = model_presets()
    if name not in presets:
        raise UserError(f"unknown model '{name}'{closest(name, presets)}")
    return presets[name]
