"""Losses of preference tuning: functions of the log-probabilities of each chosen and each rejected answer.

A score is the log-probability of an answer; if the loss needs a reference, minus the reference's log-probability. It is
a sum over the tokens of the answer, or their mean (`Loss.is_averaged`). `difference`: score of chosen minus rejected.

An update's loss is the mean over the pairs of the global batch. CPO and ORPO add the negative log-likelihood (NLL) of
the chosen answers: a mean over their tokens in the global batch. All losses equal those of TRL for the same batch.
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common import arguments
from common.training.recipe_traits import Arguments


class Options(NamedTuple):
    """Numbers in the formulas: floats, or scalar tensors."""

    beta: float | Tensor = 0.1
    label_smoothing: float | Tensor = 0.0
    simpo_gamma: float | Tensor = 0.5
    desirable_weight: float | Tensor = 1.0
    undesirable_weight: float | Tensor = 1.0


class Loss(NamedTuple):
    """A loss of pairs. The docstring of its `function` states the formula and its source.

    function: maps scores (P, 2), of each chosen and rejected answer, to losses (P,). KTO's has different arguments.
    """

    function: Callable[..., Tensor]
    needs_reference: bool = True
    is_whole: bool = False  # whether tokens at the beginning that both answers share have an effect
    is_averaged: bool = False
    nll: str = ""  # tokens whose mean NLL is added: "answer", or "sequence" with the prompt; of the chosen answers
    flags: tuple[str, ...] = ()  # flags that only some losses use


def _difference(scores: Tensor) -> Tensor:
    return scores[:, 0] - scores[:, 1]


def _smoothed(logits: Tensor, options: Options) -> Tensor:
    smoothing = options.label_smoothing
    return -(1 - smoothing) * F.logsigmoid(logits) - smoothing * F.logsigmoid(-logits)


def sigmoid(scores: Tensor, options: Options) -> Tensor:
    """DPO (arXiv:2305.18290, eq. 7): -log sigmoid(beta * difference)."""
    return -F.logsigmoid(options.beta * _difference(scores))


def ipo(scores: Tensor, options: Options) -> Tensor:
    """IPO (arXiv:2310.12036, eq. 17; beta is its tau), averaged: (difference - 1 / (2 * beta))^2."""
    return (_difference(scores) - 1 / (2 * options.beta)).square()


def hinge(scores: Tensor, options: Options) -> Tensor:
    """Hinge loss of RSO (arXiv:2309.06657, eq. 11; beta is its gamma): max(0, 1 - beta * difference)."""
    return F.relu(1 - options.beta * _difference(scores))


def robust(scores: Tensor, options: Options) -> Tensor:
    """Robust DPO (arXiv:2403.00409) for a share s of swapped pairs.

    -((1 - s) * log sigmoid(beta * difference) - s * log sigmoid(-beta * difference)) / (1 - 2 * s)
    """
    logits, smoothing = options.beta * _difference(scores), options.label_smoothing
    clean, flipped = (1 - smoothing) * F.logsigmoid(logits), smoothing * F.logsigmoid(-logits)
    return (flipped - clean) / (1 - 2 * smoothing)


def orpo(scores: Tensor, options: Options) -> Tensor:
    """ORPO (arXiv:2403.07691, eq. 6 and 7; beta is its lambda), averaged, plus the NLL of prompt and chosen answer.

    -beta * log sigmoid(log odds(chosen) - log odds(rejected)), log odds(y) = score(y) - log(1 - exp(score(y)))
    """
    scores = scores.clamp(max=-torch.finfo(scores.dtype).eps)  # the odds of a certain answer would be infinite
    log_odds = scores - torch.log(-torch.expm1(scores))
    return -options.beta * F.logsigmoid(_difference(log_odds))


def simpo(scores: Tensor, options: Options) -> Tensor:
    """SimPO (arXiv:2405.14734, eq. 6), averaged: -log sigmoid(beta * difference - gamma).

    With label smoothing s: (1 - s) times this, plus s times -log sigmoid(gamma - beta * difference).
    """
    return _smoothed(options.beta * _difference(scores) - options.simpo_gamma, options)


def cpo(scores: Tensor, options: Options) -> Tensor:
    """CPO (arXiv:2401.08417, eq. 3 and 5): -log sigmoid(beta * difference), plus alpha * NLL of the chosen answer.

    With label smoothing s: (1 - s) times the first term, plus s times -log sigmoid(-beta * difference).
    """
    return _smoothed(options.beta * _difference(scores), options)


def kto(scores: Tensor, labels: Tensor, baseline: Tensor, options: Options) -> Tensor:
    """KTO (arXiv:2402.01306, eq. 7): weight * (1 - sigmoid(beta * (score - baseline))) of desirable answers (label 1).

    Undesirable answers (label 0): weight * (1 - sigmoid(beta * (baseline - score))). The baseline is an estimate of the
    KL divergence from the reference (`baseline.py`). Scores, labels and losses have the shape (P,).
    """
    weights = torch.where(labels == 1, options.desirable_weight, options.undesirable_weight)
    return weights * torch.sigmoid((1 - 2 * labels) * options.beta * (scores - baseline))


LOSSES = {
    "sigmoid": Loss(sigmoid),
    "ipo": Loss(ipo, is_whole=True, is_averaged=True),
    "hinge": Loss(hinge),
    "robust": Loss(robust, flags=("label_smoothing",)),
    "kto": Loss(kto, is_whole=True, flags=("desirable_weight", "undesirable_weight")),
    "orpo": Loss(orpo, needs_reference=False, is_whole=True, is_averaged=True, nll="sequence"),
    "simpo": Loss(simpo, False, is_whole=True, is_averaged=True, flags=("label_smoothing", "simpo_gamma")),
    "cpo": Loss(cpo, False, is_whole=True, nll="answer", flags=("label_smoothing", "cpo_alpha")),
}
DEFAULTS = {
    "label_smoothing": 0.0,
    "simpo_gamma": 0.5,
    "cpo_alpha": 1.0,
    "desirable_weight": 1.0,
    "undesirable_weight": 1.0,
}
FLAGS = ("loss", "beta", *DEFAULTS)  # the flags that affect an update


class Objective(NamedTuple):
    """A loss by name, its options, and the weight of its NLL."""

    name: str = "sigmoid"
    options: Options = Options()
    nll_weight: float = 1.0

    @property
    def loss(self) -> Loss:
        """The entry of `LOSSES`."""
        return LOSSES[self.name]


SIGMOID = Objective()


def add_loss_arguments(group: Any) -> None:
    """Adds --loss and its options to a group of an argparse parser."""
    about = "loss of a pair (default: sigmoid, which is DPO's); docs/dpo.md has the formulas"
    group.add_argument("--loss", default="sigmoid", **arguments.one_of(LOSSES, about))
    about = "scale of log-probability differences; weight of the odds ratio in orpo (default: 0.1)"
    group.add_argument("--beta", type=arguments.positive_float, default=0.1, help=about)
    about = "share of pairs whose answers are swapped, below 0.5; for robust, simpo and cpo"
    group.add_argument("--label_smoothing", type=arguments.not_negative_float, metavar="S", help=about)
    about = "target margin of simpo (default: 0.5)"
    group.add_argument("--simpo_gamma", type=arguments.not_negative_float, metavar="G", help=about)
    about = "weight of the chosen answers' likelihood in cpo (default: 1)"
    group.add_argument("--cpo_alpha", type=arguments.not_negative_float, metavar="A", help=about)
    about = "weight of desirable answers in kto (default: 1)"
    group.add_argument("--desirable_weight", type=arguments.not_negative_float, metavar="W", help=about)
    about = "weight of undesirable answers in kto (default: 1)"
    group.add_argument("--undesirable_weight", type=arguments.not_negative_float, metavar="W", help=about)


def check_loss(args: Arguments) -> list[str]:
    """Returns a line for each option that the loss does not use or support; sets the defaults of the others."""
    problems = []
    for name, default in DEFAULTS.items():
        users = [loss for loss, entry in LOSSES.items() if name in entry.flags]
        if getattr(args, name) is None:
            setattr(args, name, default)
        elif args.loss not in users:
            problems.append(f"--{name} has no effect with --loss {args.loss}; remove it (it is for {', '.join(users)})")
    if args.label_smoothing >= 0.5:
        problems.append(f"--label_smoothing {args.label_smoothing:g} is not below 0.5; pass a smaller share")
    if args.loss == "robust" and not args.label_smoothing:
        problems.append("--loss robust needs the share of swapped pairs; pass --label_smoothing, or use --loss sigmoid")
    if args.loss == "kto" and args.global_batch_size == 1:
        problems.append("--loss kto compares the answers of a global batch; use a --global_batch_size of at least 2")
    if args.loss == "kto" and args.shared("micro_batch_tokens") == "auto":
        problems.append("--micro_batch_tokens auto: KTO has two forward passes per update; pass a number")
    return problems


def objective_of(args: argparse.Namespace) -> Objective:
    """Returns the loss and options in flags that `check_loss` has checked."""
    options = Options(**{name: getattr(args, name) for name in Options._fields})
    return Objective(args.loss, options, args.cpo_alpha if args.loss == "cpo" else 1.0)


def describe_loss(args: argparse.Namespace) -> str:
    """Returns the loss and those of its options that have an effect, for the run summary."""
    options = [f"{name} {getattr(args, name):g}" for name in ("beta", *LOSSES[args.loss].flags)]
    return f"{args.loss}, {', '.join(options)}"


def sum_answers(losses: Tensor, places: Tensor) -> Tensor:
    """Returns the log-probabilities of answers, (R,).

    losses: token losses (N,). places: (R, T), indices of each answer's tokens in `losses`, padded with N.
    """
    return -F.pad(losses, (0, 1))[places].sum(1)  # padding reads the appended 0


def loss_and_margins(losses: Tensor, micro_batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the summed loss of P pairs, and their reward margins (P,), where beta times a score is a reward.

    For KTO: of P rows, and the margins of their rewards over the baseline's.

    losses: token losses (N,). micro_batch: that of `collate_preferences`.
    """
    name = next(name for name in LOSSES if f"target_loss_{name}" in micro_batch)
    loss, options = LOSSES[name], Options(*micro_batch[f"target_loss_{name}"].unbind())
    places = micro_batch["target_places"]
    scores = sum_answers(losses, places)
    if name == "kto":
        scores, baseline = scores - micro_batch["target_reference"][:, 0], micro_batch["target_baseline"]
        total = kto(scores, micro_batch["targets"], baseline, options).sum()
        return total, options.beta * (scores - baseline)
    scores = scores.view(-1, 2)
    if loss.needs_reference:
        scores = scores - micro_batch["target_reference"]
    if loss.is_averaged:
        scores = scores / (places < len(losses)).sum(1).view(-1, 2).clamp(min=1)
    total = loss.function(scores, options).sum()
    if loss.nll:
        total = total + micro_batch["target_nll_scale"] * losses[micro_batch["target_nll"]].sum()
    return total, options.beta * _difference(scores)


def summarize_margins(loss: str, margins: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Returns the metrics of the held-out set: the share of margins of the right sign, and the mean margin.

    For KTO the labels (P,) decide on the sign, and the margin is the mean reward of desirable minus that of undesirable
    answers, if there are both.
    """
    if loss != "kto":
        return {"accuracy": (margins > 0).mean().item(), "margin": margins.mean().item()}
    is_desirable = labels == 1
    metrics = {"accuracy": ((margins > 0) == is_desirable).mean().item()}
    if 0 < is_desirable.sum() < len(labels):
        metrics["margin"] = (margins[is_desirable].mean() - margins[~is_desirable].mean()).item()
    return metrics


def describe_metrics(loss: str, results: dict[str, Any]) -> list[str]:
    """Returns a line on the held-out set, if there is one."""
    if "accuracy" not in results:
        return []
    line = f"the chosen answer has the higher reward in {results['accuracy']:.1%} of the held-out pairs"
    if loss == "kto":
        line = f"{results['accuracy']:.1%} of the held-out answers have a reward on the side of their label"
    return [f"{line}, by {results['margin']:.4f} on average over all" if "margin" in results else line]
