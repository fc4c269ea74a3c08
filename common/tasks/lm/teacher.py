"""The loss of distillation: cross-entropy of the targets, and the divergence from a teacher's token probabilities.

Per target, the loss is (1 - w) * cross-entropy + w * T^2 * divergence, in nats, with weight w and temperature T. As in
Hinton et al. (arXiv:1503.02531), T^2 keeps the size of the gradients. It is a sum over targets, so the update is the
same for any split of a global batch. Both models' logits exist only for a chunk of targets at a time.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from common.data.hub import identify_pretrained
from common.data.tokenizer import load_tokenizer
from common.errors import UserError, one_line, raise_errors
from common.models import parallel_setup
from common.models.adapters import build_meta_base
from common.models.load import build_model, check_model, load_config
from common.models.model_setup import without_wrapper
from common.models.narrow_dtype import narrow_dtype
from common.models.packed import count_all
from common.models.untrained import empty_model
from common.packages import find_missing
from common.training.losses import sum_token_losses
from common.training.output_head import examine_head
from common.training.precision import autocast_dtype, is_deepspeed
from common.training.process_grid import ProcessGrid
from common.training.recipe_traits import Arguments

DEFAULTS = {"divergence": "forward_kl", "distillation_weight": 0.5, "distillation_temperature": 1.0}
SLICE = 128  # rows whose probabilities and gradients exist at once: they are about ten tensors of the size of logits
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check(args: Arguments, config: Any, tokenizer: Any, grid: ProcessGrid) -> str:
    """Sets the defaults of the flags; returns the name of a new setting, which is the identity of the weights.

    config, tokenizer: of the trained model. Raises UserError: the teacher cannot be used, has different tokens or fewer
    positions, or the logits of one of the models cannot be reproduced.
    """
    for name, value in DEFAULTS.items():
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    if args.distillation_weight > 1:
        raise UserError(f"--distillation_weight {args.distillation_weight:g}: it is a share; use a number from 0 to 1")
    subject = f"--teacher {args.teacher}"
    with _named_teacher():
        teacher_config = load_config(args.teacher, args.trust_remote_code)
    vocabulary = load_tokenizer(args.teacher, args.trust_remote_code).get_vocab()
    if different := len(vocabulary.items() ^ tokenizer.get_vocab().items()):
        raise UserError(
            f"{subject}: {different:,} tokens differ from those of the model's tokenizer; use a teacher with the same "
            "tokenizer, or train a model that was saved with the teacher's tokenizer (docs/distillation.md)"
        )
    raise_errors(f"{subject}: {line}" for line in check_model(teacher_config, tokenizer, args.sequence_length))
    if args.quantize_teacher:
        raise_errors(find_missing(f"--quantize_teacher {args.quantize_teacher}", "bitsandbytes"))
    teacher = empty_model(teacher_config, args.trust_remote_code)
    _check_head(teacher, subject)
    _check_head(build_meta_base(args, config, AutoModelForCausalLM), "--teacher: the trained model")
    if args.shared("document_mask") or args.shared("shape") == "packed":
        from common.models.document_masks import mask_documents

        mask_documents(teacher, grid)
    args.teacher_weights = identify_pretrained(args.teacher)
    return "teacher_weights"


@contextmanager
def _named_teacher() -> Iterator[None]:
    """Replaces the flag of the trained model by --teacher in messages."""
    try:
        yield
    except UserError as error:
        raise UserError(*str(error).replace("--model_name_or_path", "--teacher").splitlines()) from error


def _check_head(model: Any, subject: str) -> None:
    """Raises UserError: the logits of a model on the meta device cannot be reproduced from its last hidden state."""
    try:
        examine_head(model)
    except Exception as error:  # any error of a model's own code
        raise UserError(
            f"{subject}: its loss cannot be computed in chunks: {one_line(error)}; use a different model"
        ) from error


def add(args: Arguments, accelerator: Any, model: nn.Module) -> None:
    """Makes a prepared model return the loss of distillation in training, and its cross-entropy in evaluation.

    Raises UserError: the weights of the teacher are missing or unreadable.
    """
    build = partial(_build, args, PRECISIONS.get(accelerator.mixed_precision))
    student, teacher = without_wrapper(model), parallel_setup.prepare_frozen(accelerator, build)
    inputs: dict[str, Any] = {}  # of the current forward pass

    def keep_inputs(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        inputs.clear()
        inputs.update(kwargs)

    student.register_forward_pre_hook(keep_inputs, with_kwargs=True)
    output = student.get_output_embeddings()
    original = output.forward

    def forward(hidden: Tensor, targets: Tensor | None = None, **options: Any) -> Any:
        if targets is None or not student.training:
            return original(hidden, targets=targets, **options)
        losses: list[Tensor] = []  # not returned by the teacher, because FSDP2 would add hooks to its result
        with_gradients = torch.is_grad_enabled()

        def add_loss(teacher_logits: Callable[[Tensor], Iterator[Tensor]]) -> None:
            criterion = _make_criterion(args, targets, teacher_logits)
            rows = torch.arange(len(targets), device=targets.device)
            with torch.set_grad_enabled(with_gradients):
                losses.append(original(hidden, targets=rows, criterion=criterion, **options))

        with torch.no_grad():
            teacher(**inputs | {"loss_of": add_loss})
        inputs.clear()
        return losses[0]

    output.forward = forward
    accelerator.print(f"   teacher  {count_all(teacher):,} parameters, frozen; loss: {_describe(args)}", flush=True)


def _build(args: Arguments, dtype: torch.dtype | None) -> Any:
    """Returns the teacher; its forward calls `loss_of(logits)` with a function that yields the logits of rows.

    The call is inside the output layer, where FSDP2 has all-gathered the weight. dtype: of its matrices; None: float32.
    """
    trusts_code, options = args.trust_remote_code, {}
    if args.quantize_teacher:
        from common.models import packed_experts, quantization

        options = quantization.options(args.quantize_teacher)
    with _named_teacher():
        config = load_config(args.teacher, trusts_code)
        teacher = build_model(config, args.teacher, trusts_code, AutoModelForCausalLM, dtype, **options)
    for p in teacher.parameters() if dtype else ():  # next to autocast, vectors stay in float32
        if p.is_floating_point() and (p.ndim > 1 or is_deepspeed()):
            p.data = p.data.to(dtype)
    if args.quantize_teacher:
        packed_experts.dequantize_in_forward(teacher, narrow_dtype() or torch.float32)
    sum_token_losses(teacher)
    output = teacher.get_output_embeddings()

    def forward(hidden: Tensor, loss_of: Callable[..., None], scale: float, softcap: float | None, **_: Any) -> None:
        loss_of(_logits_of_rows(hidden, output.weight, output.bias, scale, softcap))

    output.forward = forward
    return teacher


def _logits_of_rows(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float, softcap: float | None
) -> Callable[[Tensor], Iterator[Tensor]]:
    """Returns a function that yields the logits of rows (n,) of `hidden` (N, D), in slices (SLICE, V).

    Matmuls run in autocast's dtype, as in `linear_cross_entropy`; logits are in float32 at least. weight: (V, D), bias:
    (V,) or None.
    """
    dtype = weight.dtype
    if dtype != torch.float64:  # autocast does not change float64
        dtype = autocast_dtype(weight.device) or dtype
    weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)

    def logits(rows: Tensor) -> Iterator[Tensor]:
        for part in F.linear(hidden[rows].to(dtype), weight, bias).split(SLICE):
            yield _scaled(part.to(torch.promote_types(dtype, torch.float32)), scale, softcap)

    return logits


def _scaled(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    logits = logits * scale if scale != 1 else logits
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def _make_criterion(
    args: Arguments, targets: Tensor, teacher_logits: Callable[[Tensor], Iterator[Tensor]]
) -> Callable[..., Tensor]:
    """Returns the `criterion` of `linear_cross_entropy`, for indices of rows instead of targets."""
    weight, temperature, distance = args.distillation_weight, args.distillation_temperature, DISTANCES[args.divergence]

    def losses_of(student: Tensor, teacher: Tensor, targets: Tensor) -> Tensor:
        shared = min(student.shape[1], teacher.shape[1])  # output layers may have more rows than there are tokens
        pair = [F.log_softmax(logits[:, :shared] / temperature, 1) for logits in (teacher, student)]
        cross_entropies = F.cross_entropy(student, targets, reduction="none")
        return weight * temperature**2 * distance(*pair) + (1 - weight) * cross_entropies

    def criterion(
        product: Tensor, rows: Tensor, _: None, scale: float, softcap: float | None, wants_gradient: bool, __: None
    ) -> Tensor:
        losses = []
        parts = zip(product.split(SLICE), teacher_logits(rows), targets[rows].split(SLICE), strict=True)
        for part, teacher, part_targets in parts:
            with torch.enable_grad():
                leaf = part.detach().requires_grad_()
                losses.append(losses_of(_scaled(leaf, scale, softcap), teacher, part_targets))
                if wants_gradient:
                    part.copy_(torch.autograd.grad(losses[-1].sum(), leaf)[0])
            losses[-1] = losses[-1].detach()
        return torch.cat(losses)

    return criterion


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Returns KL(p, q) of each row, in nats. p, q: (n, V), logarithms of probabilities."""
    return (p.exp() * (p - q)).sum(1)


def _jsd(teacher: Tensor, student: Tensor) -> Tensor:
    """Returns the Jensen-Shannon divergence of each row: the mean of both KL divergences from the mixture."""
    mixture = torch.logaddexp(teacher, student) - math.log(2)
    return (_kl(teacher, mixture) + _kl(student, mixture)) / 2


DISTANCES = {"forward_kl": _kl, "reverse_kl": lambda teacher, student: _kl(student, teacher), "jsd": _jsd}


def _describe(args: Arguments) -> str:
    """Returns the loss of distillation, for the run summary."""
    weight, temperature = args.distillation_weight, args.distillation_temperature
    line = f"{1 - weight:g} x cross-entropy + {weight:g} x {args.divergence}"
    return line + (f" at temperature {temperature:g}" if temperature != 1 else "")
