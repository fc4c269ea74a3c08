"""Predicts the memory of each process in a mode: the traced update, with tensors sharded or offloaded as in this mode.

The settings are from the config, including a user's DeepSpeed file. `benchmarks/plan.py` compares all formulas with the
allocations of real processes.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from common.internals.transformers import unsplit_layers
from common.models.packed import BYTES_PER_WEIGHT, count_all, count_packed
from common.parallel import deepspeed_files
from common.parallel.launch import Launch
from common.training.optimizer_choice import kinds_of_split
from common.training.optimizers import OPTIMIZERS
from common.training.process_grid import ProcessGrid
from common.training.recipe_traits import Traits
from tools.plan.layer_extrapolation import count_layers
from tools.plan.memory_profile import Parts, Profile

# DeepSpeed's defaults, in elements: reduce_bucket_size, and stage3_max_live_parameters (gathered by ZeRO-3 at once).
REDUCE_BUCKET = 500_000_000
KEPT_WHOLE = 1_000_000_000
HOST, FILES = "host", "files"


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model that determine memory and communication volume of its shards."""

    parameters: int  # elements
    trained: int
    largest_layer: int  # elements of the largest module that is all-gathered as a unit
    outside: int  # elements outside such modules: embedding, last norm, head
    width: int = 0  # width of the hidden states of text
    layers: int = 0
    packed: int = 0  # elements in 4 bits (--quantize)
    packed_in_layer: int = 0  # of these, in the largest layer
    exchanged: int = 0  # elements of a token's queries, keys, values and attention output together, per layer
    parts: tuple[list[int], list[int]] | None = None  # result of `stages.count_parts`, for a recipe with stages

    def frozen_bytes(self, width: int) -> float:
        """Returns the bytes of the weights that are not trained. width: bytes per element of those not in 4 bits."""
        return width * float(self.parameters - self.trained - self.packed) + BYTES_PER_WEIGHT * self.packed

    def layer_bytes(self, width: int) -> float:
        """Returns the bytes of the weights of the largest layer, all-gathered. width: as in `frozen_bytes`."""
        return width * float(self.largest_layer - self.packed_in_layer) + BYTES_PER_WEIGHT * self.packed_in_layer

    def part(self, share: float) -> "ModelSizes":
        """Returns the sizes of a fraction `share` of the model, for tensor or pipeline parallelism."""
        held, trained, outside = (int(share * size) for size in (self.parameters, self.trained, self.outside))
        return replace(self, parameters=held, trained=trained, outside=outside)


def measure_model(model: Any) -> ModelSizes:
    """Returns the sizes of a model, with or without data. `_no_split_modules` are all-gathered as units."""
    names, sizes = unsplit_layers(model), [(0, 0)]
    inside: set[int] = set()
    for module in model.modules():
        if type(module).__name__ in names and not inside & {id(p) for p in module.parameters()}:
            sizes.append((count_all(module), count_packed(module)))
            inside |= {id(p) for p in module.parameters()}
    total, (largest, packed_in_layer) = count_all(model), max(sizes)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    shape = ModelSizes(total, trained, largest, total - sum(size for size, _ in sizes))
    shape = replace(shape, packed=count_packed(model), packed_in_layer=packed_in_layer)
    text = model.config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int) or not isinstance(getattr(text, "hidden_size", None), int):
        return shape
    groups, size = getattr(text, "num_key_value_heads", None) or heads, getattr(text, "head_dim", None)
    exchanged = 2 * (heads + groups) * (size or text.hidden_size // heads)
    shape = replace(shape, width=text.hidden_size, layers=count_layers(model.config) or 0, exchanged=exchanged)
    stages: Any = sys.modules.get("common.tasks.pipeline.stages")  # imported only by recipes with stages
    parts = stages and stages.find_parts(model)
    return replace(shape, parts=stages.count_parts(*parts)) if parts else shape


@dataclass(frozen=True)
class Mode:
    """Parallelism, precision and offload of a config file on a machine."""

    name: str
    kind: str  # plain, DDP, FSDP, DeepSpeed
    precision: str  # no, bf16, fp16
    processes: int  # on all nodes together
    stage: int = 0  # ZeRO stage
    state_on: str = "device"  # location of the optimizer state: device, host, files
    weights_on: str = "device"
    zero: Any = None  # section zero_optimization of the DeepSpeed file
    replicas: int = 1  # replicas of FSDP2's shards (HSDP)
    sequence: int = 1  # processes that share a sequence
    tensor: int = 1  # processes that share a layer
    pipeline: int = 1  # processes that share the depth of the model
    schedule: str = "1f1b"  # schedule of the pipeline
    nodes: int = 1
    flags: tuple[str, ...] = ()  # flags of `accelerate launch` in addition to the config

    @property
    def grid(self) -> ProcessGrid:
        """Returns the process grid."""
        return ProcessGrid(self.processes, self.sequence, self.tensor, self.pipeline)

    @property
    def traced(self) -> ProcessGrid:
        """Returns the grid of the group whose first process is traced."""
        return ProcessGrid(self.grid.group_size, self.sequence, self.tensor)

    @property
    def shards(self) -> int:
        """Returns the number of processes over which FSDP2 shards a tensor."""
        return self.processes // self.replicas // self.tensor

    @property
    def splits(self) -> tuple[str, ...]:
        """Returns the kinds of `optimizers.SPLITS` by which the weights are split."""
        return kinds_of_split(self.kind, self.tensor)

    @property
    def weights_dtype(self) -> str:
        """Returns the dtype of the compute weights. FSDP2 and DeepSpeed cast the weights; other modes use autocast."""
        return self.precision if self.kind in ("FSDP", "DeepSpeed") and self.precision != "no" else "float32"

    @property
    def autocast(self) -> str:
        """Returns the precision of autocast; "no" for DeepSpeed, which does not use autocast."""
        return "no" if self.kind == "DeepSpeed" else self.precision


def parse_mode(launch: Launch, name: str, traits: Traits, flags: tuple[str, ...] = ()) -> Mode:
    """Returns the mode of a config. traits: those of the recipe. flags: of `accelerate launch`, for the command."""
    grid = launch.grid
    mode = Mode(
        name,
        launch.mode,
        launch.mixed_precision,
        launch.num_processes,
        sequence=grid.sequence,
        tensor=grid.tensor,
        pipeline=grid.pipeline,
        schedule=traits.pipeline_schedule or "",
        nodes=launch.num_machines,
        flags=flags,
    )
    if launch.mode == "FSDP":
        location = HOST if str(launch.settings.get("fsdp_offload_params")).lower() == "true" else "device"
        replicas = max(1, launch.sizes["dp_replicate"])
        return replace(mode, replicas=replicas, state_on=location, weights_on=location)
    if launch.mode != "DeepSpeed":
        return mode
    zero = deepspeed_files.read_deepspeed_config(launch.deepspeed_config).get("zero_optimization", {})
    locations, devices = {"none": "device", "cpu": HOST, "nvme": FILES}, deepspeed_files.offload_devices(zero)
    state_on, weights_on = (locations[devices[part]] for part in ("offload_optimizer", "offload_param"))
    return replace(mode, stage=zero.get("stage", 0), zero=zero, state_on=state_on, weights_on=weights_on)


def needs(profile: Profile, shape: ModelSizes, mode: Mode, micro_batches: int) -> dict[str, Parts]:
    """Returns the bytes on the device of the process with the highest peak, by segment and part.

    profile: of a process in the grid `Mode.traced`, with all layers. micro_batches: number per update and process.
    """
    if mode.pipeline > 1:
        stages = _stages(profile, shape, mode, micro_batches)
        return max(stages, key=lambda segments: sum(peak(segments)[1].values()))
    if mode.tensor > 1:
        shape = replace(shape.part(1 / mode.tensor), largest_layer=shape.largest_layer // mode.tensor)
    return _on_each(profile, shape, mode, micro_batches > 1)


def _on_each(profile: Profile, shape: ModelSizes, mode: Mode, accumulates: bool) -> dict[str, Parts]:
    """Returns the bytes of a process with this part of the model, by segment and part."""
    width = 2 if mode.weights_dtype != "float32" else 4
    segments = {}
    for segment, parts in profile.segments.items():
        if not accumulates and ("forward 1" in segment or "backward 1" in segment):
            continue
        parts = {name: size for name, size in parts.items() if size}
        parts["activations"] = parts.get("activations", 0) + parts.pop("cast weights", 0)
        if mode.kind == "DDP" and mode.processes > 1:
            _ddp(parts, segment, shape, accumulates)
        elif mode.kind == "FSDP":
            _fsdp(parts, segment, shape, mode, width)
        elif mode.kind == "DeepSpeed":
            _zero(parts, segment, shape, mode, width)
        segments[segment] = parts
    return segments


def peak(segments: dict[str, Parts]) -> tuple[str, Parts]:
    """Returns the segment with the most memory, and its parts."""
    return max(segments.items(), key=lambda item: sum(item[1].values()))


def on_host(shape: ModelSizes, mode: Mode, optimizer: str) -> tuple[float, float]:
    """Returns the offloaded bytes in host memory and in files, per node. optimizer: its name in `OPTIMIZERS`."""
    width, info = 2 if mode.precision != "no" else 4, OPTIMIZERS[optimizer]
    outside = shape.outside if shape.trained == shape.parameters else 0  # an adapter leaves embeddings untrained
    state = (4.0 + info.state_bytes) * shape.trained  # with the master weights
    if info.outside_bytes is not None:
        state += (info.outside_bytes - info.state_bytes) * outside
    held = {HOST: 0.0, FILES: 0.0, "device": 0.0}
    if mode.kind == "FSDP":
        # `state` includes the trained weights, because FSDP2's shards are the master weights; gradients are added.
        held[mode.state_on] += state + 4.0 * shape.trained + shape.frozen_bytes(width)
    elif mode.kind == "DeepSpeed":
        held[mode.state_on] += state + (4.0 * shape.trained if mode.state_on == HOST else 0)
        held[mode.weights_on] += float(width * shape.parameters)
    return held[HOST] / mode.nodes, held[FILES] / mode.nodes


def _stages(profile: Profile, shape: ModelSizes, mode: Mode, micro_batches: int) -> Iterator[dict[str, Parts]]:
    """Yields the memory of each pipeline stage: its layers, activations of micro-batches in flight, received tensors.

    Hidden states and gradients are received in float32, in buffers that `torch.distributed.pipelining` allocates once,
    for all micro-batches.
    """
    from common.tasks.pipeline.stages import (
        choose_stage_starts,  # imported here because recipes without stages do not need it
    )

    assert shape.parts and profile.outside, "a model with stages is traced at two depths"
    parameters, flops = shape.parts
    cuts, hidden = choose_stage_starts(parameters, flops, mode.pipeline), 4.0 * profile.tokens * shape.width
    for stage, (first, last) in enumerate(pairwise(cuts)):
        is_first, is_last = stage == 0, stage == mode.pipeline - 1
        held = sum(parameters[first + 1 : last + 1]) + parameters[0] * is_first + parameters[-1] * is_last
        in_flight = micro_batches if mode.schedule == "gpipe" else min(mode.pipeline - stage, micro_batches)
        segments = {}
        for segment, parts in profile.segments.items():
            outside = profile.outside.segments[segment]
            inside = _less(parts, outside)
            own = {name: (last - first) / shape.layers * size for name, size in inside.items()}
            for name in ("logits", "activations", "cast weights"):
                own[name] = own.get(name, 0) + outside.get(name, 0) * is_last
            for name in ("weights", "gradients", "optimizer state"):
                own[name] = parts.get(name, 0) * held / shape.parameters
            if segment.startswith(("forward", "backward")):
                ended = _less(profile.segments["forward 1, end"], profile.outside.segments["forward 1, end"])
                kept = (last - first) / shape.layers * ended.get("activations", 0)
                own["activations"] += (in_flight - 1) * kept + in_flight * hidden * (is_first + (not is_last))
            own["received"] = micro_batches * hidden * ((not is_first) + (not is_last))
            segments[segment] = own
        yield _on_each(replace(profile, segments=segments), shape.part(held / shape.parameters), mode, True)


def _less(parts: Parts, others: Parts) -> Parts:
    return {name: max(0.0, size - others.get(name, 0)) for name, size in parts.items()}


def _ddp(parts: Parts, segment: str, shape: ModelSizes, accumulates: bool) -> None:
    """Adds DDP's buckets. Gradients are views of the buckets, except those accumulated before the reduction."""
    if not accumulates or segment.startswith(("clip", "step", "evaluation")):
        parts["gradients"] = 0
    parts["buckets"] = 4.0 * shape.trained


def _fsdp(parts: Parts, segment: str, shape: ModelSizes, mode: Mode, width: int) -> None:
    """Adds FSDP2's float32 shards, the unsharded root and two layers in the compute dtype, and a gradient in flight."""
    n = mode.shards
    shard = (4.0 * shape.trained + shape.frozen_bytes(width)) / n  # next to an adapter, in the compute dtype or 4 bits
    gradients = parts.pop("gradients", 0) / width * 4 / n
    state = parts.pop("optimizer state", 0) / width * 4 / n
    parts["weights"] = 0 if mode.weights_on == HOST else shard
    if "teacher" in parts:
        parts["teacher"] = 0 if mode.weights_on == HOST else parts["teacher"] / n
    parts["gradients"] = 0 if mode.weights_on == HOST else gradients
    parts["optimizer state"] = 0 if mode.state_on == HOST else state
    if (n > 1 or mode.weights_on == HOST) and segment.startswith(("forward", "backward", "evaluation")):
        parts["gathered layers"] = width * float(shape.outside) + 2 * shape.layer_bytes(width)
        if segment.startswith("backward"):
            # A full gradient in the compute dtype, and its float32 copy, the input of the reduce-scatter.
            largest = max(shape.largest_layer, shape.outside if segment.endswith("end") else 0)
            parts["gradients on their way"] = (width + 4.0) * largest * shape.trained / shape.parameters


def _zero(parts: Parts, segment: str, shape: ModelSizes, mode: Mode, width: int) -> None:
    """Adds ZeRO's flat partitions: float32 master weights and gradients next to the weights; buckets as configured."""
    n, stage, zero = mode.processes, mode.stage, mode.zero or {}
    traced = parts.pop("gradients", 0) / width
    state = parts.pop("optimizer state", 0) / width * 4 / n
    parts["weights"] = width * shape.parameters / (n if stage == 3 else 1)
    masters = 4.0 * shape.trained / n
    parts["gradients"] = 4.0 * (traced if stage < 2 else shape.trained / n)
    parts["optimizer state"] = masters + state
    if mode.state_on != "device":
        parts["optimizer state"] = 0
        parts["gradients"] = 0 if stage >= 2 else parts["gradients"]
    if mode.weights_on != "device":
        parts["weights"] = 0
    if stage == 3 and segment.startswith(("forward", "backward", "evaluation")):
        limit = _size(zero, "stage3_max_live_parameters", KEPT_WHOLE)
        parts["gathered layers"] = width * float(min(shape.parameters, limit))
    if stage == 3 and segment.startswith(("forward", "backward")):
        largest = max(shape.outside, shape.largest_layer)
        parts["gradients on their way"] = width * largest * shape.trained / shape.parameters
    # In bf16 with float32 accumulation, ZeRO-1 uses BF16_Optimizer, which has no buckets; ZeRO-2's buckets are in bf16.
    bucket = (4.0 if stage == 3 else width) * _size(zero, "reduce_bucket_size", REDUCE_BUCKET)
    has_none = stage == 1 and mode.precision == "bf16"
    held_between = stage == 3 or (stage == 1 and segment.startswith("forward 1"))
    if not has_none and (held_between or segment.startswith("backward")):
        parts["buckets"] = bucket * (2 if zero.get("overlap_comm") else 1)


def _size(zero: dict[str, Any], name: str, default: int) -> int:
    value = zero.get(name, default)
    return default if value == "auto" else int(value)
