"""The shape of a transformer, and how many parameters it has."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from meshwright.config.base import Section

Family = Literal["gpt", "llama"]


class ModelConfig(Section):
    """A decoder-only transformer of the GPT or the Llama family.

    GPT: learned positions, LayerNorm, GELU (tanh form), biases, tied embeddings unless told otherwise.
    Llama: rotary positions, RMSNorm, SwiGLU, grouped-query attention, no biases, untied embeddings.
    """

    name: str = Field("", description="name shown in reports")
    family: Family = Field("gpt", description="gpt or llama")
    layers: int = Field(gt=0, description="number of transformer blocks")
    hidden: int = Field(gt=0, description="width of the residual stream")
    heads: int = Field(gt=0, description="number of attention (query) heads")
    kv_heads: int = Field(0, ge=0, description="number of key and value heads; 0 means equal to heads")
    ffn: int = Field(
        0, ge=0, description="width of the MLP; 0 means 4 x hidden (gpt) or 8/3 x hidden, rounded up to 32"
    )
    vocab: int = Field(gt=0, description="size of the vocabulary, as the embedding holds it")
    max_positions: int = Field(0, ge=0, description="learned positions (gpt); 0 means batch.seq_len")
    tied_embeddings: bool | None = Field(
        None, description="output head shares the embedding; default true for gpt, false for llama"
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, description="probability, on embeddings and both residual branches"
    )
    attention_dropout: float = Field(
        0.0, ge=0, lt=1, description="probability, on attention weights; above 0 attention runs unfused"
    )
    norm_eps: float = Field(1e-5, gt=0, description="added to the variance in norms")
    rope_theta: float = Field(10000.0, gt=0, description="base of the rotary frequencies (llama)")
    init_std: float = Field(
        0.02,
        gt=0,
        description="standard deviation of initial weights; / sqrt(2 x layers) on output projections",
    )

    @field_validator("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "max_positions", mode="before")
    @classmethod
    def _no_bool(cls, value: object) -> object:
        if isinstance(value, bool):
            raise ValueError(f"a whole number is needed, not {value}")
        return value

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        data = dict(data)
        family, heads, hidden = data.get("family", "gpt"), data.get("heads"), data.get("hidden")
        if not data.get("kv_heads") and isinstance(heads, int):
            data["kv_heads"] = heads
        if not data.get("ffn") and isinstance(hidden, int):
            data["ffn"] = -(-8 * hidden // (3 * 32)) * 32 if family == "llama" else 4 * hidden
        if data.get("tied_embeddings") is None:
            data["tied_embeddings"] = family != "llama"
        return data

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if self.hidden % self.heads:
            raise ValueError(
                f"model.hidden = {self.hidden} is not divisible by model.heads = {self.heads}; "
                f"nearest legal hidden: {nearest_multiples(self.hidden, self.heads)}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model.heads = {self.heads} is not divisible by model.kv_heads = {self.kv_heads}; "
                f"legal kv_heads: {nearest_divisors(self.kv_heads, self.heads)}"
            )
        if self.family == "llama" and self.head_dim % 2:
            raise ValueError(
                f"model.hidden / model.heads = {self.head_dim} is odd, but rotary positions turn pairs; "
                "choose an even head size"
            )
        if self.family == "gpt" and self.kv_heads != self.heads:
            raise ValueError(
                f"model.kv_heads = {self.kv_heads} needs model.family = 'llama'; "
                f"with family 'gpt' it must equal heads = {self.heads}"
            )
        return self

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    @property
    def biases(self) -> bool:
        """Whether linear layers have biases (GPT)."""
        return self.family == "gpt"

    @property
    def layer_parameters(self) -> int:
        """Parameters of one block: attention, MLP and both norms."""
        hidden, kv = self.hidden, self.kv_heads * self.head_dim
        attention = hidden * (hidden + 2 * kv) + hidden * hidden
        if self.family == "gpt":
            biases = (hidden + 2 * kv) + hidden + self.ffn + hidden
            return attention + 2 * hidden * self.ffn + biases + 4 * hidden
        return attention + 3 * hidden * self.ffn + 2 * hidden

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the word embedding alone."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Distinct parameters of the whole model: a tied embedding is counted once."""
        positions = self.max_positions * self.hidden if self.family == "gpt" else 0
        head = 0 if self.tied_embeddings else self.embedding_parameters
        final_norm = self.hidden * (2 if self.family == "gpt" else 1)
        return self.layers * self.layer_parameters + self.embedding_parameters + positions + head + final_norm

    def parameters_over_tensor_ranks(self, tp: int) -> int:
        """Parameters summed over `tp` tensor-parallel ranks, replicated ones counted on each.

        This is what Megatron-DeepSpeed logs as UNIQUE and what the Frontier study's code prints:
        174,706,360,320 for its 175B model under tp = 4. Norms, the biases of row-parallel layers and the
        learned positions stand whole on every tensor-parallel rank.
        """
        replicated_layer = 4 * self.hidden + 2 * self.hidden if self.family == "gpt" else 2 * self.hidden
        replicated = self.layers * replicated_layer
        if self.family == "gpt":
            replicated += self.max_positions * self.hidden + 2 * self.hidden
        else:
            replicated += self.hidden
        return self.parameters + (tp - 1) * replicated


def nearest_multiples(value: int, of: int) -> str:
    """The multiples of `of` just below and above `value`, as text."""
    below, above = value // of * of, (value // of + 1) * of
    return f"{below} or {above}" if below else str(above)


def nearest_divisors(value: int, of: int, count: int = 3) -> str:
    """The divisors of `of` nearest to `value`, as text."""
    divisors = [d for d in range(1, of + 1) if of % d == 0]
    return ", ".join(map(str, sorted(sorted(divisors, key=lambda d: abs(d - value))[:count])))
