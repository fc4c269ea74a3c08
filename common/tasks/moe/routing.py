"""Balances the experts of a mixture with the same update for any split of the global batch.

The usual balancing loss of a layer with E experts is E x sum over the experts of (share of the tokens) x (mean
probability): a product of two means. Computed per micro-batch, it is not a sum over tokens, so the update would depend
on the split of its global batch. Here the counts cover the full global batch on all ranks. A token counts if its next
token is a target, so padding and dummy samples do not count. `exact` is the mean of the layers' losses. transformers
averages over all layers before the product, so an expert's excess in a layer can cancel its deficit in a different one.
"""

import inspect
import types
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, send_to_device
from torch import Tensor, nn
from transformers import Ernie4_5_MoeConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from common.errors import UserError
from common.models.zero3 import gathered
from common.training.batching import GlobalBatch

BALANCE = {
    "bias": "no loss: a bias on each expert's score, for the choice only, moves once an update, up where the expert "
    "had less than its share of the whole global batch, down where more (arXiv:2408.15664)",
    "exact": "each layer's loss over the whole global batch, on all ranks (arXiv:2501.11873): an extra forward without "
    "gradients counts the tokens first; probabilities are the softmax of the logits, for a sigmoid router too",
    "usual": "transformers' loss of each micro-batch, all layers pooled: approximate, the update depends on how its "
    "global batch is cut",
    "none": "the routers are left alone",
}
UPCYCLED = ("llama", "mistral")  # model types that can be up-cycled, and the settings that they share with ERNIE
UPCYCLED_SETTINGS = (
    "vocab_size num_hidden_layers hidden_size num_attention_heads num_key_value_heads intermediate_size hidden_act "
    "max_position_embeddings initializer_range rms_norm_eps tie_word_embeddings rope_parameters bos_token_id "
    "eos_token_id pad_token_id"
)
BIAS_NAME = "e_score_correction_bias"  # the bias of --balance bias, in every model of transformers that has one
CHOICE_NAMES = ("top_k_index", "router_indices")  # names of the argument with the chosen experts; second: GPT-OSS


@dataclass
class Layer:
    """A sparse layer: its router chooses `top_k` of `num_experts` for each token."""

    block: nn.Module
    router: Any
    experts: Any
    choice: str  # name of the argument of `experts` with each token's chosen experts: int64 (tokens, top_k)
    bias_holder: nn.Module | None  # module with the attribute BIAS_NAME
    num_experts: int
    top_k: int

    @property
    def bias(self) -> Tensor:
        """The bias on the experts' scores."""
        return getattr(self.bias_holder, BIAS_NAME)


def find_layers(model: PreTrainedModel) -> list[Layer]:
    """Returns the sparse layers of a transformers model, in order; empty for a dense model.

    A sparse layer is recognised by its experts: a single module that is called with the chosen experts.

    Raises UserError for a mixture of experts without such modules.
    """
    recorded: Any = getattr(model, "can_record_outputs", {}).get("router_logits")
    if not recorded:
        return []
    config, layers = model.config.get_text_config(), []
    for block in model.modules():
        child: Any
        for child in block.children():
            experts = child.get_base_layer() if hasattr(child, "get_base_layer") else child  # an adapter's wrapper
            if not (choice := _choice(experts)):
                continue
            # `recorded` is a list in some models, which have no such experts and therefore do not get here.
            router = next((m for m in block.modules() if isinstance(m, recorded.target_class)), None)
            if router is not None:
                bias_module = next((m for m in block.modules() if hasattr(m, BIAS_NAME)), None)
                sizes = (experts.num_experts, config.num_experts_per_tok)
                layers.append(Layer(block, router, experts, choice, bias_module, *sizes))
                break
    if not layers:
        raise UserError(
            f"{type(model).__name__}: its experts are not a single module that is called with the choice of each "
            "token, so they cannot be counted or balanced; use a different mixture, such as a Mixtral, or recipes/lm.py"
        )
    return layers


def _choice(module: nn.Module) -> str | None:
    """Returns the name of the argument with the chosen experts, or None if the module does not contain experts."""
    accepted = inspect.signature(module.forward).parameters
    return next((name for name in CHOICE_NAMES if name in accepted), None)


def _num_elements(module: nn.Module) -> int:
    packed = vars(module).get("packed_shapes", {})  # of experts in 4 bits
    sizes = {name: getattr(p, "ds_numel", p.numel()) for name, p in module.named_parameters()}
    return sum((sizes | {name: shape.numel() for name, shape in packed.items()}).values())


def count_active(layers: list[Layer], total: int) -> int:
    """Returns the number of parameters, out of `total`, that are used for each token."""
    for layer in layers:
        size = _num_elements(layer.experts)
        total -= size - size * layer.top_k // layer.num_experts
    return total


def check_routers(model: PreTrainedModel, balance: str) -> None:
    """Raises UserError if the model has no experts, or routers that this kind of balancing does not support."""
    layers = find_layers(model)
    if not layers:
        raise UserError(
            f"{type(model).__name__} is a dense model, without experts: add experts with --upcycle, or train it with "
            "recipes/lm.py"
        )
    for layer in layers:
        if balance == "bias" and layer.bias_holder is None:
            raise UserError(
                f"--balance bias: {type(layer.router).__name__} has no {BIAS_NAME} that its model would save; use "
                "--balance exact, usual or none"
            )


class Routing:
    """Counts the tokens per expert and balances the experts. Create it on the bare model after `sum_token_losses`.

    `model(**micro_batch)` then returns the sum of the token losses, but its gradient includes the balancing loss. Call
    `begin_update` before the micro-batches of an update and `end_update` after them.
    """

    def __init__(self, model: PreTrainedModel, balance: str, strength: float):
        self.layers, self.balance, self.strength = find_layers(model), balance, strength
        self.counts: dict[bool, Tensor] = {}  # int64 (layers, experts), on this rank, by model.training
        self.shares: Tensor | None = None  # `exact`: token shares in the global batch, (layers, experts)
        self.listening = False
        self.logits: dict[int, Tensor] = {}  # (tokens, experts) by layer, during a forward
        self.chosen: dict[int, Tensor] = {}  # (tokens, top_k) by layer, during a forward
        for index, layer in enumerate(self.layers):
            if layer.bias_holder is not None:
                _make_buffer(layer.bias_holder)
            self._listen(model, index, layer)
        if self.layers:
            self._wrap(model)

    def describe(self, model: PreTrainedModel) -> dict[str, str]:
        """Returns lines for the run summary."""
        if not self.layers:
            return {"experts": "none: a dense model"}
        layer, total = self.layers[0], _num_elements(model)
        experts = f"{layer.num_experts} in each of {len(self.layers)} layers, {layer.top_k} of them for a token: "
        experts += f"{count_active(self.layers, total):,} of {total:,} parameters are active"
        balance = self.balance
        if balance != "none":
            balance += f", {'step' if balance == 'bias' else 'factor'} {self.strength:g}"
        if self.balance == "usual":
            balance += "; approximate: it depends on the split of a global batch"
        return {"experts": experts, "balance": balance}

    def _listen(self, model: PreTrainedModel, index: int, layer: Layer) -> None:
        """Registers hooks that store a layer's logits and chosen experts during a forward with targets."""
        recorded: Any = model.can_record_outputs["router_logits"]
        parameters = list(inspect.signature(layer.experts.forward).parameters)

        # The hooks only store tensors. Activation checkpointing reruns the layers without listening, so a computation
        # in a hook would be missing from the recomputed forward.
        def take_logits(_, args, output):
            if self.listening:
                self.logits[index] = output[recorded.index] if isinstance(output, tuple) else output

        def take_chosen(_, args, kwargs):
            if self.listening:
                self.chosen[index] = (dict(zip(parameters, args, strict=False)) | kwargs)[layer.choice]

        layer.router.register_forward_hook(take_logits)
        layer.experts.register_forward_pre_hook(take_chosen, with_kwargs=True)

    def _wrap(self, model: PreTrainedModel) -> None:
        """Wraps the model's forward: counts the chosen experts and adds the balancing gradient."""
        original = model.forward.__func__  # type: ignore[attr-defined]  # the method of `sum_token_losses`

        def forward(model, *args, targets=None, target_rows=None, only_count=False, **kwargs):
            if targets is None:
                return original(model, *args, **kwargs)
            kept = slice(0, 0) if only_count else slice(None)  # without targets the output head does no work
            self.listening = True
            try:
                loss = original(model, *args, targets=targets[kept], target_rows=target_rows[kept], **kwargs)
                self._count(target_rows, model.training)
                if torch.is_grad_enabled() and self.balance in ("exact", "usual"):
                    auxiliary = self.strength * self._loss_sum(target_rows).to(loss.dtype)
                    loss = loss + (auxiliary - auxiliary.detach())
                return loss
            finally:  # after an OOM too, because the stored tensors keep activations alive
                self.listening = False
                self.logits.clear()
                self.chosen.clear()

        forward.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]  # `inspect` reads it
        model.forward = types.MethodType(forward, model)

    @torch.no_grad()
    def _count(self, rows: Tensor, training: bool) -> None:
        """Adds the number of tokens per layer and expert to the counts."""
        counts = []
        for index, layer in enumerate(self.layers):
            chosen = self.chosen[index][rows].flatten()
            counts.append(chosen.new_zeros(layer.num_experts).scatter_add_(0, chosen, torch.ones_like(chosen)))
        self.counts[training] = torch.stack(counts) + self.counts.get(training, 0)

    def _loss_sum(self, rows: Tensor) -> Tensor:
        """Returns a micro-batch's balancing loss times its targets; probabilities are the softmax of the logits."""
        logits = [self.logits[index][rows] for index in range(len(self.layers))]
        logits = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in logits]
        if self.balance == "usual":
            if not len(rows):
                return torch.stack([x.sum() for x in logits]).sum()  # 0, with a gradient, so that every rank can reduce
            layer, stacked = self.layers[0], tuple(logits)
            # The annotation is a tuple of one tensor; the function takes one of each layer.
            loss: Any = load_balancing_loss_func(stacked, layer.num_experts, layer.top_k)  # type: ignore[arg-type]
            return loss / layer.top_k * len(rows)
        assert self.shares is not None, "begin_update has counted the tokens"
        probabilities = [x.softmax(-1).sum(0) for x in logits]
        terms = torch.stack(probabilities) * self.shares  # (layers, experts): a sum over tokens, equal for any split
        return terms.sum(1).mean() * terms.shape[1]

    def prepared(self) -> None:
        """Casts the biases to at least float32, because their small steps would be lost in bf16 (DeepSpeed).

        Call it after `accelerator.prepare`, before a checkpoint is loaded.
        """
        for layer in self.layers:
            if layer.bias_holder is not None:
                dtype = torch.promote_types(layer.bias.dtype, torch.float32)
                setattr(layer.bias_holder, BIAS_NAME, layer.bias.to(dtype))

    @torch.no_grad()
    def begin_update(self, accelerator: Accelerator, model: nn.Module, batch: GlobalBatch) -> None:
        """Prepares an update before its first backward; `exact` runs a forward of each micro-batch to count tokens."""
        self.counts.clear()
        if self.balance != "exact" or not self.layers:
            return
        for micro_batch in batch.micro_batches:
            model(**send_to_device(micro_batch, accelerator.device, non_blocking=True), only_count=True)
        counts = accelerator.reduce(self.counts.pop(True), reduction="sum")
        dtype = torch.promote_types(self.layers[0].router.weight.dtype, torch.float32)
        self.shares = counts.to(dtype) / (batch.num_targets * self.layers[0].top_k)

    def values_to_reduce(self) -> dict[str, Tensor]:
        """Returns this rank's token counts, to reduce together with the global batch's loss (`reduce_update`)."""
        if not self.layers:
            return {}
        if True not in self.counts:  # out of memory in the first forward
            layer, shape = self.layers[0], (len(self.layers), self.layers[0].num_experts)
            self.counts[True] = torch.zeros(shape, dtype=torch.int64, device=layer.router.weight.device)
        return {"expert_counts": self.counts[True]}

    @torch.no_grad()
    def end_update(self, finite: bool, reduced: dict[str, Any]) -> dict[str, float]:
        """Returns metrics to record; with balance `bias`, also updates the biases, identically on all ranks.

        finite: whether the optimizer's step was applied. reduced: the sums of `values_to_reduce` over the ranks, on the
        host.
        """
        if not self.layers:
            return {}
        counts = reduced["expert_counts"]
        if finite and self.balance == "bias":
            bias, steps = self.layers[0].bias, self.strength * (counts.mean(1, keepdim=True) - counts).sign()
            steps = steps.to(bias.dtype).to(bias.device, non_blocking=True)  # one copy, without waiting for the device
            for layer, step in zip(self.layers, steps, strict=True):
                layer.bias.add_(step.view_as(layer.bias))
        return _load_metrics(counts)

    def report(self, accelerator: Accelerator) -> dict[str, Any]:
        """Returns metrics and each layer's token shares per expert: of the held-out set, else the last global batch."""
        if not self.layers:
            return {}
        counts = accelerator.reduce(self.counts[False if False in self.counts else True], reduction="sum")
        shares = counts.double() / counts.sum(1, keepdim=True)
        return {"expert_shares": shares.tolist()} | _load_metrics(counts)


def _load_metrics(counts: Tensor) -> dict[str, float]:
    """Returns metrics of token counts (layers, experts).

    `busiest_expert` is the highest load in a layer relative to an equal share, averaged over layers. `dead_experts` is
    the number of experts without tokens.
    """
    busiest = (counts.amax(1) / counts.double().mean(1)).mean().item()
    return {"busiest_expert": busiest, "dead_experts": int((counts == 0).sum())}


def describe_results(results: dict[str, Any]) -> list[str]:
    """Returns the lines about the experts for the end of a run."""
    shares = results.get("expert_shares")
    if not shares:
        return []
    total = sum(len(row) for row in shares)
    tokens = "held-out" if "validation_loss" in results else "last global batch's"
    lines = [
        f"experts: the most loaded of a layer gets {results['busiest_expert']:.2f} times its equal share of the "
        f"{tokens} tokens; {results['dead_experts']} of {total} get none"
    ]
    if total <= 256:
        for number, row in enumerate(shares):
            lines.append(f"  layer {number}: " + " ".join(f"{share:6.1%}" for share in sorted(row, reverse=True)))
    return lines


def moe_config(shape: dict[str, Any], num_experts: int, top_k: int, expert_width: int) -> Ernie4_5_MoeConfig:
    """Returns the configuration with a mixture in every layer and no shared experts.

    shape: arguments of the Ernie4_5Config of the dense counterpart.
    """
    experts = {"moe_num_experts": num_experts, "moe_k": top_k, "moe_intermediate_size": expert_width}
    return Ernie4_5_MoeConfig(**shape | experts | {"moe_num_shared_experts": 0, "moe_layer_start_index": 0})


def upcycled_config(dense: PreTrainedConfig, num_experts: int, top_k: int) -> Ernie4_5_MoeConfig:
    """Returns the configuration of the model that `upcycle` builds from a dense model.

    Raises UserError if the dense model cannot be up-cycled.
    """
    name = f"--upcycle: --model_name_or_path is a {dense.model_type}"
    if hasattr(dense.get_text_config(), "num_experts_per_tok"):
        raise UserError(f"{name}, a mixture of experts already; remove --upcycle")
    if dense.model_type not in UPCYCLED:
        raise UserError(f"{name}, which is not supported; use one of {', '.join(UPCYCLED)}")
    if getattr(dense, "attention_bias", False) or getattr(dense, "mlp_bias", False):
        raise UserError(f"{name} with biases, which the mixture does not have; use a model without biases")
    if getattr(dense, "sliding_window", None):
        raise UserError(f"{name} with a sliding window, which the mixture does not have; use a model without it")
    shape = {name: getattr(dense, name) for name in UPCYCLED_SETTINGS.split()}
    shape["head_dim"] = getattr(dense, "head_dim", None) or dense.hidden_size // dense.num_attention_heads
    return moe_config(shape, num_experts, top_k, dense.intermediate_size)


@torch.no_grad()
def upcycle(dense: PreTrainedModel, model: PreTrainedModel) -> PreTrainedModel:
    """Copies the dense model's MLP into every expert, and its other weights by name; the routers do not change.

    The result computes the same function as the dense model, because the routing weights of a token sum to 1
    (Komatsuzaki et al., arXiv:2212.05055).

    Args:
        model: a model of `upcycled_config`, which is changed and returned.
    """
    weights = dense.state_dict()
    for name, into in model.state_dict().items():
        if ".mlp.experts." in name:
            mlp = name.partition("experts.")[0]
            gate_up = [weights[f"{mlp}{part}_proj.weight"] for part in ("gate", "up")]
            into.copy_(torch.cat(gate_up) if name.endswith("gate_up_proj") else weights[f"{mlp}down_proj.weight"])
        elif "q_proj" in name or "k_proj" in name:
            # Rotary embeddings pair dimension i of a head with i + half in Llama, but adjacent dimensions in ERNIE.
            half = model.config.head_dim // 2
            into.copy_(weights[name].unflatten(0, (-1, 2, half)).transpose(1, 2).flatten(0, 2))
        elif name in weights:
            into.copy_(weights[name])
    return model


def _make_buffer(bias_module: nn.Module) -> None:
    """Replaces a bias that is a parameter by a buffer of the same name.

    A buffer is never sharded, and no optimizer updates it.
    """
    bias = getattr(bias_module, BIAS_NAME)
    if not isinstance(bias, nn.Parameter):
        return
    with gathered([bias]):
        value = bias.detach().clone()
    delattr(bias_module, BIAS_NAME)
    bias_module.register_buffer(BIAS_NAME, value)


def gather_whole_blocks(accelerator: Accelerator, layers: list[Layer]) -> None:
    """Makes ZeRO-3 all-gather a sparse block's weights together; call it before `accelerator.prepare`.

    Otherwise, if experts are separate modules, only some ranks would all-gather an expert, and all would hang.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED and layers:
        names = sorted({type(layer.block).__name__ for layer in layers})
        accelerator.deepspeed_plugin.transformer_moe_cls_names = ",".join(names)
