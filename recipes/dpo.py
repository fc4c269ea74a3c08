"""Tunes a causal language model by preferences (DPO, ORPO and others), on any machine that accelerate_configs/ names.

smallest run   accelerate launch --config_file accelerate_configs/cpu.yaml recipes/dpo.py
one GPU        accelerate launch --config_file accelerate_configs/single_gpu.yaml recipes/dpo.py \\
                   --model_name_or_path my_model/ --train_file preferences.jsonl --validation_file held_out.jsonl
several GPUs   accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 8 recipes/dpo.py \\
                   --model_name_or_path my_model/ --train_file preferences.jsonl --lora_rank 16
resume         the same with --resume, after a stop or a crash; also on more or fewer GPUs, or in a different mode

A row has a `prompt` with a `chosen` and a `rejected` answer; or these two alone, which begin with the same prompt. Each
is a text, or a list of messages. For KTO, a row may have a `prompt`, a `completion` and a `label`: true or false.
Without data, a function's body is to be preferred to its lines in reverse order.
The reference, which most losses compare with, is the model before its first update.
"""

import sys
from functools import partial
from pathlib import Path

# The repository root comes after this file's directory (index 0), so a common/ next to this file takes precedence.
sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from common import arguments  # isort: skip  # before torch: see common/__init__.py
from transformers import LlamaConfig

from common.data.tokenizer import load_tokenizer, special_token_ids, train_tokenizer
from common.errors import raise_errors
from common.models.adapters import build_base
from common.models.load import check_model, describe_use, load_config
from common.parallel.shutdown import exit_on_user_error
from common.report.predictions import measure
from common.run import Run
from common.tasks.dpo import losses
from common.tasks.dpo.baseline import predict_held_out, with_baseline
from common.tasks.dpo.reference import add_reference, identify_reference, of_answers
from common.tasks.dpo.samples import collate_samples, find_columns, tokenize_samples
from common.training.accumulation import loss_scale, skip_step, synchronize_gradients
from common.training.clipping import clip_gradients
from common.training.losses import sum_token_losses
from common.training.optimizers import learning_rate, make_optimizer, set_learning_rate

# Models from scratch, of Llama's shape, to rehearse with. SHAPE names the fields of LlamaConfig that come first.
SHAPE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
MODEL_CONFIGS = {
    # layers, width, heads, key-value heads, MLP width (as in SHAPE), vocabulary, AdamW's peak learning rate
    "tiny": (4, 128, 4, 2, 384, 4096, 1e-3),  # 1.3 M parameters
    "small": (6, 384, 6, 6, 1024, 8192, 3e-4),  # 13.8 M
}


def parse_arguments():
    parser = arguments.recipe_parser(__doc__)
    arguments.add_language_arguments(parser, one_text=False, chats=True, adapters=True, answers=True)
    parser.set_defaults(global_batch_size=8, num_updates=200, weight_decay=0.0)
    group = parser.add_argument_group("preferences (--sequence_length limits the tokens of a prompt with one answer)")
    group.add_argument("--model_config", **arguments.one_of(MODEL_CONFIGS, "model from scratch (default: tiny)"))
    losses.add_loss_arguments(group)
    args = parser.parse_args()
    arguments.choose_model(parser, args, MODEL_CONFIGS, fine_tuning_rate=1e-6)
    return args


def load_data(args):
    """Returns tokenizer, model config, training samples, and held-out samples or None."""
    source, held_out_source = arguments.text_sources(args)
    if args.model_name_or_path:
        config = load_config(args.model_name_or_path, args.trust_remote_code)
        tokenizer = load_tokenizer(args.model_name_or_path, args.trust_remote_code)
    else:
        *shape, vocabulary, _ = MODEL_CONFIGS[args.model_config]
        tokenizer = train_tokenizer(source, vocabulary, None, find_columns(source, args.loss))
        positions = args.sequence_length
        shape = dict(zip(SHAPE, shape, strict=True), vocab_size=vocabulary, max_position_embeddings=positions)
        config = LlamaConfig(**shape, **special_token_ids(tokenizer), tie_word_embeddings=True)
    raise_errors(check_model(config, tokenizer, args.sequence_length))
    options = {"reference": identify_reference(args), "objective": losses.objective_of(args)}
    pairs = partial(tokenize_samples, tokenizer=tokenizer, length=args.sequence_length, **options)
    return tokenizer, config, pairs(source), held_out_source and pairs(held_out_source, is_held_out=True)


def predict(model, micro_batch):
    """Returns the summed loss of a micro-batch, and the reward margin of each pair, (P,)."""
    return of_answers(model, micro_batch, partial(losses.loss_and_margins, micro_batch=micro_batch))


def sum_losses(model, micro_batch):
    """Returns the summed loss of a micro-batch's pairs."""
    return predict(model, micro_batch)[0]


def evaluate(run, model):
    """Returns the mean loss, reward accuracy and mean reward margin over all held-out pairs."""
    metrics, margins, labels = measure(run, model, predict_held_out(run, model, predict))
    return metrics | losses.summarize_margins(run.args.loss, margins, labels)


def train(args, run, model, optimizer, batches):
    """Training loop: per global batch, forward and backward of its micro-batches, then one update."""
    accelerator = run.accelerator
    run.evaluations.repeat(evaluate, model)  # on resume, if a request to stop interrupted it
    for batch in batches:
        rate = learning_rate(batch.update, args.lr_schedule, args.learning_rate, args.num_updates, args.warmup_updates)
        set_learning_rate(optimizer, rate)
        scale, loss_sums, loss_sum = loss_scale(accelerator, batch.num_targets), [], None
        for micro_batch, is_last in with_baseline(run, model, batch):
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
    run = Run(args, losses.check_loss(args), sequences_per_sample=2, splits_sequences=False)
    tokenizer, config, train_set, held_out = load_data(args)
    run.begin(config, tokenizer, train_set, held_out, *losses.FLAGS)
    model = build_base(args, config)
    head = sum_token_losses(model, keeps_own_loss=False)  # model(...) now calls `loss_of(token_losses)`
    loss_description = f"{losses.describe_loss(args)}; {head}"
    optimizer = make_optimizer(args.optimizer, model, args.learning_rate, args.weight_decay)
    collate = partial(collate_samples, pad_token_id=tokenizer.pad_token_id, objective=losses.objective_of(args))
    describe_use(model, config, tokenizer, train_set.end_tokens)
    model, optimizer = run.prepare(model, optimizer, collate, train_set, held_out, loss=loss_description)
    add_reference(run, model)
    with run.training(config, tokenizer) as batches:
        run.evaluations.answer_prompts(model, "before")
        train(args, run, model, optimizer, batches)
    results = run.end_training()
    run.write_model("AutoModelForCausalLM", tokenizer)
    with run.optional_steps():
        results |= evaluate(run, model) if held_out else {}
        run.evaluations.answer_prompts(model, "after")
    run.finish(results, *losses.describe_metrics(args.loss, results))


if __name__ == "__main__":
    with exit_on_user_error():
        main()
