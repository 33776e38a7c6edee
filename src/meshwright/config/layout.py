"""How a model is laid out over ranks: the layout, the batch, and every rule they must keep.

Predictor, search, trainer, tuner and exports all ask `layout_violations`; nobody else refuses a layout.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from meshwright.config.base import Section, closest, explain
from meshwright.config.model import ModelConfig, nearest_divisors, nearest_multiples
from meshwright.errors import UserError

Recompute = Literal["none", "selective", "full"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zb"]


class Layout(Section):
    """Degrees of each parallel axis and the techniques used with them.

    As text: `tp=4,pp=16,dp=8,mbs=1,zero=1,recompute=full`. Keys left out have the defaults below.
    """

    tp: int = Field(1, gt=0, description="tensor parallel degree")
    cp: int = Field(1, gt=0, description="context parallel degree (only 1 so far)")
    ep: int = Field(1, gt=0, description="expert parallel degree (only 1 so far)")
    pp: int = Field(1, gt=0, description="pipeline parallel degree")
    dp: int = Field(1, gt=0, description="data parallel degree")
    vpp: int = Field(1, gt=0, description="virtual pipeline stages per rank")
    mbs: int = Field(1, gt=0, description="micro-batch size, in sequences")
    zero: int = Field(
        0,
        ge=0,
        le=3,
        description="ZeRO stage: what is sharded over dp (1 optimizer, 2 gradients, 3 parameters)",
    )
    sp: bool = Field(False, description="sequence parallel: norms and dropout sharded over tp")
    recompute: Recompute = Field("none", description="activation recomputation: none, selective or full")
    schedule: Schedule = Field(
        "1f1b", description="pipeline schedule: gpipe, 1f1b, interleaved (default for vpp > 1) or zb"
    )

    @field_validator("tp", "cp", "ep", "pp", "dp", "vpp", "mbs", "zero", mode="before")
    @classmethod
    def _no_bool(cls, value: object) -> object:
        if isinstance(value, bool):
            raise ValueError(f"layout: a whole number is needed, not {value}")
        return value

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: object) -> object:
        if isinstance(data, dict) and "schedule" not in data and str(data.get("vpp", 1)) not in ("1",):
            return {**data, "schedule": "interleaved"}
        return data

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The layout that `text` names. Raises UserError for unknown keys and wrong values."""
        return layout_from(parse_layout_text(text))

    @property
    def world_size(self) -> int:
        """Ranks the layout takes: tp x cp x pp x dp."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def chunks(self) -> int:
        """Virtual pipeline stages over all ranks: pp x vpp."""
        return self.pp * self.vpp

    def __str__(self) -> str:
        parts = [f"tp={self.tp}", f"pp={self.pp}", f"dp={self.dp}", f"mbs={self.mbs}", f"zero={self.zero}"]
        if self.cp > 1:
            parts.append(f"cp={self.cp}")
        if self.ep > 1:
            parts.append(f"ep={self.ep}")
        if self.vpp > 1:
            parts.append(f"vpp={self.vpp}")
        parts += [f"sp={str(self.sp).lower()}", f"recompute={self.recompute}", f"schedule={self.schedule}"]
        return ",".join(parts)


class Batch(Section):
    """One optimizer step's worth of data."""

    gbs: int = Field(8, gt=0, description="global batch size, in sequences")
    seq_len: int = Field(256, gt=1, description="sequence length, in tokens")

    @field_validator("gbs", "seq_len", mode="before")
    @classmethod
    def _no_bool(cls, value: object) -> object:
        if isinstance(value, bool):
            raise ValueError(f"batch: a whole number is needed, not {value}")
        return value

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.gbs * self.seq_len

    def micro_batches(self, layout: Layout) -> int:
        """Micro-batches each data-parallel rank runs a step: m = gbs / (dp x mbs)."""
        return self.gbs // (layout.dp * layout.mbs)


def parse_layout_text(text: str) -> dict[str, str]:
    """`tp=2,pp=4` as a dictionary. Raises UserError when a part is not `key=value` or comes twice."""
    values: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise UserError(f"layout '{text}': '{part}' is not key=value, as in tp=2,pp=2,dp=1,mbs=1")
        if key not in Layout.model_fields:
            raise UserError(f"layout '{text}': unknown key '{key}'{closest(key, Layout.model_fields)}")
        if key in values:
            raise UserError(f"layout '{text}': '{key}' is given twice")
        values[key] = value
    return values


def layout_from(values: object) -> Layout:
    """The layout of a dictionary or a text. Raises UserError that names each wrong key."""
    if isinstance(values, str):
        values = parse_layout_text(values)
    try:
        return Layout.model_validate(values)
    except ValidationError as error:
        raise explain(error, Layout, "layout.") from None


def layout_violations(
    model: ModelConfig, layout: Layout, batch: Batch, world_size: int | None = None
) -> list[str]:
    """Every rule that model, layout, batch (and world size, if given) break: one sentence each.

    Each sentence names the field, its value, and the nearest legal values. An empty list means legal.
    """
    found = [*_axis_violations(layout, world_size), *_tensor_violations(model, layout, batch)]
    found += _pipeline_violations(model, layout, batch)
    rows = layout.dp * layout.mbs
    if batch.gbs % rows:
        found.append(
            f"batch.gbs = {batch.gbs} is not divisible by dp x mbs = {layout.dp} x {layout.mbs} = {rows}; "
            f"nearest legal gbs: {nearest_multiples(batch.gbs, rows)}"
        )
    if model.family == "gpt" and 0 < model.max_positions < batch.seq_len:
        found.append(
            f"batch.seq_len = {batch.seq_len} is longer than model.max_positions = {model.max_positions}; "
            f"choose seq_len <= {model.max_positions} or raise max_positions"
        )
    return found


def _axis_violations(layout: Layout, world_size: int | None) -> list[str]:
    found = []
    for axis, name in (("cp", "context"), ("ep", "expert")):
        if getattr(layout, axis) > 1:
            found.append(
                f"{axis} = {getattr(layout, axis)}: {name} parallelism is not supported yet; set {axis}=1"
            )
    if world_size is not None and layout.world_size != world_size:
        rest = layout.world_size // layout.dp
        fits = world_size % rest == 0
        hint = (
            f"dp = {world_size // rest} would fit"
            if fits
            else f"nearest: {nearest_multiples(world_size, rest)} ranks"
        )
        found.append(
            f"the layout takes tp x cp x pp x dp = {layout.tp} x {layout.cp} x {layout.pp} x {layout.dp} = "
            f"{layout.world_size} ranks, but there are {world_size}; {hint}"
        )
    return found


def _tensor_violations(model: ModelConfig, layout: Layout, batch: Batch) -> list[str]:
    tp, found = layout.tp, []
    # kv_heads divides heads, so a tp that divides kv_heads divides heads as well: one sentence is enough.
    name = "kv_heads" if model.heads % tp == 0 else "heads"
    for key, value in ((name, getattr(model, name)), ("ffn", model.ffn)):
        if value % tp:
            found.append(
                f"model.{key} = {value} is not divisible by tp = {tp}; nearest legal tp: {nearest_divisors(tp, value)}"
            )
    if tp > model.vocab:
        found.append(f"tp = {tp} is larger than model.vocab = {model.vocab}; choose tp <= {model.vocab}")
    if layout.sp and batch.seq_len % tp:
        found.append(
            f"batch.seq_len = {batch.seq_len} is not divisible by tp = {tp} under sp=true; "
            f"nearest legal seq_len: {nearest_multiples(batch.seq_len, tp)}"
        )
    return found


def _pipeline_violations(model: ModelConfig, layout: Layout, batch: Batch) -> list[str]:
    found = []
    if layout.chunks > model.layers:
        found.append(
            f"model.layers = {model.layers} is too few for pp x vpp = {layout.pp} x {layout.vpp} = {layout.chunks} "
            f"stages of at least one layer; choose pp x vpp <= {model.layers}"
        )
    if layout.vpp > 1 and layout.pp == 1:
        found.append(f"vpp = {layout.vpp} needs pp >= 2, but pp = 1; set vpp=1")
    if layout.vpp > 1 and layout.schedule not in ("interleaved", "zb"):
        found.append(
            f"vpp = {layout.vpp} needs schedule=interleaved or schedule=zb, not {layout.schedule}; or set vpp=1"
        )
    if layout.schedule == "interleaved" and layout.vpp == 1:
        found.append("schedule = interleaved needs vpp >= 2, but vpp = 1; set vpp=2 or schedule=1f1b")
    micro_batches = batch.micro_batches(layout)
    divisible = batch.gbs % (layout.dp * layout.mbs) == 0
    if layout.vpp > 1 and divisible and micro_batches % layout.pp:
        legal = [int(m) for m in nearest_multiples(micro_batches, layout.pp).split(" or ")]
        found.append(
            f"the number of micro-batches m = gbs / (dp x mbs) = {micro_batches} is not divisible by pp = {layout.pp}, "
            f"which vpp = {layout.vpp} needs; nearest legal gbs: "
            + " or ".join(str(m * layout.dp * layout.mbs) for m in legal)
        )
    return found


def check_layout(model: ModelConfig, layout: Layout, batch: Batch, world_size: int | None = None) -> None:
    """Raises UserError with all violations, a line each, if there are any."""
    found = layout_violations(model, layout, batch, world_size)
    if found:
        raise UserError("\n".join(found))


def model_from(values: object, prefix: str = "model.") -> ModelConfig:
    """The model of a dictionary. Raises UserError that names each wrong key."""
    try:
        return ModelConfig.model_validate(values)
    except ValidationError as error:
        raise explain(error, ModelConfig, prefix) from None
