"""What a recipe may say: one dataclass a section, its defaults, and the rules between fields."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from omegaconf import MISSING

TARGET = "_target_"
# A mapping with `_target_`, a dotted path, and keyword arguments; bound to its signature before ranks start.
Target = Annotated[dict[str, Any], TARGET]

Complaint = tuple[str, str]  # (key inside the section, what is wrong and what to do)


@dataclass
class Data:
    """Where items come from. `train` and `eval` build map-style data sets."""

    train: Target = MISSING
    # The data set to train on.
    eval: Target | None = None
    # The data set to evaluate on; null = no evaluation.
    num_workers: int = 0
    # Loader processes a rank; 0 = items are made in the training process.
    shuffle: bool = True
    # Draw a new order each epoch, from (seed, epoch) alone.
    drop_last: bool = False
    # Leave out the items at the end of an epoch that do not fill a global batch.
    collate: Target | None = None
    # Turns a list of items into a batch; null = torch's default.

    def check(self) -> Iterator[Complaint]:
        if not 0 <= self.num_workers <= 1024:
            yield "num_workers", f"{self.num_workers} is not a number of loader processes a rank; expected 0 to 1024"


@dataclass
class Batch:
    """How many items an optimizer step and a forward see."""

    global_batch_size: int = MISSING
    # Items one optimizer step sees, over all ranks: the only batch number that changes the maths.
    micro_batch_size: int = MISSING
    # Items one forward of one rank sees: a matter of memory.

    def check(self) -> Iterator[Complaint]:
        if self.global_batch_size < 1:
            yield (
                "global_batch_size",
                f"{self.global_batch_size} is not a number of items; expected 1 or more",
            )
        if self.micro_batch_size < 1:
            yield "micro_batch_size", f"{self.micro_batch_size} is not a number of items; expected 1 or more"


@dataclass
class Train:
    """How long to train, and what a step does besides the optimizer."""

    max_steps: int | None = None
    # Optimizer steps; give this or max_epochs.
    max_epochs: int | None = None
    # Passes over the data; give this or max_steps.
    max_grad_norm: float | None = None
    # Clip by the global norm of the whole gradient; null = no clipping.
    precision: Literal["fp32", "bf16-mixed", "fp16-mixed", "bf16-true"] = "fp32"
    # bf16-mixed: fp32 master weights, bf16 compute, fp32 gradient reduction and norm statistics, everywhere.
    nonfinite: Literal["error", "skip"] = "error"
    # A NaN or infinite gradient: end the run, or leave out that step (the scheduler waits too).
    stop_at_step: int | None = None
    # Stop there, save, and end with code 75; the schedule stays that of the whole run, which a resume goes on with.

    def check(self) -> Iterator[Complaint]:
        if self.max_steps is None and self.max_epochs is None:
            yield "", "neither max_steps nor max_epochs is given; expected one of them, so that the run ends"
        if self.max_steps is not None and self.max_epochs is not None:
            yield "max_epochs", "max_steps is given too; expected one of them"
        if self.max_steps is not None and self.max_steps < 1:
            yield "max_steps", f"{self.max_steps} is not a number of steps; expected 1 or more"
        if self.max_epochs is not None and self.max_epochs < 1:
            yield "max_epochs", f"{self.max_epochs} is not a number of epochs; expected 1 or more"
        if self.max_grad_norm is not None and not 0 < self.max_grad_norm < math.inf:
            yield "max_grad_norm", f"{self.max_grad_norm} is no norm to clip to; expected a number above 0, or null"
        yield from self._check_stop()

    def _check_stop(self) -> Iterator[Complaint]:
        stop = self.stop_at_step
        if stop is not None and stop < 1:
            yield "stop_at_step", f"{stop} is not a step to stop at; expected 1 or more, or null"
        elif stop is not None and self.max_steps is not None and 1 <= self.max_steps < stop:
            yield (
                "stop_at_step",
                f"step {stop} is never reached: the run has max_steps {self.max_steps}; expected that or less, or null",
            )


@dataclass
class Evaluation:
    """When to evaluate. The data set is `data.eval`; the last step is always evaluated."""

    every: int | None = None
    # Optimizer steps between evaluations; null = after the last step only.
    micro_batch_size: int | None = None
    # Items one evaluation forward of one rank sees; null = batch.micro_batch_size.

    def check(self) -> Iterator[Complaint]:
        for name in ("every", "micro_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                yield name, f"{value} is too small; expected 1 or more, or null"


# What is better when it is lower, for checkpoint.best=auto: metrics with such a name, or one that ends so.
_LOWER_IS_BETTER = ("loss", "error", "perplexity")


@dataclass
class Checkpoint:
    """When to save, what to keep of it, and what a run goes on from."""

    every: int | None = None
    # Optimizer steps between checkpoints; null = none by steps.
    every_minutes: float | None = None
    # Minutes between checkpoints, by rank 0's clock; null = none by time.
    final: bool = True
    # Also save after the last step, where anything else here or train.stop_at_step asks for checkpoints.
    keep_last: int | None = 2
    # The newest checkpoints that are kept; null = all.
    keep_best: str | None = None
    # A metric of the evaluation, as eval/accuracy: a new best is saved, and kept while it is the best.
    best: Literal["auto", "highest", "lowest"] = "auto"
    # Which value of keep_best is the best; auto = the lowest of a loss, error or perplexity, else the highest.
    resume: str = "auto"
    # auto: go on from the newest complete checkpoint in the run folder, if there is one; never: start anew; or a
    # path, of a checkpoint or of a folder of them.
    asynchronous: bool = False
    # Write in the background, from a copy in host memory.
    verify: Literal["full", "size"] = "full"
    # Before a load, compare the checksums of all files (full) or their sizes only.
    on_save_error: Literal["raise", "warn"] = "raise"
    # A checkpoint that cannot be written: end the run, or say so and go on.
    export: bool = False
    # Also put model.safetensors with the whole weights into each checkpoint.
    folder: str | None = None
    # Where checkpoints are: a path or an fsspec URL, with a folder for each run folder's name in it; null =
    # checkpoints/ in the run folder.

    @property
    def wanted(self) -> bool:
        """Whether the run saves by itself while it trains."""
        return not (self.every is None and self.every_minutes is None and self.keep_best is None)

    @property
    def best_metric(self) -> str | None:
        """The name of keep_best in the scores of an evaluation: accuracy for eval/accuracy."""
        return None if self.keep_best is None else self.keep_best.removeprefix("eval/")

    def is_better(self, value: float, best: float | None) -> bool:
        """Whether a value of keep_best beats the best so far; NaN never does."""
        lowest = self.best == "lowest" or (self.best == "auto" and (self.best_metric or "").endswith(_LOWER_IS_BETTER))
        if best is None or math.isnan(best):
            return not math.isnan(value)
        return value < best if lowest else value > best

    def check(self) -> Iterator[Complaint]:
        if self.every is not None and self.every < 1:
            yield "every", f"{self.every} is not a number of steps; expected 1 or more, or null"
        if self.every_minutes is not None and not 0 < self.every_minutes < math.inf:
            yield "every_minutes", f"{self.every_minutes} is no time between checkpoints; expected minutes above 0"
        if self.keep_last is not None and self.keep_last < 1:
            yield (
                "keep_last",
                f"{self.keep_last} would keep nothing to go on from; expected 1 or more, or null to keep all",
            )
        if self.keep_best is not None and not re.fullmatch(r"eval/\S+", self.keep_best):
            expected = "expected eval/NAME, as in eval/accuracy"
            yield "keep_best", f"{self.keep_best!r} is no metric of the evaluation; {expected}"
        if self.best != "auto" and self.keep_best is None:
            yield "best", f"{self.best} says nothing without keep_best: give that too, or leave this out"
        if not self.resume:
            yield "resume", "is empty; expected auto, never, or the path of a checkpoint"
        if self.folder == "":
            yield "folder", "is empty; expected a path or an fsspec URL, or null for checkpoints/ in the run folder"


@dataclass
class Load:
    """What of a checkpoint is loaded, by checkpoint.resume and by init_from."""

    strict: bool = True
    # false: what only the checkpoint or only the model has is told, not refused.
    include: list[str] = field(default_factory=list)
    # Globs on full names of parameters and buffers; empty = all.
    exclude: list[str] = field(default_factory=list)
    # Globs on names that are left as they are; goes over include. Where a run began from something else (init_from, or
    # checkpoint.resume with a path), both are for that, and its own checkpoints are loaded whole.
    cast: bool = False
    # Let weights be loaded into another dtype than they were saved in.
    groups: Literal["checkpoint", "recipe"] = "checkpoint"
    # Whose hyper-parameters of the optimizer go on: learning rate, weight decay and the like.

    def check(self) -> Iterator[Complaint]:
        for name in ("include", "exclude"):
            if not all(getattr(self, name)):
                yield name, "holds an empty text, which matches no name; expected globs, as in ['backbone.*']"


@dataclass
class ParameterGroup:
    """Optimizer settings for the parameters whose full name matches; the first group that matches wins."""

    match: str = MISSING
    # A glob on the parameter's full name, as in "*.bias" or "backbone.*".
    options: dict[str, Any] = field(default_factory=dict)
    # Optimizer arguments for these parameters, as in {weight_decay: 0.0}.


Policy = Literal["keep", "sync", "deferred", "exact", "frozen", "group", "layer", "instance"]


# What is recomputed in the backward: see `Recipe`.
ActivationCheckpointing = Literal["none", "blocks"] | int


def activation_checkpointing_refusal(value: ActivationCheckpointing, exact: Exact) -> str | None:
    """The sentence that refuses a value of activation_checkpointing, alone or beside normalization.exact, or None."""
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if value not in ("none", "blocks") and not whole:
        return f"{value!r} recomputes nothing; expected none, blocks, or a whole number n >= 1 for every n-th block"
    if value != "none" and exact.memory == "constant":
        return (
            f"{value} does not go with normalization.exact.memory: constant, which keeps no activations of its blocks "
            "and runs them again already; leave it out, or use memory: blocks"
        )
    return None


@dataclass
class NormalizationRule:
    """A policy for the BatchNorm layers that match; the first rule that matches a layer wins."""

    match: str = MISSING
    # A glob on the layer's full name, as in "backbone.*", or on its class name, as in "BatchNorm1d".
    policy: Policy = MISSING
    # One of normalization.policy, without auto.

    def check(self) -> Iterator[Complaint]:
        if not self.match:
            yield "match", "is empty and matches no layer; expected a glob on a layer or class name, as in 'backbone.*'"


@dataclass
class Exact:
    """How policy exact keeps the whole logical batch in memory."""

    blocks: list[str] = field(default_factory=list)
    # Globs on module names (or class names) that are recomputed in the backward; empty = found in the model.
    offload: bool | Literal["auto"] = "auto"
    # Saved tensors wait for the backward in host memory; auto = those for which the device has little memory left.
    memory: Literal["blocks", "constant"] = "blocks"
    # blocks: one block of the whole logical batch at a time; constant: one micro-batch at a time, which is slower.

    def check(self) -> Iterator[Complaint]:
        if not all(self.blocks):
            yield "blocks", "holds an empty text, which matches no block; expected globs, as in ['stages.*.*']"
        if self.memory == "constant" and self.offload is False:
            yield (
                "offload",
                "false does not go with memory: constant, which keeps tensors on the host; use true or auto",
            )


@dataclass
class Normalization:
    """What becomes of the model's BatchNorm layers, before any backend wraps it."""

    policy: Policy | Literal["auto"] = "keep"
    # keep: as the model has them; running statistics are merged over ranks before evaluation.
    # sync: statistics over all ranks of a micro-step. deferred: of the micro-batch, running ones once a logical batch.
    # exact: statistics and gradients of the whole logical batch. frozen: evaluation statistics, also in training.
    # group, layer, instance: another layer, independent of the batch; needs retraining. auto: keep to exact, says why.
    rules: list[NormalizationRule] = field(default_factory=list)
    # Other policies for some layers.
    num_groups: int = 32
    # group: at most so many groups; fewer where a group would have less than 8 channels.
    over_ranks: bool = False
    # deferred: normalise by the micro-batches of all ranks together.
    pretrained: bool = False
    # The weights come from an earlier training; told to auto.
    exact: Exact = field(default_factory=Exact)

    def check(self) -> Iterator[Complaint]:
        policies = {self.policy, *(rule.policy for rule in self.rules)}
        if self.num_groups < 1:
            yield "num_groups", f"{self.num_groups} is not a number of groups; expected 1 or more"
        if self.over_ranks and not policies & {"deferred", "auto"}:
            yield "over_ranks", "true has a meaning for policy deferred alone (sync and exact always do); leave it out"
        if self.exact != Exact() and not policies & {"exact", "auto"}:
            yield "exact", f"is set, but no layer has policy exact (policy is {self.policy}); leave it out"


@dataclass
class Backend:
    """Which engine runs the model: a name from backends/, a path to such a file, or this mapping inline."""

    EXPECTED: ClassVar[str] = "a name from backends/, a path to such a file, or a mapping with adapter and options"

    name: str = MISSING
    # Shown in reports; a preset's name is its file name.
    adapter: str = MISSING
    # A registered adapter, or "my_package.module:MyEngine".
    options: dict[str, Any] = field(default_factory=dict)
    # Checked against the adapter's own options.


@dataclass
class Launch:
    """How processes start. The profile's file in launch/ gives the defaults."""

    profile: Literal["local"] = "local"
    # local: on this machine, through torch's elastic launcher.
    nproc_per_node: int | Literal["auto"] = "auto"
    # Processes on this machine; auto = one an accelerator, or 2 on a CPU, or 1 for a backend of one process.
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # auto = CUDA when there is one.
    timeout_seconds: float = 600.0
    # A collective that takes longer ends the run.

    def check(self) -> Iterator[Complaint]:
        if isinstance(self.nproc_per_node, int) and self.nproc_per_node < 1:
            yield "nproc_per_node", f"{self.nproc_per_node} starts nothing; expected 1 or more, or auto"
        if not 0 < self.timeout_seconds <= 10_000_000:
            yield "timeout_seconds", f"{self.timeout_seconds} is not a time to wait; expected seconds, 0 to 10,000,000"


@dataclass
class Metrics:
    """What is written and shown while training, besides metrics.jsonl."""

    every: int = 1
    # Optimizer steps between training lines.
    tensorboard: bool = False
    # Also write tensorboard/ in the run folder.
    profile: bool = False
    # Also write profile.json: memory and communication of each rank, and what starting and saving took.
    memory: bool = False
    # Also write memory.json: what each rank's memory is used for, counted tensor by tensor; slow on a CPU.

    def check(self) -> Iterator[Complaint]:
        if self.every < 1:
            yield "every", f"{self.every} is not a number of steps; expected 1 or more"


@dataclass
class Recipe:
    """A whole training run."""

    model: Target = MISSING
    # Builds the torch.nn.Module.
    data: Data = MISSING
    loss: Target = MISSING
    # Builds a loss: loss(model, batch) -> (sum, count), or a torch.nn loss.
    optimizer: Target = MISSING
    # Builds the torch.optim.Optimizer; the engine passes the parameters.
    batch: Batch = MISSING
    train: Train = MISSING
    backend: Backend = MISSING
    name: str = "run"
    # Names the folder under runs/.
    seed: int = 0
    # Of the model's weights, the sample order and the augmentation streams.
    scheduler: Target | None = None
    # Builds the learning rate scheduler; it steps once an optimizer step.
    parameter_groups: list[ParameterGroup] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)
    # Globs on module names (or class names) that are sharded as one unit each; empty = found in the model.
    activation_checkpointing: ActivationCheckpointing = "none"
    # Blocks whose activations are recomputed in the backward, which takes time instead of memory: none; blocks: each
    # sharding unit; or n: every n-th of them, from the first on.
    normalization: Normalization = field(default_factory=Normalization)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    load: Load = field(default_factory=Load)
    init_from: str | None = None
    # Weights to start with: a checkpoint, a .safetensors file or a Hugging Face folder. A resume goes before it.
    metrics: Metrics = field(default_factory=Metrics)
    launch: Launch = field(default_factory=Launch)
    run_dir: str | None = None
    # The run folder; null = runs/<name>/<run id>.

    @property
    def saves(self) -> bool:
        """Whether the run makes checkpoints by itself, and so one after its last step with checkpoint.final."""
        return self.checkpoint.wanted or self.train.stop_at_step is not None

    def check(self) -> Iterator[Complaint]:
        """Rules between sections."""
        nproc = self.launch.nproc_per_node
        if isinstance(nproc, int):
            yield from self.check_world(nproc)
        if not re.fullmatch(r"\w[\w. -]*", self.name):
            expected = "expected letters, digits, '-', '_', '.' or spaces"
            yield "name", f"{self.name!r} cannot name the folder under runs/; {expected}"
        if len(self.name) > 100:
            yield "name", f"{len(self.name)} characters are too long for the folder under runs/; expected 100 at most"
        if self.evaluation.every is not None and self.data.eval is None:
            yield "evaluation.every", "there is nothing to evaluate: give data.eval, or leave this out"
        if self.checkpoint.keep_best is not None and self.data.eval is None:
            yield "checkpoint.keep_best", "there is nothing to evaluate: give data.eval, or leave this out"
        if self.init_from == "":
            yield "init_from", "is empty; expected the path of a checkpoint, a .safetensors file or a folder, or null"
        if not 0 <= self.seed < 2**63:
            yield "seed", f"{self.seed} is not a seed; expected 0 or more"
        refused = activation_checkpointing_refusal(self.activation_checkpointing, self.normalization.exact)
        if refused:
            yield "activation_checkpointing", refused

    def check_world(self, world_size: int) -> Iterator[Complaint]:
        """The batch sizes must fit the number of processes: global = micro x world x a whole number."""
        a_step = self.batch.micro_batch_size * world_size
        total = self.batch.global_batch_size
        if a_step > 0 and total > 0 and total % a_step:
            lower, upper = total // a_step * a_step, (total // a_step + 1) * a_step
            sizes = f"{lower} or {upper}" if lower else f"{upper}"
            micro = (
                _nearest_divisor(total // world_size, self.batch.micro_batch_size) if total % world_size == 0 else None
            )
            hint = f", or micro_batch_size {micro}" if micro else ""
            yield (
                "batch.global_batch_size",
                f"{total} is not a whole number of micro-steps of {self.batch.micro_batch_size} items x "
                f"{world_size} processes; the nearest that work are {sizes}{hint}",
            )

    def gradient_accumulation_steps(self, world_size: int) -> int:
        """Micro-steps in a full window."""
        return self.batch.global_batch_size // (self.batch.micro_batch_size * world_size)


def _nearest_divisor(number: int, near: int) -> int | None:
    """The divisor of `number` next to `near`, looked for no further than 10,000 away."""
    for distance in range(10_000):
        for candidate in (near - distance, near + distance):
            if 0 < candidate <= number and number % candidate == 0:
                return candidate
    return None
