"""Every recipe's whole step on torch's `meta` device: a GPU that refuses each wait, and each tensor of another device.

The recipe's own `main` runs, from its flags to the optimizer's step, in this process. What `meta` does not know is
asked for by another name, here and not in the recipe: fused optimizers, autocast, grouped products in float32.
"""

import importlib.util
from contextlib import ContextDecorator, ExitStack, nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from accelerate.state import PartialState
from conftest import ROOT, write_rows
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer, GptOssConfig, MixtralConfig, OlmoeConfig

from common.internals.accelerate_state import forget_state
from common.parallel import connect, launch
from common.training import accumulation, linear_cross_entropy
from common.training.accumulation import RunAccelerator
from common.training.activation_checkpointing import ACTIVATION_CHECKPOINTING

META = torch.device("meta")
NOT_ON_META = {"offload": "it copies to the host, and meta has nothing to copy"}
MODES = [mode for mode in ACTIVATION_CHECKPOINTING if mode not in NOT_ON_META]


class Stepped(Exception):
    """The optimizer has stepped: the rest of the run is not this test's."""


class NoSlowCopies(TorchDispatchMode):
    """Raises where a tensor is copied from the host to the device or back, and the host waits for it."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_):
            source, *target = args[:2][::-1] if function.overloadpacket is torch.ops.aten.copy_ else args[:1]
            target = torch.device(target[0].device if target else kwargs.get("device") or source.device)
            if target.type != source.device.type and not kwargs.get("non_blocking"):
                raise RuntimeError(f"the host waits for a copy from {source.device} to {target}")
        return function(*args, **kwargs)


class Autocast(TorchFunctionMode):
    """What autocast does to the functions that models call: bf16 for products, float32 for what sums and divides."""

    NARROW = {F.linear, F.conv2d, F.scaled_dot_product_attention, torch.einsum}
    NARROW |= {getattr(owner, name) for owner in (torch, torch.Tensor) for name in ("matmul", "mm", "bmm", "addmm")}
    NARROW |= {torch._grouped_mm, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__}
    WIDE = {F.layer_norm, F.group_norm, F.softmax, F.log_softmax, F.cross_entropy, torch.softmax, torch.Tensor.softmax}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        dtype = torch.bfloat16 if function in self.NARROW else torch.float32 if function in self.WIDE else None

        def cast(x):
            return x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() and x.device == META else x

        kwargs = kwargs or {}
        if dtype is not None and "out" not in kwargs:
            args, kwargs = tuple(map(cast, args)), {name: cast(x) for name, x in kwargs.items()}
        return function(*args, **kwargs)

    @classmethod
    def around(cls, function):
        def within(*args, **kwargs):
            with cls():
                return function(*args, **kwargs)

        return within


class Nothing(nullcontext, ContextDecorator):
    pass


def load(recipe):
    spec = importlib.util.spec_from_file_location(f"recipe_{recipe}", ROOT / f"recipes/{recipe}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def step(recipe, flags, output_dir, device, precision):
    """Shapes and dtypes after one update: of its losses, its norm, and each weight with its gradient and its state."""
    module, made = load(recipe), {"parameters": []}
    make, scale, sum_losses = module.make_optimizer, module.loss_scale, module.sum_losses
    compile_module = torch.nn.Module.compile

    def make_accelerator(*args, **kwargs):
        accelerator = RunAccelerator(cpu=True, mixed_precision=precision)
        PartialState().device = accelerator.state.device = device
        return accelerator

    def make_optimizer(*args, **options):
        adamw = torch.optim.AdamW
        with patch("torch.optim.AdamW", lambda *args, **options: adamw(*args, **options | {"fused": False})):
            return make(*args, **options)

    def begin(*args):
        watch.enter_context(NoSlowCopies())
        if device == META and precision == "bf16":
            watch.enter_context(Autocast())
        return scale(*args)

    def check(loss):
        """Each control would end the run, in forward and in backward."""
        controls = {
            "cannot be called on meta": lambda x: x.item(),
            "waits for a copy|same device|on device": lambda x: x + torch.ones(2),
            "waits for a copy": lambda x: x + torch.ones(2).to(x.device),
        }
        for words, control in controls.items():
            with pytest.raises(RuntimeError, match=words):
                control(loss.detach())

    def sum_and_check(*args):
        loss = sum_losses(*args)
        if device == META:
            check(loss)
            loss.register_hook(check)
        return loss

    def describe(tensor):
        return tuple(tensor.shape), tensor.dtype

    def reduce_update(accelerator, loss_sums, grad_norm, batch, values):
        watch.close()
        assert len(loss_sums) > 1
        made.update(losses=[describe(loss) for loss in loss_sums], norm=describe(grad_norm))
        return 1.0, 1.0, values

    def stop(optimizer, *_):
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            assert p.device == p.grad.device == device
            states = {name: describe(state) for name, state in optimizer.state[p].items()}
            made["parameters"].append((describe(p), describe(p.grad), states))
        raise Stepped

    vars(module).update(make_optimizer=make_optimizer, loss_scale=begin, sum_losses=sum_and_check)
    if recipe == "classify":
        module.check_padding = lambda *_: None  # looks, before the first update
    flags = [*map(str, flags), "--num_updates", "1", "--warmup_updates", "0", "--output_dir", str(output_dir)]
    changes = [
        patch("sys.argv", [f"{recipe}.py", *flags]),
        patch.object(launch, "find_launch", lambda: launch.Launch(mode="plain", mixed_precision=precision)),
        patch.object(connect, "make_accelerator", make_accelerator),
        patch.object(accumulation, "reduce_update", reduce_update),
        # No code is made, but the graph is traced.
        patch(
            "torch.nn.Module.compile", lambda self, dynamic, **_: compile_module(self, backend="eager", dynamic=dynamic)
        ),
    ]
    if device == META and precision == "bf16":
        changes.append(patch("accelerate.accelerator.get_mixed_precision_context_manager", lambda *_: Nothing()))
        changes.append(patch.object(linear_cross_entropy, "autocast_dtype", lambda _: torch.bfloat16))
        run_backward = torch.autograd._engine_run_backward  # which Python calls without the mode
        changes.append(patch("torch.autograd._engine_run_backward", Autocast.around(run_backward)))
    if device == META and precision == "no":  # torch's meta kernel takes bf16 only
        products = "transformers.integrations.moe._grouped_mm"
        changes.append(patch(products, lambda tokens, weights, offs: tokens @ weights.sum(0)))
    with ExitStack() as around, ExitStack() as watch:
        for change in changes:
            around.enter_context(change)
        # Else `model.to` would make new parameters, and the optimizer keep the old ones.
        around.callback(torch.__future__.set_swap_module_params_on_conversion, False)
        torch.__future__.set_swap_module_params_on_conversion(True)
        around.callback(register_optimizer_step_post_hook(stop).remove)
        around.callback(forget_state)
        with pytest.raises(Stepped):
            module.main()
    return made


SHAPE = dict(vocab_size=384, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
MIXTURES = {
    "mixtral": MixtralConfig(**SHAPE, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
    "olmoe": OlmoeConfig(**SHAPE, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2),
    "gpt_oss": GptOssConfig(**SHAPE, num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2),
}
# Recipe, its own flags, and whether its layers can be computed again.
CASES = {
    "llama": ("lm", ["--shape", "examples"], True),
    "bert": ("classify", [], True),
    "t5": ("seq2seq", [], True),
    "ernie": ("moe", [], True),
    "ernie-exact": ("moe", ["--balance", "exact"], False),
    "ernie-usual": ("moe", ["--balance", "usual"], False),
    "ernie-dense": ("moe", ["--dense"], False),
    "upcycled": ("moe", ["--upcycle", "--model_name_or_path", "LLAMA"], False),
    **{name: ("moe", ["--balance", "exact", "--model_name_or_path", name], False) for name in MIXTURES},
    "convnet": ("vision", [], False),
    "resnet": ("vision", ["--model_config", "resnet"], False),
    "vit": ("vision", ["--model_config", "vit"], True),
    "lstm": ("long_sequence", ["--hidden_size", 16], False),
    "gru": ("long_sequence", ["--hidden_size", 16, "--architecture", "gru", "--truncate", 16], False),
    "long-transformer": ("long_sequence", ["--architecture", "transformer", "--mlp_rows", 16], True),
}
VARIANTS = ("ernie-usual", "ernie-dense", "upcycled", "olmoe", "gru")  # float32 is their siblings'
COMPILED = ("llama", "bert", "vit")


@pytest.fixture(scope="module")
def own_flags(tmp_path_factory, model_dir):
    """The flags of each case, with small data."""
    path = tmp_path_factory.mktemp("data")
    rows = write_rows(path / "rows.jsonl", 20)
    for name, config in MIXTURES.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(path / name)
        AutoTokenizer.from_pretrained(model_dir).save_pretrained(path / name)
    models = {name: path / name for name in MIXTURES} | {"LLAMA": model_dir}

    def flags(case):
        recipe, own, _ = CASES[case]
        short = ["--sequence_length", 32, "--train_file", rows] if recipe != "vision" else []
        return [*short, *(models.get(flag, flag) for flag in own), "--global_batch_size", 4, "--micro_batch_size", 2]

    return flags


@pytest.mark.parametrize(
    ("case", "precision"), [(case, p) for case in CASES for p in ("no", "bf16") if case not in VARIANTS or p == "bf16"]
)
def test_a_step_on_meta_waits_for_nothing_and_is_the_cpus(case, precision, own_flags, tmp_path):
    """Shapes and dtypes of all that it leaves, with each way to compute activations again."""
    recipe, _, has_layers = CASES[case]
    expected = step(recipe, own_flags(case), tmp_path / "cpu", torch.device("cpu"), precision)
    assert expected["losses"] and expected["parameters"]
    for mode in MODES if has_layers else MODES[:1]:
        more = ["--activation_checkpointing", mode]
        assert step(recipe, [*own_flags(case), *more], tmp_path / mode, META, precision) == expected


@pytest.mark.parametrize("case", COMPILED)
def test_a_compiled_step_on_meta_waits_for_nothing(case, own_flags, tmp_path):
    step(CASES[case][0], [*own_flags(case), "--compile"], tmp_path / "meta", META, "no")
    torch._dynamo.reset()
