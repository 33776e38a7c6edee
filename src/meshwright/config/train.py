"""Everything one training run is: model, layout, batch, optimizer, data, checkpoints, launch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from meshwright.config.base import Section
from meshwright.config.layout import Batch, Layout
from meshwright.config.model import ModelConfig

Precision = Literal["fp64", "fp32", "bf16", "fp16"]


class Training(Section):
    """The step loop."""

    steps: int = Field(100, gt=0, description="optimizer steps to train")
    tokens: int = Field(
        0, ge=0, description="stop after this many tokens, if that comes first; 0 means never"
    )
    precision: Precision = Field(
        "fp32", description="fp64, fp32, bf16 or fp16 (both with fp32 master weights and reductions)"
    )
    seed: int = Field(0, ge=0, lt=2**63, description="seed of weights, data order and dropout")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="cuda means NVIDIA and AMD GPUs alike; auto takes them if there are any"
    )
    compile: bool = Field(False, description="run the blocks through torch.compile")
    eval_every: int = Field(
        0, ge=0, description="steps between evaluations on the held-out split; 0 means never"
    )
    eval_batches: int = Field(4, gt=0, description="global batches in one evaluation")
    on_nan: Literal["stop", "skip"] = Field(
        "stop", description="what a loss or gradient that is not finite does"
    )
    loss_scale: float = Field(65536.0, gt=0, description="first loss scale (fp16)")
    loss_scale_window: int = Field(
        1000, gt=0, description="good steps after which the loss scale doubles (fp16)"
    )
    reduce_every_microbatch: bool = Field(
        False,
        description="ZeRO 2 and 3: reduce-scatter gradients in each micro-batch, so that they are never held whole; "
        "default is once a step",
    )
    excluded_steps: int = Field(3, ge=0, description="first steps left out of averages (warm-up of caches)")


class Optimizer(Section):
    """AdamW, its learning-rate schedule, and clipping."""

    lr: float = Field(3e-4, gt=0, description="peak learning rate")
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="last learning rate over lr")
    schedule: Literal["cosine", "constant", "linear", "wsd"] = Field(
        "cosine", description="decay after warm-up: cosine, constant, linear, or wsd (warm-up, stable, decay)"
    )
    warmup_steps: int = Field(0, ge=0, description="steps of linear warm-up from 0")
    decay_fraction: float = Field(
        0.2, gt=0, le=1, description="share of the run that wsd decays in, at its end"
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    beta2: float = Field(0.95, ge=0, lt=1, description="decay of the second moment")
    eps: float = Field(1e-8, gt=0, description="added to the root of the second moment")
    weight_decay: float = Field(0.1, ge=0, description="decoupled; not on norms and biases")
    clip: float = Field(1.0, ge=0, description="largest global gradient norm; 0 means no clipping")


class Data(Section):
    """What is trained on."""

    corpus: str = Field(
        "python-stdlib",
        description="python-stdlib, or a file, folder or glob of .txt, .py, .md or .jsonl files",
    )
    tokenizer: str = Field(
        "", description="a tokenizer.json; empty: a byte-level BPE is trained on the corpus"
    )
    eval_fraction: float = Field(
        0.02, gt=0, lt=1, description="share of the documents held out for evaluation"
    )
    mask_boundaries: bool = Field(
        False,
        description="do not count the loss of a document's first token, which nothing before it foretells",
    )
    cache_dir: str = Field("", description="where token files are kept; empty: the user's cache folder")


class Checkpoint(Section):
    """When the run's state is saved."""

    every_steps: int = Field(0, ge=0, description="steps between checkpoints; 0 means only at the end")
    keep_last: int = Field(2, gt=0, description="how many checkpoints are kept")
    at_end: bool = Field(True, description="save when the run ends, also on Ctrl-C")


class Launch(Section):
    """How ranks are started and watched."""

    hang_timeout_s: float = Field(
        600.0,
        gt=0,
        description="a rank without progress for this long ends the run, with the stack of every rank",
    )
    threads_per_rank: int = Field(0, ge=0, description="CPU threads of a rank; 0 means cores / local ranks")
    keep_memory: bool = Field(
        True, description="on CPU, keep freed memory in the process instead of giving it back between tensors"
    )


class Log(Section):
    """What the run writes beside metrics.jsonl."""

    tensorboard: bool = Field(True, description="write TensorBoard events")
    sample_tokens: int = Field(
        0, ge=0, description="tokens of text to generate when the run ends; 0 means none"
    )


class TrainConfig(Section):
    """A whole training run. Written as config.toml into the run directory, it reproduces the run."""

    model: ModelConfig = Field(description="the transformer")
    layout: Layout = Field(default_factory=lambda: layout_default(), description="how it lies over ranks")
    batch: Batch = Field(default_factory=lambda: Batch.model_validate({}), description="data of one step")
    training: Training = Field(
        default_factory=lambda: Training.model_validate({}), description="the step loop"
    )
    optimizer: Optimizer = Field(
        default_factory=lambda: Optimizer.model_validate({}), description="AdamW and its schedule"
    )
    data: Data = Field(default_factory=lambda: Data.model_validate({}), description="the corpus")
    checkpoint: Checkpoint = Field(
        default_factory=lambda: Checkpoint.model_validate({}), description="saving"
    )
    launch: Launch = Field(
        default_factory=lambda: Launch.model_validate({}), description="starting and watching"
    )
    log: Log = Field(default_factory=lambda: Log.model_validate({}), description="what is written")

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if self.optimizer.warmup_steps > self.training.steps:
            raise ValueError(
                f"optimizer.warmup_steps = {self.optimizer.warmup_steps} is more than training.steps = "
                f"{self.training.steps}; choose at most {self.training.steps}"
            )
        return self

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a data-parallel rank in one step."""
        return self.batch.micro_batches(self.layout)

    @property
    def steps(self) -> int:
        """Steps to train: `training.steps`, or fewer if `training.tokens` is reached first."""
        if not self.training.tokens:
            return self.training.steps
        return min(self.training.steps, -(-self.training.tokens // self.batch.tokens))


def layout_default() -> Layout:
    """One rank, nothing parallel."""
    return Layout.model_validate({})
