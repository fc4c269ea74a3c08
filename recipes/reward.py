"""Trains a reward model on preference pairs, on any machine that accelerate_configs/ names.

smallest run   accelerate launch --config_file accelerate_configs/cpu.yaml recipes/reward.py
one GPU        accelerate launch --config_file accelerate_configs/single_gpu.yaml recipes/reward.py \\
                   --model_name_or_path my_model/ --train_file preferences.jsonl --validation_file held_out.jsonl
several GPUs   accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 8 recipes/reward.py \\
                   --model_name_or_path my_model/ --train_file preferences.jsonl --lora_rank 16
resume         the same with --resume, after a stop or a crash; also on more or fewer GPUs, or in a different mode

A row has a `prompt` with a `chosen` and a `rejected` answer; or these two alone, which begin with the same prompt. Each
is a text, or a list of messages. A number in a column `margin` is the least difference of rewards to train for.
Without data, a function's body is to be preferred to its lines in reverse order.
"""

import sys
from functools import partial
from pathlib import Path

# The repository root comes after this file's directory (index 0), so a common/ next to this file takes precedence.
sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from common import arguments  # isort: skip  # before torch: see common/__init__.py
import torch
from transformers import AutoModelForSequenceClassification

from common.models.adapters import base_options, with_adapter
from common.models.classifiers import (
    HEAD_RATE_HELP,
    build_classifier,
    check_new_head,
    check_padding,
    find_inputs,
    set_pipeline_inputs,
)
from common.parallel.shutdown import exit_on_user_error
from common.report.predictions import measure
from common.run import Run
from common.tasks.reward import reward_model
from common.tasks.reward.pairs import collate_pairs, tokenize_pairs
from common.training.accumulation import loss_scale, skip_step, synchronize_gradients
from common.training.clipping import clip_gradients
from common.training.optimizers import learning_rate, make_optimizer, set_learning_rate

# Models from scratch, of Llama's shape, to rehearse with.
MODEL_CONFIGS = {
    # layers, width, heads, key-value heads, MLP width, vocabulary, AdamW's peak learning rate
    "tiny": (4, 128, 4, 2, 384, 4096, 1e-3),  # 1.3 M parameters
    "small": (6, 384, 6, 6, 1024, 8192, 3e-4),  # 13.8 M
}


def parse_arguments():
    parser = arguments.recipe_parser(__doc__)
    arguments.add_language_arguments(parser, one_text=False, chats=True, adapters=True)
    parser.set_defaults(global_batch_size=8, num_updates=200, weight_decay=0.0)
    group = parser.add_argument_group("rewards (--sequence_length limits the tokens of a prompt with one answer)")
    group.add_argument("--model_config", **arguments.one_of(MODEL_CONFIGS, "model from scratch (default: tiny)"))
    about = "weight of the square of a pair's summed rewards in its loss, which keeps rewards near 0 (default: 0)"
    group.add_argument("--center_rewards", type=arguments.not_negative_float, default=0.0, metavar="C", help=about)
    group.add_argument("--new_head", action="store_true", help="replace the pretrained head, such as one for classes")
    group.add_argument("--head_learning_rate", type=arguments.positive_float, metavar="X", help=HEAD_RATE_HELP)
    args = parser.parse_args()
    arguments.choose_model(parser, args, MODEL_CONFIGS, fine_tuning_rate=1e-5)
    return args


def load_data(args):
    """Returns tokenizer, model config, training samples, and held-out samples or None."""
    source, held_out_source = arguments.text_sources(args)
    config, tokenizer = reward_model.choose_model(args, MODEL_CONFIGS, source)
    pairs = partial(tokenize_pairs, tokenizer=tokenizer, length=args.sequence_length)
    return tokenizer, config, pairs(source), held_out_source and pairs(held_out_source)


def predict(model, micro_batch):
    """Returns the summed loss of a micro-batch's pairs, and the rewards of chosen and rejected answers, (P, 2)."""
    inputs = {name: x for name, x in micro_batch.items() if "target" not in name}
    rewards = model(**inputs).logits.squeeze(1)[micro_batch["target_rows"]]
    rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    return reward_model.sum_pairs(rewards, micro_batch["targets"], micro_batch["target_center"]), rewards


def sum_losses(model, micro_batch):
    """Returns the summed loss of a micro-batch's pairs."""
    return predict(model, micro_batch)[0]


def evaluate(run, model):
    """Returns the mean loss, accuracy, mean margin and mean reward over all held-out pairs."""
    metrics, rewards, _ = measure(run, model, predict)
    return metrics | reward_model.summarize(rewards)


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
    run = Run(args, check_new_head(args), sequences_per_sample=2, splits_sequences=False)
    tokenizer, config, train_set, held_out = load_data(args)
    kind, where = AutoModelForSequenceClassification, (args.model_name_or_path, args.trust_remote_code)
    run.begin(config, tokenizer, train_set, held_out, "center_rewards", "head_learning_rate", model_class=kind)
    model, new_weights = build_classifier(config, *where, kind, args.new_head, **base_options(args))
    model, inputs = with_adapter(args, model, new_weights), find_inputs(model)
    head = {"head": new_weights, "head_learning_rate": args.head_learning_rate}
    optimizer = make_optimizer(args.optimizer, model, args.learning_rate, args.weight_decay, **head)
    options = {"inputs": inputs, "center_rewards": args.center_rewards}
    collate = partial(collate_pairs, pad_token_id=tokenizer.pad_token_id, **options)
    task = reward_model.describe_task(args, tokenizer, **head)
    model, optimizer = run.prepare(model, optimizer, collate, train_set, held_out, **task)
    check_padding(model, collate, train_set, run.accelerator)
    set_pipeline_inputs(tokenizer, args.sequence_length, inputs)
    with run.training(config, tokenizer) as batches:
        train(args, run, model, optimizer, batches)
    results = run.end_training()
    run.write_model("AutoModelForSequenceClassification", tokenizer)
    with run.optional_steps():
        results |= evaluate(run, model) if held_out else {}
    run.finish(results, *reward_model.describe_metrics(results))


if __name__ == "__main__":
    with exit_on_user_error():
        main()
