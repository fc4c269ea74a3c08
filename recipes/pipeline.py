"""Trains a causal language model whose layers lie in stages on several GPUs: a pipeline, for models too large for one.

without GPUs   accelerate launch --config_file accelerate_configs/pipeline.yaml recipes/pipeline.py
two GPUs       the same with --model_name_or_path my_model/ --train_file chats.jsonl --global_batch_size 64
two pipelines  the same with --num_processes 4 of accelerate launch: side by side, by DDP
resume         the same with --resume, after a stop or a crash; also in a different mode, also with recipes/lm.py

Data and flags are those of recipes/lm.py. The loop differs in one place: a schedule runs the forwards and backwards of
a global batch, on all stages. With another config there is one stage, and this is recipes/lm.py.
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
from common.models.load import build_model, check_model, describe_use, load_config, write_sample
from common.parallel.shutdown import exit_on_user_error
from common.report.tracking import describe_held_out
from common.run import Run
from common.tasks.pipeline.schedule import SCHEDULES, Pipeline
from common.tasks.pipeline.stages import check_stages
from common.training.accumulation import loss_scale, mean_losses, skip_step
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
    arguments.add_language_arguments(parser, examples=True)
    group = parser.add_argument_group("language model")
    group.add_argument("--model_config", **arguments.one_of(MODEL_CONFIGS, "model from scratch (default: tiny)"))
    about = "order of computation in a stage"
    group.add_argument("--schedule", default="1f1b", **arguments.one_of(SCHEDULES, about))
    args = parser.parse_args()
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
    raise_errors([*check_model(config, tokenizer, args.sequence_length), *check_stages(config)])
    tokens = partial(tokenize, tokenizer=tokenizer, sequence_length=args.sequence_length, shape=args.shape)
    train_set, held_out = tokens(source), held_out_source and tokens(held_out_source, measure_compression=True)
    return tokenizer, config, train_set, held_out


def sum_losses(model, micro_batch):
    """Returns this stage's part of the summed loss of a micro-batch's targets, in an evaluation."""
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


def train(args, run, model, optimizer, batches, pipeline):
    """Training loop: per global batch, the pipeline's schedule of its micro-batches, then one update."""
    accelerator = run.accelerator
    run.evaluations.repeat(evaluate, model)  # on resume, if a request to stop interrupted it
    for batch in batches:
        rate = learning_rate(batch.update, args.lr_schedule, args.learning_rate, args.num_updates, args.warmup_updates)
        set_learning_rate(optimizer, rate)
        scale = loss_scale(accelerator, batch.num_targets)
        micro_batches = [micro_batch for micro_batch, _ in run.micro_batches(batch)]
        loss_sums = pipeline.step(accelerator, model, micro_batches, scale)
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
    run = Run(args, pipeline_schedule=args.schedule)
    tokenizer, config, train_set, held_out = load_data(args)
    run.begin(config, tokenizer, train_set, held_out)
    model = build_model(config, args.model_name_or_path, args.trust_remote_code)
    loss_description = sum_token_losses(model)  # model(...) now returns the summed loss of the targets
    optimizer = make_optimizer(args.optimizer, model, args.learning_rate, args.weight_decay)
    pipeline = Pipeline(model, optimizer, run)  # this process now has only its own stage of the model
    collate = partial(collate_tokens, pad_token_id=tokenizer.pad_token_id)
    describe_use(model, config, tokenizer, train_set.end_tokens)
    model, optimizer = run.prepare(
        model, optimizer, collate, train_set, held_out, loss=loss_description, **pipeline.description
    )
    with run.training(config, tokenizer) as batches:
        train(args, run, model, optimizer, batches, pipeline)
    results, lines = run.end_training(), []
    written = run.write_model("AutoModelForCausalLM", tokenizer)
    with run.optional_steps():
        results |= describe_held_out(evaluate(run, model), held_out) if held_out else {}
        if written and not run.is_sharded:
            results["sample"] = write_sample(written, tokenizer, held_out or train_set)
            lines = [f"\nthe model writes:\n{results['sample']}\n"]
    run.finish(results, *lines)


if __name__ == "__main__":
    with exit_on_user_error():
        main()
