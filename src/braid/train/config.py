"""The configuration of a training: one frozen value that is sent to every rank as JSON.

Problems that are visible in the configuration alone are reported here, before any process starts.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, get_args

import msgspec

from braid.errors import ConfigError, below, raise_all
from braid.programs.layout import Mesh
from braid.programs.sampling import share_of
from braid.programs.schedule.files import check_schedule, schedule_named
from braid.programs.schedule.pipeline import RECOMPUTE_MODES, VersionRule
from braid.runtime.option_types import DeviceName, DtypeName, Number, RateRuleName, shown_as
from braid.train.model_sizes import MODELS, ModelSize

__all__ = ["MEASURED", "MODELS", "ModelSize", "TrainConfig", "checkpoints_in"]

RECOMPUTES = (*RECOMPUTE_MODES, "memory", "speed")
MEASURED = ("time", "size")  # measured costs that can balance the stages


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Configuration of one training: the options of `braid train`.

    Attributes:
        model: tiny, mini, small, medium, gpt2, gpt2-medium or gpt2-large.
        data: Text files (default: the sources of Python's standard library).
        steps: Total number of optimizer steps.
        batch: Sequences of a global batch; a multiple of N.
        context: Bytes of a sequence.
        lr: Peak learning rate.
        warmup: Steps of linear warm-up (default: a twentieth of all steps).
        weight_decay: Weight decay of matrices.
        clip: Largest global norm of the gradient.
        seed: Seed of the initial weights and of the order of samples.
        eval_every: Steps between evaluations on held-out text; 0 to evaluate only at the end.
        eval_samples: Largest number of sequences of an evaluation.
        checkpoint_every: Steps between checkpoints; 0 to save only at the end.
        keep: Number of checkpoints to keep.
        log_dir: Directory for logs, metrics and checkpoints (default: ./runs/<date>_<hex>; with
            --resume auto the last run).
        reference_shards: Number of shards to run in turn on one rank; the result has the same bits
            as training on that number of ranks.
        sample_bytes: Length of the text that is generated at the end.
        mesh: Sizes of the mesh axes, such as pp=2 for pipeline, tp=2 for tensor, cp=2 for context
            and dp=2 for data parallelism, or several of them (default: all data parallel). With
            --min-ranks, also meshes for fewer ranks: "pp=2,dp=2; dp=3".
        schedule: Schedule of a pipeline, such as gpipe, 1f1b, zbv or v_half; or a file with a
            program, also as CSV of torch's pipelining.
        microbatches: Micro-batches per step of a pipeline; with --versions, only for 2bw.
        balance: Division of the layers over the stages of a pipeline: time or size (measured), or
            the number of layers of each stage, such as 3,4,3 (default: as even as possible).
        recompute: Micro-batches that recompute activations in backward to save memory: always,
            except_last, never, or the number of layers between two stored activations; speed keeps
            results of matrix products. Without --mesh memory or speed, for segments of blocks.
        versions: Train on an asynchronous pipeline, which steps without waiting: stash,
            vertical_sync or 2bw (PipeDream) chooses the weight versions. Without --mesh, each of
            -n ranks (default: 2) is a stage.
        stage_replicas: Number of ranks of each stage of an asynchronous pipeline, such as 3,1
            (default: 1).
        flush_every: Steps between flushes of an asynchronous pipeline, at which Ctrl-C is noticed;
            lower it if these steps take longer than 30 s.
        stale_lr_steps: Number of first steps of an asynchronous pipeline in which a stage's
            learning rate grows from lr / (age of its gradients) to lr (PipeMare); 0 to disable.
        shard: ZeRO stage. 1 shards optimizer states over ranks, 2 also gradients, 3 also
            parameters; 0 shards nothing.
        strategy: ps for a parameter server with N workers (default: collectives).
        servers: Number of servers of the parameter server.
        replicas: Number of copies of each shard of a parameter server's tables on other servers.
        staleness: Number of steps that a worker may be ahead of the slowest worker.
        min_ranks: Smallest number of ranks with which the training continues, without a restart,
            after ranks are lost (default: all).
        spares: Number of idle ranks that replace lost ranks, with --min-ranks.
        restarts: Largest number of processes started to replace lost ranks, with --min-ranks.
        batch_per_rank: Keep the number of samples per rank, and scale the learning rate with the
            number of ranks by this rule (linear, sqrt or constant), with --min-ranks (default:
            keep the number of samples per step).
        verify: Steps between checks in which ranks recompute each other's gradients, with
            --min-ranks; 0 for none.
        replace_slow: Replace a rank that is slower than its peers by this factor, such as 2, with
            --min-ranks; 0 to keep slow ranks.
        copies: With --min-ranks, ranks keep copies of parts that only one rank, or one of several
            hosts, has. With --no-copies they do not: steps are faster, but the loss of a part costs
            all steps since the last checkpoint.
        device: Device of each rank: auto for the GPU of its local rank if torch sees one, else the
            CPU. Ranks share GPUs if there are fewer.
        dtype: Dtype of matrix products: fp32, or bf16 by autocast. Parameters are float32.
    """

    model: str = "tiny"
    data: Annotated[tuple[str, ...], shown_as("FILE [FILE ...]")] = ()
    steps: int = 200
    batch: int = 16
    context: int = 128
    lr: float = 3e-3
    warmup: Number = None
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    eval_every: int = 100
    eval_samples: int = 64
    checkpoint_every: int = 100
    keep: int = 3
    log_dir: Annotated[str, shown_as("DIR")] = ""
    reference_shards: int = 0
    sample_bytes: int = 240
    mesh: Annotated[str, shown_as("AXES")] = ""
    schedule: str = "1f1b"
    microbatches: int = 4
    balance: Annotated[str, shown_as("BY")] = ""
    recompute: str = "never"
    versions: str = ""
    stage_replicas: Annotated[str, shown_as("COUNTS")] = ""
    flush_every: int = 20
    stale_lr_steps: int = 0
    shard: int = 0
    strategy: Annotated[str, shown_as("NAME")] = ""
    servers: int = 1
    replicas: int = 0
    staleness: int = 0
    min_ranks: int = 0
    spares: int = 0
    restarts: int = 3
    batch_per_rank: RateRuleName = ""
    verify: int = 0
    replace_slow: float = 0.0
    copies: bool = True
    device: DeviceName = "auto"
    dtype: DtypeName = "fp32"

    def __post_init__(self) -> None:
        problems = []
        known_of = {"model": MODELS, "device": get_args(DeviceName), "dtype": get_args(DtypeName)}
        known_of["batch_per_rank"] = get_args(RateRuleName)
        for name, known in known_of.items():
            if (value := getattr(self, name)) not in known:
                problems.append(
                    f"{name} must be one of {', '.join(filter(None, known))}, got {value!r}"
                )
        least = {
            0: "seed eval_every checkpoint_every reference_shards sample_bytes warmup replicas "
            "staleness stale_lr_steps min_ranks spares restarts verify replace_slow",
            1: "steps batch context eval_samples keep microbatches flush_every servers",
        }
        for low, names in least.items():
            values = {name: getattr(self, name) for name in names.split()}
            problems += below(low, **{k: value for k, value in values.items() if value is not None})
        if not 0 < self.lr < math.inf or not self.clip > 0 or not 0 <= self.weight_decay < math.inf:
            problems.append(
                f"lr, clip and weight_decay must be positive numbers, got {self.lr:g}, "
                f"{self.clip:g} and {self.weight_decay:g}"
            )
        problems += filter(None, [check_schedule(self.schedule)])
        if self.balance not in {"", *MEASURED} and not _sizes_in(self.balance):
            problems.append(
                "balance must be time, size or the layers of each stage such as 3,4,3, got "
                f"{self.balance!r}"
            )
        is_number = self.recompute.isdecimal() and int(self.recompute) > 0
        if self.recompute not in RECOMPUTES and not is_number:
            problems.append(
                f"recompute must be one of {', '.join(RECOMPUTES)} or a number of layers > 0, "
                f"got {self.recompute!r}"
            )
        if self.shard not in {0, 1, 2, 3}:
            problems.append(f"shard must be 0, 1, 2 or 3, got {self.shard}")
        if self.shard and self.reference_shards:
            problems.append(
                f"shard={self.shard} shards over ranks, and reference_shards="
                f"{self.reference_shards} runs on one: leave one of them out"
            )
        problems += self._server_problems() + self._version_problems() + self._elastic_problems()
        raise_all(problems)

    def _changed(self, names: str) -> list[str]:
        """Return which of the named options, in order, do not have their default value."""
        default_of = {field.name: field.default for field in fields(self)}
        return [name for name in names.split() if getattr(self, name) != default_of[name]]

    def _combined(self, option: str, names: str) -> list[str]:
        """Return an error for each of the named options that is used beside `option`."""
        return [
            f"--{option} cannot be combined with --{name.replace('_', '-')}: leave one out"
            for name in self._changed(names)
        ]

    def _server_problems(self) -> list[str]:
        """Return the errors in the options of a parameter server."""
        if self.strategy not in {"", "ps"}:
            return [f"strategy must be ps or left out, got {self.strategy!r}"]
        if not self.strategy:
            names = self._changed("servers replicas staleness")
            return [f"{name} needs a parameter server: add --strategy ps" for name in names]
        problems = self._combined("strategy ps", "mesh shard reference_shards recompute")
        if self.replicas >= self.servers:
            problems.append(
                f"--replicas {self.replicas} needs {self.replicas + 1} servers, got {self.servers}"
            )
        return problems

    def _elastic_problems(self) -> list[str]:
        """Return the errors in the options of an elastic training."""
        if not self.min_ranks:
            names = self._changed("spares verify replace_slow restarts batch_per_rank copies")
            several = ["several meshes need --min-ranks"] * (len(self.meshes) > 1)
            options = [name.replace("_", "-").replace("copies", "no-copies") for name in names]
            return [f"--{option} needs --min-ranks" for option in options] + several
        others = "strategy versions reference_shards balance recompute keep"
        problems = self._combined("min-ranks", others)
        if not (self.copies or self.mesh or self.shard):
            problems.append("--no-copies needs --mesh or --shard: each rank has the whole model")
        problems += [
            f"--{option} replaces ranks, whose parts are lost without copies: leave out --no-copies"
            for option, value in (("verify", self.verify), ("replace-slow", self.replace_slow))
            if value and not self.copies
        ]
        if any("cp" in mesh.axes for mesh in self.meshes):
            problems.append(f"--min-ranks does not support axis cp of {self.mesh}: leave it out")
        return problems

    def _version_problems(self) -> list[str]:
        """Return the errors in the options of an asynchronous pipeline."""
        if not self.versions:
            used = [f"stage_replicas={self.stage_replicas}"] * bool(self.stage_replicas)
            used += [f"stale_lr_steps={self.stale_lr_steps}"] * (self.stale_lr_steps > 0)
            return [f"{one} needs an asynchronous pipeline: add --versions stash" for one in used]
        problems = []
        if self.stage_replicas and min(_sizes_in(self.stage_replicas), default=0) < 1:
            problems.append(
                f"stage_replicas must be numbers of ranks such as 3,1, got {self.stage_replicas!r}"
            )
        if self.versions not in get_args(VersionRule):
            known = ", ".join(get_args(VersionRule))
            problems.append(f"versions must be one of {known}, got {self.versions!r}")
        problems += self._combined(f"versions {self.versions}", "schedule shard strategy")
        if self.recompute not in RECOMPUTE_MODES:
            problems.append(
                f"--versions {self.versions} needs --recompute {', '.join(RECOMPUTE_MODES)}, got "
                f"{self.recompute}"
            )
        return problems

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of ranks of each stage of an asynchronous pipeline, real or emulated."""
        one_each = (1,) * (self.reference_shards or self.num_stage_ranks)
        return _sizes_in(self.stage_replicas) or one_each

    @property
    def every(self) -> int:
        """Number of micro-batches per optimizer step of an asynchronous pipeline."""
        return self.microbatches if self.versions == "2bw" else 1

    @property
    def num_helpers(self) -> int:
        """Number of ranks that do not train: a scheduler and servers."""
        return 1 + self.servers if self.strategy else 0

    @property
    def stage_sizes(self) -> tuple[int, ...] | None:
        """Number of layers of each stage, if `balance` lists them."""
        return _sizes_in(self.balance) or None

    @property
    def num_stages(self) -> int:
        """Number of stages of the pipeline."""
        if self.versions:
            return len(self.counts)
        program = schedule_named(self.schedule)(self.num_stage_ranks, self.microbatches)
        return program.header.num_units

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """Meshes of the training: at the start, and for other numbers of ranks; empty if none."""
        return tuple(map(Mesh.parse, self.mesh.split(";"))) if self.mesh else ()

    @property
    def _axes(self) -> dict[str, int]:
        return dict(self.meshes[0].axes) if self.mesh else {}

    @property
    def num_stage_ranks(self) -> int:
        """Number of ranks of a pipeline; 1 without one.

        Raises:
            ConfigError: The mesh has other axes than pp, tp, cp and dp.
        """
        axes = self._axes
        if others := set(axes) - {"pp", "tp", "cp", "dp"}:
            msg = (
                f"--mesh {self.mesh}: {', '.join(sorted(others))} is not supported: use pp=N for "
                "pipeline, tp=N for tensor, cp=N for context and dp=N for data parallelism, in any "
                "combination"
            )
            raise ConfigError(msg)
        return axes.get("pp", 1)

    @property
    def is_on_mesh(self) -> bool:
        """Whether several ranks form a replica, or a one-stage pipeline accumulates gradients."""
        axes = self._axes
        return "pp" in axes or axes.get("tp", 1) * axes.get("cp", 1) > 1

    @property
    def has_segments(self) -> bool:
        """Whether segments of the blocks are recomputed in a model that no mesh divides."""
        return self.recompute in {"memory", "speed"} and not self.is_on_mesh

    def check_ranks(self, num_ranks: int) -> int:
        """Check that `num_ranks` ranks can train, and return the number of shards of a batch.

        Raises:
            ConfigError: `num_ranks` is below 1 or does not fit the mesh, the batch cannot be
                divided, or `reference_shards` is used with several ranks.
        """
        if num_ranks < 1:
            msg = f"the number of ranks must be at least 1, got {num_ranks}"
            raise ConfigError(msg)
        if self.reference_shards and num_ranks != 1:
            count = self.reference_shards
            msg = f"--reference-shards {count} trains on one rank, got {num_ranks}: use -n 1"
            raise ConfigError(msg)
        if self.meshes and self.meshes[0].size != num_ranks:
            size = self.meshes[0].size
            msg = f"--mesh {self.mesh} has {size} ranks, got -n {num_ranks}: make them equal"
            raise ConfigError(msg)
        problems = []
        if self.min_ranks > num_ranks:
            least = self.min_ranks
            problems.append(f"--min-ranks {least} needs at least {least} ranks, got -n {num_ranks}")
        if self.min_ranks and self.batch % num_ranks:
            problems.append(
                f"--batch {self.batch} cannot be divided into {num_ranks} micro-batches, one for "
                f"each rank at first: use --batch {-(-self.batch // num_ranks) * num_ranks}"
            )
        raise_all(problems)
        for mesh in self.meshes[1:]:
            if not self.min_ranks <= mesh.size < num_ranks:
                least = self.min_ranks
                msg = f"--mesh {self.mesh}: {mesh} must have {least} to {num_ranks - 1} ranks"
                raise ConfigError(msg)
            base = self if "pp" in mesh.axes else replace(self, schedule="1f1b")
            replace(base, mesh=str(mesh), batch=mesh.size).check_ranks(mesh.size)
        self._check_stages()
        heads, tensor_ranks = MODELS[self.model].heads, self._axes.get("tp", 1)
        if heads % tensor_ranks:
            valid = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            msg = (
                f"--mesh {self.mesh}: {self.model} has {heads} heads, which cannot be divided over "
                f"{tensor_ranks} ranks; valid: {valid}"
            )
            raise ConfigError(msg)
        chunks = 2 * self._axes.get("cp", 1)
        if chunks > 2 and self.context % chunks:
            msg = (
                f"--mesh {self.mesh}: sequences of {self.context} tokens cannot be divided into "
                f"{chunks} equal chunks, two per rank: use --context "
                f"{-(-self.context // chunks) * chunks}"
            )
            raise ConfigError(msg)
        if self.versions:
            return 1
        of_a_replica = self.num_stage_ranks * tensor_ranks * chunks // 2
        shards = self.reference_shards or num_ranks // of_a_replica
        share_of(range(self.batch), 0, shards)
        return shards

    def _check_stages(self) -> None:
        """Check that every stage has a layer, and that pipeline options have a pipeline."""
        num_ranks = self.num_stage_ranks
        if self.recompute == "memory" and "pp" in self.mesh:
            msg = "--recompute memory is for training without --mesh: use a number of layers"
            raise ConfigError(msg)
        if self.versions:
            self._check_versions()
        if num_ranks == 1 and len(self.meshes) > 1 and "pp" in self.mesh:
            return
        if num_ranks == 1:
            is_row = self.reference_shards or "pp" in self.mesh  # perhaps of one stage
            alone = "" if is_row else "versions balance"
            whole = "" if "pp" in self.mesh or self.has_segments else "recompute"
            for name in self._changed(f"schedule {whole} {alone}"):
                value = getattr(self, name)
                msg = f"--{name} {value} needs a pipeline: add --mesh pp=2, or more stages"
                raise ConfigError(msg)
            return
        stages = self.num_stages
        layers = MODELS[self.model].layers + 2
        if layers < stages:
            msg = (
                f"{self.schedule} on {num_ranks} ranks has {stages} stages, and {self.model} has "
                f"{layers} layers: use fewer ranks, or a larger --model"
            )
            raise ConfigError(msg)
        sizes = self.stage_sizes
        if sizes and (len(sizes) != stages or sum(sizes) != layers or min(sizes) < 1):
            msg = (
                f"--balance {self.balance} has {len(sizes)} stages and {sum(sizes)} layers: it "
                f"must list at least 1 layer for each of {stages} stages, {layers} layers in all"
            )
            raise ConfigError(msg)

    def _check_versions(self) -> None:
        """Check the mesh, replicas and micro-batches of an asynchronous pipeline."""
        needed, num_ranks = sum(self.counts), self.reference_shards or self.num_stage_ranks
        if needed != num_ranks:
            msg = (
                f"--stage-replicas {self.stage_replicas} needs {needed} ranks, but there are "
                f"{num_ranks}: choose other replicas or -n"
            )
            raise ConfigError(msg)
        if self._axes.keys() - {"pp"}:
            msg = (
                f"--versions {self.versions} supports only the mesh axis pp: use --mesh "
                f"pp={self.meshes[0].size}"
            )
            raise ConfigError(msg)
        least = len(self.counts)
        if self.versions == "2bw" and self.microbatches < least:
            msg = f"--versions 2bw needs {least} or more micro-batches: add --microbatches {least}"
            raise ConfigError(msg)
        if self.batch < self.every:
            msg = (
                f"--batch {self.batch} cannot be divided into {self.every} micro-batches: use a "
                f"multiple of {self.every}"
            )
            raise ConfigError(msg)

    @property
    def checkpoints(self) -> str:
        """Directory of the checkpoints."""
        return str(Path(self.log_dir, "checkpoints"))

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, from 0: linear warm-up, then cosine to a tenth.

        Source: I. Loshchilov, F. Hutter, "SGDR", ICLR 2017; without restarts.
        """
        warmup = max(1, self.steps // 20) if self.warmup is None else self.warmup
        if step < warmup:
            return self.lr * (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, self.steps - warmup))
        return self.lr * (0.55 + 0.45 * math.cos(math.pi * progress))

    def to_json(self) -> str:
        """Return the configuration as JSON, for one argument of a command line."""
        return msgspec.json.encode(asdict(self)).decode()

    @classmethod
    def from_json(cls, text: str) -> TrainConfig:
        """Parse the text that `to_json` returned.

        Raises:
            ConfigError: The text is not valid; the message names the wrong part.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, ValueError) as exc:
            msg = f"the configuration of a training is not valid JSON, {text[:80]!r}: {exc}"
            raise ConfigError(msg) from exc


def _sizes_in(balance: str) -> tuple[int, ...]:
    """Return the numbers in a list such as 3,4,3; empty for any other text."""
    parts = [part.strip() for part in balance.split(",")]
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else ()


def checkpoints_in(where: str) -> Path:
    """Return the directory with a run's checkpoints; return any other path unchanged."""
    inner = Path(where) / "checkpoints"
    return inner if inner.is_dir() else Path(where)
