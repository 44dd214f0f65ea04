# SPDX-License-Identifier: Apache-2.0
"""The parameters of each notebook, as frozen dataclasses that refuse impossible combinations.

The defaults of `TrainConfig` are the published protocol of Atomic-GDN2 (seed 000: batch 32 x 2048,
Muon and AdamW at 3e-4, cosine over 8 h 54 min of wall clock) unless a comment says "our choice".
A parameter file states what differs.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from atomic_lib.config.coerce import coerce_fields
from atomic_lib.model.config import ModelConfig
from atomic_lib.presets import get_preset


def _require(condition: bool, key: str, value: Any, want: str) -> None:
    if not condition:
        raise ValueError(f"{key}: {value!r} is not allowed; it must be {want}")


def _require_positive(config: Any, *keys: str) -> None:
    for key in keys:
        value = getattr(config, key)
        _require(value is None or value > 0, key, value, "greater than 0")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What every notebook has: the name of its run. The run folder is outputs/<notebook>-<run>/."""

    run: str

    def __post_init__(self):
        plain = self.run.replace("-", "").replace("_", "").replace(".", "")
        _require(plain.isalnum(), "run", self.run, "letters, digits, '-', '_' and '.' only")


@dataclass(frozen=True, kw_only=True)
class PreflightConfig(RunConfig):
    """Checks one training parameter file against this machine before it costs quota."""

    train: str  # the parameter file to check, as "<notebook>/<run>", e.g. "train_hybrid/seed1"
    topology: str | None = None  # TPU slice to compile for ahead of time, e.g. "v5e-8" (minutes)


@dataclass(frozen=True, kw_only=True)
class KernelAuditConfig(RunConfig):
    """How large the kernel audit is. Inputs are [batch_size, sequence_length, heads, head_dim]."""

    sequence_length: int = 512  # tokens, also of the accuracy and causality checks
    head_dim: int = 128  # of keys and values
    batch_size: int = 1  # of the timed calls
    heads: int = 2  # of the timed calls
    repeats: int = 5  # timed calls of each function; the table shows their median
    compile_for_tpu: bool = False  # also compile for v5e and read the schedules (needs libtpu)

    def __post_init__(self):
        super().__post_init__()
        _require_positive(self, "batch_size", "heads", "head_dim", "repeats")
        _require(self.sequence_length >= 32, "sequence_length", self.sequence_length, "at least 32")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """One training run. Rates are per step, sizes are global (over all devices)."""

    preset: str
    model: dict[str, Any] = field(default_factory=dict)  # fields of the preset to replace
    # What the session must have: a run that would be lost without it stops in its first minute.
    accelerator: Literal["tpu", "gpu", "any"] | None = None
    kernel_backend: Literal["auto", "xla", "reference", "tpu"] = "auto"
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"

    corpus: str = "windmaple/openwebtext-gpt2"
    # The id that ends each document. Given, no token sees another document of its window and no
    # document's first token is predicted; None: windows are read as one text, as the protocol does.
    document_separator: int | None = None
    sequence_length: int = 2048  # tokens
    batch_size: int = 32  # sequences a step, over all devices
    accumulate_steps: int = 1  # slices of the batch that are computed one after another
    init_seed: int = 1
    data_seed: int = 43
    dropout_seed: int = 124
    dropout_rate: float = 0.0

    optimizer: Literal["muon_adamw", "adamw"] = "muon_adamw"
    learning_rate: float = 3e-4  # peak
    weight_decay: float = 0.1
    # Parameter groups that decay: "muon" (hidden matrices), "embedding", "adamw_matrices"
    # (convolution taps), "vectors" (gains, biases, queries).
    decay_groups: tuple[Literal["muon", "embedding", "adamw_matrices", "vectors"], ...] = ("muon",)
    clip_norm: float = 1.0  # of the gradient's global norm
    max_skipped_in_a_row: int = 10  # non-finite steps; then the run fails. Our choice
    adam_b1: float = 0.9
    adam_b2: float = 0.95

    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    schedule_unit: Literal["time", "steps", "tokens"] = "time"
    warmup_steps: int = 100
    budget_seconds: float | None = 32_040.0  # 8 h 54 min, counted from the first cell
    max_steps: int | None = None
    max_tokens: int | None = None
    decay_fraction: float = 0.1  # of the run, for "wsd": how much of its end decays
    floor_fraction: float = 0.1  # of the peak rate; our choice, the protocol does not state it

    eval_every: int = 1500  # steps
    eval_batches: int | None = None  # None: every full batch of the validation split
    eval_batch_size: int | None = None  # sequences; None: batch_size
    eval_lengths: tuple[int, ...] = ()  # tokens; the same text is also read in longer sequences
    checkpoint_seconds: float = 900.0  # our choice; wall clock between checkpoints
    keep_checkpoints: int = 2
    # Earlier outputs of this run: run folders, or folders that hold them. Kaggle's attached outputs
    # are searched in any case.
    resume_from: tuple[str, ...] = ()
    replay: str | None = None  # a run folder or metrics.jsonl whose learning rates are used again
    loss_chunks: int = 1  # slices of the tokens whose logits exist at one time
    data_parallel: int | None = None  # devices that share the batch; None: all that fsdp leaves
    fsdp: int = 1  # devices that share each parameter

    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ("tensorboard",)
    profile_steps: tuple[int, ...] | None = None  # (first, last) step that JAX's profiler traces

    def __post_init__(self):
        super().__post_init__()
        self.model_config  # noqa: B018 - refuses an unknown preset or field at once
        _require_positive(
            self, "sequence_length", "batch_size", "accumulate_steps", "learning_rate", "clip_norm",
            "budget_seconds", "max_steps", "max_tokens", "eval_every", "eval_batches",
            "eval_batch_size", "checkpoint_seconds", "keep_checkpoints", "loss_chunks",
            "data_parallel", "fsdp", "max_skipped_in_a_row",
        )  # fmt: skip
        for key in ("weight_decay", "warmup_steps", "init_seed", "data_seed", "dropout_seed"):
            _require(getattr(self, key) >= 0, key, getattr(self, key), "at least 0")
        for key in ("dropout_rate", "adam_b1", "adam_b2"):
            _require(0 <= getattr(self, key) < 1, key, getattr(self, key), "in [0, 1)")
        for key in ("decay_fraction", "floor_fraction"):
            _require(0 <= getattr(self, key) <= 1, key, getattr(self, key), "in [0, 1]")
        window = self.profile_steps
        _require(
            window is None or (len(window) == 2 and 1 <= window[0] <= window[1]),
            "profile_steps",
            window,
            "two step numbers, 1 <= first <= last",
        )
        self._require_horizon()
        self._require_divisible()
        self._require_lengths()
        vocabulary = self.model_config.vocab_size
        _require(
            self.document_separator is None or 0 <= self.document_separator < vocabulary,
            "document_separator", self.document_separator, f"an id in [0, {vocabulary})",
        )  # fmt: skip

    @cached_property
    def model_config(self) -> ModelConfig:
        """The architecture: the preset with the fields of `model` replaced."""
        replaced = coerce_fields(ModelConfig, self.model, where="model.")
        return replace(get_preset(self.preset), **replaced)

    def _require_horizon(self):
        limits = {"time": "budget_seconds", "steps": "max_steps", "tokens": "max_tokens"}
        needed = limits[self.schedule_unit]
        if getattr(self, needed) is None:
            raise ValueError(
                f"{needed}: missing; schedule_unit {self.schedule_unit!r} counts towards it"
            )

    def _require_divisible(self):
        parts = self.accumulate_steps * (self.data_parallel or 1) * self.fsdp
        if self.batch_size % parts:
            raise ValueError(
                f"batch_size: {self.batch_size} is not divisible by {parts} (accumulate_steps "
                f"{self.accumulate_steps} x data_parallel {self.data_parallel or 1} x fsdp "
                f"{self.fsdp}); choose a multiple"
            )

    def _require_lengths(self):
        _require(
            self.sequence_length % self.loss_chunks == 0, "loss_chunks", self.loss_chunks,
            f"a divisor of sequence_length {self.sequence_length}",
        )  # fmt: skip
        for length in self.eval_lengths:
            _require(
                length > self.sequence_length and length % self.sequence_length == 0,
                "eval_lengths", length,
                f"a multiple of sequence_length {self.sequence_length}, above it",
            )  # fmt: skip

    @property
    def loss_chunk_tokens(self) -> int:
        """Tokens of a sequence whose logits exist at one time."""
        return self.sequence_length // self.loss_chunks

    @property
    def eval_rows(self) -> int:
        """Sequences of an evaluation batch."""
        return self.eval_batch_size or self.batch_size

    @property
    def tokens_per_step(self) -> int:
        """Target tokens of one optimiser step."""
        return self.batch_size * self.sequence_length

    def require_devices(self, device_count: int) -> None:
        """Raises ValueError unless the batch and the mesh fit `device_count` devices."""
        _require(
            device_count % self.fsdp == 0, "fsdp", self.fsdp, f"a divisor of {device_count} devices"
        )
        data_parallel = self.data_parallel or device_count // self.fsdp
        if data_parallel * self.fsdp > device_count:
            raise ValueError(
                f"data_parallel: {data_parallel} x fsdp {self.fsdp} needs "
                f"{data_parallel * self.fsdp} devices; this machine has {device_count}"
            )
        parts = self.accumulate_steps * data_parallel * self.fsdp
        _require(
            self.batch_size % parts == 0,
            "batch_size",
            self.batch_size,
            f"a multiple of {parts} (accumulate_steps {self.accumulate_steps} x "
            f"{data_parallel * self.fsdp} devices)",
        )
        shares = data_parallel * self.fsdp
        _require(
            self.eval_rows % shares == 0, "eval_batch_size", self.eval_rows,
            f"a multiple of {shares} devices",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ExportConfig(RunConfig):
    """Which training runs to export, as run folder names under outputs/."""

    sources: tuple[str, ...]

    def __post_init__(self):
        super().__post_init__()
        _require(len(self.sources) > 0, "sources", self.sources, "a list of run folder names")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(RunConfig):
    """Which exports to evaluate and on how much of the validation split."""

    source: str  # the export run's folder name
    batch_size: int = 32  # sequences
    eval_batches: int | None = None  # None: as many as the source run's last evaluation used

    def __post_init__(self):
        super().__post_init__()
        _require_positive(self, "batch_size", "eval_batches")


@dataclass(frozen=True, kw_only=True)
class CompareConfig(RunConfig):
    """Which training runs to compare, grouped by architecture."""

    baseline: tuple[str, ...]  # run folder names, one a seed
    hybrid: tuple[str, ...]
    targets: tuple[float, ...] = (1.10, 1.08, 1.06, 1.02)  # estimated bits per byte, seed 000's

    def __post_init__(self):
        super().__post_init__()
        _require(len(self.baseline) > 0, "baseline", self.baseline, "a list of run folder names")
        _require(len(self.hybrid) > 0, "hybrid", self.hybrid, "a list of run folder names")


NOTEBOOK_CONFIGS: dict[str, type[RunConfig]] = {
    "preflight": PreflightConfig,
    "kernel_audit": KernelAuditConfig,
    "train_baseline": TrainConfig,
    "train_hybrid": TrainConfig,
    "export": ExportConfig,
    "evaluate": EvaluateConfig,
    "compare": CompareConfig,
    "train": TrainConfig,
}
