"""Trains a causal language model, from scratch or from a pretrained one, with any config of accelerate_configs/.

smallest run   accelerate launch --config_file accelerate_configs/cpu.yaml recipes/lm.py
one GPU        accelerate launch --config_file accelerate_configs/single_gpu.yaml recipes/lm.py --model_config small \\
                   --train_file 'books/*.txt' --validation_file held_out.txt --output_dir runs/books
several GPUs   accelerate launch --config_file accelerate_configs/multi_gpu.yaml --num_processes 8 recipes/lm.py \\
                   --model_name_or_path my_model/ --train_file chats.jsonl --global_batch_size 128
dry run        the same with --dry_run, on any machine
resume         the same with --resume, after a stop or a crash; also on more or fewer GPUs, or in a different mode

Text is concatenated and split into blocks of --sequence_length tokens. A row with `prompt` and `completion`, or with
`messages`, is a separate example without packing; its targets are the completion, or the assistant's turns.
"""

import sys
from functools import partial
from pathlib import Path

# The repository root comes after this file's directory (index 0), so a common/ next to this file takes precedence.
sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from common import arguments  # isort: skip  # before torch: see common/__init__.py
import torch
from transformers import LlamaConfig

from common.data.text import tokenize
from common.data.tokenizer import load_tokenizer, special_token_ids, train_tokenizer
from common.errors import raise_errors
from common.models.adapters import build_base
from common.models.load import check_model, describe_use, load_config, write_sample
from common.parallel.shutdown import exit_on_user_error
from common.report.tracking import describe_held_out
from common.run import Run
from common.tasks.lm import distillation
from common.training.accumulation import loss_scale, mean_losses, skip_step, synchronize_gradients
from common.training.batching import collate_tokens
from common.training.clipping import clip_gradients
from common.training.losses import sum_token_losses
from common.training.optimizers import learning_rate, make_optimizer, set_learning_rate

# Models to train from scratch, of Llama's shape. SHAPE names the fields of LlamaConfig that come first in each row.
SHAPE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
MODEL_CONFIGS = {
    # layers, width, heads, key-value heads, MLP width (as in SHAPE), vocabulary, AdamW's peak learning rate
    "tiny": (4, 128, 4, 2, 384, 4096, 6e-3),  # 1.3 M parameters
    "small": (6, 384, 6, 6, 1024, 8192, 1e-3),  # 13.8 M
    "medium": (12, 768, 12, 12, 2048, 32768, 6e-4),  # 110 M
    "large": (16, 2048, 32, 8, 8192, 32768, 3e-4),  # 1.04 B
}


def parse_arguments():
    parser = arguments.recipe_parser(__doc__)
    arguments.add_language_arguments(parser, examples=True, adapters=True, answers=True)
    group = parser.add_argument_group("language model")
    group.add_argument("--model_config", **arguments.one_of(MODEL_CONFIGS, "model from scratch (default: tiny)"))
    args = distillation.parse_arguments(parser)
    arguments.choose_model(parser, args, MODEL_CONFIGS, fine_tuning_rate=2e-5)
    return args


def load_data(args):
    """Returns tokenizer, model config, training samples, and held-out samples or None."""
    source, held_out_source = arguments.text_sources(args)
    if args.model_name_or_path:
        config = load_config(args.model_name_or_path, args.trust_remote_code)
        tokenizer = load_tokenizer(args.model_name_or_path, args.trust_remote_code)
    else:
        *shape, vocabulary, _ = MODEL_CONFIGS[args.model_config]
        tokenizer, positions = train_tokenizer(source, vocabulary), max(2048, args.sequence_length)
        shape = dict(zip(SHAPE, shape, strict=True), vocab_size=vocabulary, max_position_embeddings=positions)
        config = LlamaConfig(**shape, **special_token_ids(tokenizer), tie_word_embeddings=True)
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


def train(args, run, model, optimizer, batches):
    """Training loop: per global batch, forward and backward of its micro-batches, then one update."""
    accelerator = run.accelerator
    run.evaluations.repeat(evaluate, model)  # on resume, if a request to stop interrupted it
    for batch in batches:
        rate = learning_rate(batch.update, args.lr_schedule, args.learning_rate, args.num_updates, args.warmup_updates)
        set_learning_rate(optimizer, rate)
        scale, loss_sums, loss_sum = loss_scale(accelerator, batch.num_targets), [], None
        for micro_batch, is_last in run.micro_batches(batch):
            with synchronize_gradients(accelerator, model, now=is_last):
                loss_sum = sum_losses(model, micro_batch)
                accelerator.backward(loss_sum * scale)
                loss_sums.append(loss_sum.detach())
        if args.dry_run:
            break
        grad_norm = clip_gradients(accelerator, model, args.max_grad_norm)
        if run.all_finite(batch, loss_sums, grad_norm):
            optimizer.step()
            optimizer.zero_grad()
        else:
            skip_step(accelerator, optimizer)
        metrics = {"learning_rate": rate} | run.evaluations.after_update(evaluate, model)
        if run.end_update(batch, **metrics):
            break


def main():
    args = parse_arguments()
    run = Run(args)
    tokenizer, config, train_set, held_out = load_data(args)
    run.begin(config, tokenizer, train_set, held_out, *distillation.check(run, config, tokenizer))
    model = build_base(args, config)
    loss_description = sum_token_losses(model)  # model(...) now returns the summed loss of the targets
    optimizer = make_optimizer(args.optimizer, model, args.learning_rate, args.weight_decay)
    collate = partial(collate_tokens, pad_token_id=tokenizer.pad_token_id)
    describe_use(model, config, tokenizer, train_set.end_tokens)
    model, optimizer = run.prepare(model, optimizer, collate, train_set, held_out, loss=loss_description)
    distillation.add_teacher(run, model)
    with run.training(config, tokenizer) as batches:
        run.evaluations.answer_prompts(model, "before")
        train(args, run, model, optimizer, batches)
    results, lines = run.end_training(), []
    written = run.write_model("AutoModelForCausalLM", tokenizer)
    with run.optional_steps():
        results |= describe_held_out(evaluate(run, model), held_out) if held_out else {}
        run.evaluations.answer_prompts(model, "after")
        if written and not run.is_sharded:
            results["sample"] = write_sample(written, tokenizer, held_out or train_set)
            lines = [f"\nthe model writes:\n{results['sample']}\n"]
    run.finish(results, *lines)


if __name__ == "__main__":
    with exit_on_user_error():
        main()
