"""Trains a mixture of experts as a language model: from scratch, up-cycled from a dense model, or a pretrained one.

smallest run   accelerate launch --config_file accelerate_configs/cpu.yaml recipes/moe.py  (--dense: its dense peer)
up-cycling     accelerate launch --config_file accelerate_configs/single_gpu.yaml recipes/moe.py --upcycle \\
                   --model_name_or_path my_llama/ --num_experts 8 --experts_per_token 2 --train_file 'books/*.txt'
several GPUs   accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 8 recipes/moe.py
dry run        the same with --dry_run, on any machine
resume         the same with --resume, after a stop or a crash; also on more or fewer GPUs, or in a different mode

Data as in recipes/lm.py. A model from scratch, or up-cycled, has the shape of ERNIE 4.5: in each layer a softmax router
chooses each token's experts (--balance bias shifts the choice only), all computed in one batched product (grouped_mm).
"""

import sys
from functools import partial
from pathlib import Path

# The repository root comes after this file's directory (index 0), so a common/ next to this file takes precedence.
sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from common import arguments  # isort: skip  # before torch: see common/__init__.py
import torch

from common.data.text import tokenize
from common.errors import raise_errors
from common.models.load import check_model, describe_use, write_sample
from common.parallel.shutdown import exit_on_user_error
from common.report.tracking import describe_held_out
from common.run import Run
from common.tasks.moe import moe_model, routing
from common.training.accumulation import loss_scale, mean_losses, skip_step, synchronize_gradients
from common.training.batching import collate_tokens
from common.training.clipping import clip_gradients
from common.training.losses import sum_token_losses
from common.training.optimizers import learning_rate, make_optimizer, set_learning_rate

# Models to train from scratch, with the same number of active parameters as the model of that name in recipes/lm.py.
MODEL_CONFIGS = {
    # layers, width, heads, key-value heads, experts, experts per token, expert width, vocabulary, learning rate
    "tiny": (4, 128, 4, 2, 8, 2, 192, 4096, 6e-3),  # 3.1 M parameters, 1.3 M active
    "small": (6, 384, 6, 6, 16, 2, 512, 8192, 1e-3),
    "medium": (12, 768, 12, 12, 32, 4, 512, 32768, 6e-4),
    "large": (16, 2048, 32, 8, 64, 8, 1024, 32768, 3e-4),
}


def parse_arguments():
    parser = arguments.recipe_parser(__doc__)
    arguments.add_language_arguments(parser, examples=True, adapters=True)
    parser.set_defaults(num_updates=500)
    group = parser.add_argument_group("mixture of experts")
    group.add_argument("--model_config", **arguments.one_of(MODEL_CONFIGS, "model from scratch (default: tiny)"))
    group.add_argument("--upcycle", action="store_true", help="initialise each expert with the MLP of a dense model")
    group.add_argument("--num_experts", type=arguments.positive, help="experts per layer (default: the size's, or 8)")
    group.add_argument("--experts_per_token", type=arguments.positive, help="active per token (default: size's, or 2)")
    group.add_argument("--dense", action="store_true", help="from scratch: a dense model with the MoE's active size")
    group.add_argument("--balance", **arguments.one_of(routing.BALANCE, "balancing method (default: bias)"))
    about = "bias step, or factor of the balancing loss (default: 0.01; bias of a pretrained model: 0.001)"
    group.add_argument("--balance_strength", type=arguments.positive_float, help=about)
    args = parser.parse_args()
    arguments.choose_model(parser, args, MODEL_CONFIGS, fine_tuning_rate=2e-5)
    moe_model.resolve_mixture(parser, args, MODEL_CONFIGS.get(args.model_config))
    return args


def load_data(args):
    """Returns tokenizer, model config, training samples, and held-out samples or None."""
    source, held_out_source = arguments.text_sources(args)
    config, tokenizer = moe_model.choose_mixture(args, MODEL_CONFIGS, source)
    raise_errors(check_model(config, tokenizer, args.sequence_length))
    tokens = partial(tokenize, tokenizer=tokenizer, sequence_length=args.sequence_length, shape=args.shape)
    train_set, held_out = tokens(source), held_out_source and tokens(held_out_source, measure_compression=True)
    return tokenizer, config, train_set, held_out


def sum_losses(model, micro_batch):
    """Returns the summed loss of a micro-batch's targets; `sum_token_losses` in `main` makes the model return it."""
    return model(**micro_batch)


@torch.no_grad()
def evaluate(run, model):
    """Returns the mean loss over all held-out targets, each counted once; for mixed data also per source."""
    model.eval()
    measured = []
    for batch in run.held_out:
        loss_sums = [sum_losses(model, micro_batch) for micro_batch, _ in run.micro_batches(batch)]
        measured.append((batch.source, batch.num_targets, loss_sums))
    model.train()
    return mean_losses(run.accelerator, measured)


def train(args, run, model, optimizer, batches, router):
    """Training loop: per global batch, forward and backward of its micro-batches, then one update."""
    accelerator = run.accelerator
    run.evaluations.repeat(evaluate, model)  # on resume, if a request to stop interrupted it
    for batch in batches:
        rate = learning_rate(batch.update, args.lr_schedule, args.learning_rate, args.num_updates, args.warmup_updates)
        set_learning_rate(optimizer, rate)
        scale, loss_sums, loss_sum = loss_scale(accelerator, batch.num_targets), [], None
        router.begin_update(accelerator, model, batch)  # --balance exact counts each expert's tokens first
        for micro_batch, is_last in run.micro_batches(batch):
            with synchronize_gradients(accelerator, model, now=is_last):
                loss_sum = sum_losses(model, micro_batch)
                accelerator.backward(loss_sum * scale)
                loss_sums.append(loss_sum.detach())
        if args.dry_run:
            break
        grad_norm = clip_gradients(accelerator, model, args.max_grad_norm)
        if is_finite := run.all_finite(batch, loss_sums, grad_norm, **router.values_to_reduce()):
            optimizer.step()
            optimizer.zero_grad()
        else:
            skip_step(accelerator, optimizer)
        balance = router.end_update(is_finite, run.reduced)
        metrics = {"learning_rate": rate} | balance | run.evaluations.after_update(evaluate, model)
        if run.end_update(batch, **metrics):
            break


def main():
    args = parse_arguments()
    run = Run(args, compiles_layers=False)
    tokenizer, config, train_set, held_out = load_data(args)
    run.begin(config, tokenizer, train_set, held_out, "balance", "balance_strength")
    model = moe_model.build_mixture(args, config)
    summary = {"loss": sum_token_losses(model)}  # model(...) now returns the summed loss of the targets
    router = routing.Routing(model, args.balance, args.balance_strength)  # backward now includes the balancing loss
    optimizer = make_optimizer(args.optimizer, model, args.learning_rate, args.weight_decay)
    collate = partial(collate_tokens, pad_token_id=tokenizer.pad_token_id)
    routing.gather_whole_blocks(run.accelerator, router.layers)
    describe_use(model, config, tokenizer, train_set.end_tokens)
    model, optimizer = run.prepare(model, optimizer, collate, train_set, held_out, **summary, **router.describe(model))
    router.prepared()
    with run.training(config, tokenizer) as batches:
        train(args, run, model, optimizer, batches, router)
    results, lines = run.end_training(), []
    written = run.write_model("AutoModelForCausalLM", tokenizer)
    with run.optional_steps():
        results |= describe_held_out(evaluate(run, model), held_out) if held_out else {}
        results |= router.report(run.accelerator)
        if written and not run.is_sharded:
            results["sample"] = write_sample(written, tokenizer, held_out or train_set)
            lines = [f"\nthe model writes:\n{results['sample']}\n"]
    run.finish(results, *routing.describe_results(results), *lines)


if __name__ == "__main__":
    with exit_on_user_error():
        main()
