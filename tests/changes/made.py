"""Optimizers that a user may put in the place of the recipe's."""

import itertools

import torch
from transformers.optimization import Adafactor

from changes import change
from common.training import optimizers


class AdamWithMean(torch.optim.AdamW):
    """Also keeps a mean of each weight, and a number of its own in a tensor."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for p in itertools.chain(*(group["params"] for group in self.param_groups)):
            if state := self.state.get(p):
                state.setdefault("mean", torch.zeros_like(p)).lerp_(p, 0.1)
                state["weight_sum"] = state.get("weight_sum", torch.zeros((), dtype=torch.float64)) + 0.1
                p.mul_(1 - 1e-3 * state["weight_sum"].item()).add_(state["mean"], alpha=1e-3)


class OwnSGD(torch.optim.SGD):
    pass


class OwnNAdam(torch.optim.NAdam):
    """With a product of momenta in a tensor; it also refers to a weight, which a checkpoint holds as such."""

    def __init__(self, groups, lr):
        super().__init__(groups, lr=lr)
        self.first = self.param_groups[0]["params"][0]


class OwnAdafactor(torch.optim.Adafactor):
    pass


class OwnTransformersAdafactor(Adafactor):
    pass


class Two(torch.optim.Optimizer):
    """Muon for the hidden matrices and AdamW for the rest; their groups are shared, and their state is or is not."""

    def __init__(self, groups, lr, shares="all"):
        matrices = [p for group in groups for p in group["params"] if p.ndim == 2 and max(p.shape) < 1000]
        others = [p for group in groups for p in group["params"] if not any(p is one for one in matrices)]
        self.inside = [torch.optim.Muon(matrices, lr=lr), torch.optim.AdamW(others, lr=lr)]
        super().__init__([*matrices, *others], {"lr": lr})
        if shares != "nothing":
            self.param_groups = [group for one in self.inside for group in one.param_groups]
        if shares == "all":
            for one in self.inside:
                one.state = self.state

    def step(self, closure=None):
        for one in self.inside:
            one.step()


class Hidden(torch.optim.Optimizer):
    """Keeps its momentum where nobody looks."""

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr})
        self.momenta = {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.momenta.setdefault(id(p), torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                p.sub_(momentum, alpha=group["lr"])


class Grows(torch.optim.Optimizer):
    """Finds its own rate, and keeps it in its groups, as Prodigy and schedule-free optimizers do."""

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr, "d": 1e-3, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["d"] *= 1.1
            group["k"] += 1
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["d"] * group["lr"])


class Counts(torch.optim.AdamW):
    """Keeps a count next to the state of Adam."""

    def __init__(self, groups, lr):
        super().__init__(groups, lr=lr)
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        self.count += 1


class Averages(torch.optim.AdamW):
    """Keeps a tensor for each weight next to the state of Adam."""

    def __init__(self, groups, lr):
        super().__init__(groups, lr=lr)
        self.mean = {}

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.mean.setdefault(p, torch.zeros_like(p)).lerp_(p, 0.1)


class Moves(torch.optim.AdamW):
    """Replaces its constant table in the first step, as bitsandbytes moves its own to the device of the weights."""

    def __init__(self, groups, lr):
        super().__init__(groups, lr=lr)
        self.tables = {"map": torch.arange(4.0)}

    def step(self, closure=None):
        is_first = not self.state
        super().step(closure)  # first, because the step of the class above may be observed too
        if is_first:
            self.tables["map"] = self.tables["map"].clone()


class Replaces(Moves):
    """Replaces its table by another one."""

    def step(self, closure=None):
        self.tables["map"] = self.tables["map"] + 1
        super().step(closure)


class OnlyMatrices(torch.optim.Optimizer):
    """Momentum for what is decayed; the rest has none."""

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim > 1:
                    moved = self.state[p].setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                else:
                    moved = p.grad
                p.sub_(moved, alpha=group["lr"])


def _own_8bit(groups, lr):
    import bitsandbytes

    class Own(bitsandbytes.optim.AdamW8bit):
        pass

    return Own(groups, lr=lr, betas=(0.9, 0.95))


MADE = {
    "mean": AdamWithMean,
    "sgd": lambda groups, lr: OwnSGD(groups, lr=lr, momentum=0.9),
    "no_state": lambda groups, lr: OwnSGD(groups, lr=lr),
    "nadam": OwnNAdam,
    "adafactor": OwnAdafactor,
    "transformers": lambda groups, lr: OwnTransformersAdafactor(
        groups, lr=lr, scale_parameter=False, relative_step=False, warmup_init=False
    ),
    "8bit": _own_8bit,
    "two": Two,
    "two_states": lambda groups, lr: Two(groups, lr, "groups"),
    "apart": lambda groups, lr: Two(groups, lr, "nothing"),
    "hidden": Hidden,
    "grows": Grows,
    "counts": Counts,
    "averages": Averages,
    "matrices": OnlyMatrices,
    "moves": Moves,
    "replaces": Replaces,
}


def own_optimizer(name):
    """A user's optimizer, by its name in MADE."""

    def make(_, model, learning_rate, weight_decay):
        return MADE[name](optimizers.parameter_groups(model, weight_decay), lr=learning_rate)

    change(optimizers, "make_optimizer", make)
