"""Sequences in segments: the gradient of the whole sequence, at the memory of one segment, in every mode."""

import json
import math
import sys
import types

import pytest
import torch
from conftest import (
    assert_mistake,
    assert_same_update,
    launch,
    relative_difference,
    results_of,
    run,
    run_in_float64,
    run_recipe_alone,
)
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from common.errors import UserError
from common.tasks.long_sequence.architectures import make_config, sum_losses_in_pieces
from common.tasks.long_sequence.recurrent import CELLS, RecurrentConfig, RecurrentLM, pieces_of, tile_mlps
from common.training.losses import sum_token_losses

RECIPE = "recipes/long_sequence.py"
TRANSFORMER = ["--architecture", "transformer", "--hidden_size", 32, "--num_layers", 1, "--mlp_rows", 100]


def flags(functions_file, output_dir, *more):
    """Blocks of 300 bytes, the last one shorter, and few updates; every global batch has several micro-batches."""
    base = ["--train_file", functions_file, "--sequence_length", 300, "--global_batch_size", 4, "--num_updates", 4]
    base += ["--hidden_size", 16, "--learning_rate", 1e-2, "--save_every", 0, "--output_dir", output_dir]
    return [str(part) for part in [*base, *more]]


def gradients(model, batch):
    model.zero_grad()
    loss = model(**batch)
    loss.backward()
    return loss.item(), [parameter.grad.clone() for parameter in model.parameters()]


def batch_of(length, num_targets):
    """Two sequences, of which the second has padding."""
    ids = torch.randint(0, 257, (2, length))
    return {
        "input_ids": ids,
        "targets": torch.randint(0, 257, (num_targets,)),
        "target_rows": torch.arange(num_targets),
    }


@pytest.mark.parametrize("cell", CELLS)
def test_segments_give_the_gradient_of_the_whole_sequence(cell):
    """To 1e-10 in float64, whatever the segments and levels. Control: a truncated gradient is another one."""
    torch.manual_seed(0)
    model = RecurrentLM(RecurrentConfig(cell=cell, hidden_size=16, num_hidden_layers=2)).double()
    batch = batch_of(120, 230)
    loss, expected = gradients(model, batch)
    for segments, levels in (("sqrt", 1), (7, 1), (120, 1), ("sqrt", 2), (2, 8), (3, 5)):
        model.segments, model.levels = segments, levels
        other_loss, found = gradients(model, batch)
        assert other_loss == pytest.approx(loss, rel=1e-12)
        assert relative_difference(found, expected) < 1e-10, (segments, levels)
        with torch.no_grad():
            assert model(**batch).item() == pytest.approx(loss, rel=1e-12)
    model.levels, model.truncate = 0, 40
    other_loss, found = gradients(model, batch)
    assert other_loss == pytest.approx(loss, rel=1e-12) and relative_difference(found, expected) > 1e-3


def test_the_loss_is_that_of_the_logits():
    """An independent computation: the model's logits and torch's cross-entropy; and nothing to predict is 0."""
    model = RecurrentLM(RecurrentConfig(hidden_size=16)).double()
    batch = batch_of(50, 90)
    logits = model(batch["input_ids"]).flatten(0, 1)[:90]
    expected = torch.nn.functional.cross_entropy(logits, batch["targets"], reduction="sum").item()
    model.levels = 1
    assert model(**batch).item() == pytest.approx(expected, rel=1e-12)
    nothing = {"input_ids": torch.zeros(1, 1, dtype=torch.long), "targets": torch.zeros(0, dtype=torch.long)}
    loss, found = gradients(model, nothing | {"target_rows": torch.zeros(0, dtype=torch.long)})
    assert loss == 0 and all((gradient == 0).all() for gradient in found)


def test_segments_keep_less():
    """Bytes that a forward keeps for its backward, counted as autograd saves them. Control: with none, all are."""
    assert [pieces_of(10_000, "sqrt", levels) for levels in (1, 3)] == [100, 10] and pieces_of(10_000, 7, 2) == 7
    model = RecurrentLM(RecurrentConfig(cell="gru", hidden_size=16))
    kept = {}
    for length in (400, 1600):
        for levels in (0, 1):
            model.levels, sizes = levels, {}
            batch = {"input_ids": torch.zeros(1, length, dtype=torch.long), "targets": torch.zeros(length).long()}
            batch["target_rows"] = torch.arange(length)

            def keep(tensor, sizes=sizes):
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()  # weights count once
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = model(**batch)  # alive while it is counted
            kept[length, levels] = sum(sizes.values()) - sum(p.nbytes for p in model.parameters())
            assert loss.requires_grad
    assert kept[1600, 0] > 3.9 * kept[400, 0]  # grows with the length
    assert kept[1600, 1] < 2.1 * kept[400, 1] and kept[1600, 1] < kept[1600, 0] / 100  # with its root


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_tiled_mlps_give_the_same_gradient(kind):
    config = AutoConfig.for_model(kind, vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    config.num_attention_heads = config.num_key_value_heads = 2
    config.num_local_experts = 4  # of gpt_oss
    config._experts_implementation = "eager"  # grouped_mm takes no float64
    model, batch = AutoModelForCausalLM.from_config(config, dtype=torch.float64), batch_of(100, 180)
    sum_token_losses(model)
    _, expected = gradients(model, batch)
    seen = []
    first = next(model.model.layers[0].mlp.children())
    first.register_forward_hook(lambda *call: seen.append(call[1][0].numel() // (2 * 32)))  # rows of both sequences
    assert tile_mlps(model, 30) == 2
    _, found = gradients(model, batch)
    assert relative_difference(found, expected) < 1e-12 and max(seen) == 30


def test_a_model_whose_mlps_are_not_found_goes_on_without_tiles():
    """Refused only where tiles were asked for."""
    config = AutoConfig.for_model("gpt2", vocab_size=257, n_embd=32, n_layer=1, n_head=2, n_positions=16)
    for rows in (None, 0):
        model = AutoModelForCausalLM.from_config(config)
        assert "MLPs in one piece" in sum_losses_in_pieces(model, types.SimpleNamespace(mlp_rows=rows), 16)
    with pytest.raises(UserError, match="--mlp_rows 8: GPT2LMHeadModel has no layers with an mlp; remove"):
        sum_losses_in_pieces(AutoModelForCausalLM.from_config(config), types.SimpleNamespace(mlp_rows=8), 16)


CUTS = {
    "size-4": (1, ["--micro_batch_size", 4]),
    "size-1": (1, ["--micro_batch_size", 1]),
    "none": (1, ["--segments", "none"]),
    "levels": (1, ["--segments", 3, "--levels", 3, "--micro_batch_size", 2]),
    "truncated": (1, ["--truncate", 50]),
    "transformer": (1, TRANSFORMER),
    "mean-of-means": (1, TRANSFORMER),
    "2-size-2": (2, ["--micro_batch_size", 2]),
    "2-size-1": (2, []),
    "2-transformer": (2, TRANSFORMER),
}


def test_the_update_is_the_same_however_the_global_batch_is_cut(functions_file, tmp_path):
    """Law 1, over micro-batches, segments and processes, of four sequences of which one is short.

    Controls: the mean of means, the truncated gradient.
    """
    text = "".join(json.loads(line)["text"] for line in functions_file.read_text().splitlines())[:950]
    (tmp_path / "data.txt").write_text(text)  # three sequences of 300 bytes and a short one
    cuts = {
        name: (processes, flags(tmp_path / "data.txt", tmp_path, *cut), {"mean_of_means": 1} if "means" in name else {})
        for name, (processes, cut) in CUTS.items()
    }
    runs = run_in_float64("long_sequence", cuts, tmp_path)
    assert_same_update(runs, "size-4", "size-1", "none", "levels", "2-size-2", "2-size-1")
    assert_same_update(runs, "transformer", "2-transformer")
    assert relative_difference(runs["mean-of-means"][0], runs["transformer"][0]) > 1e-3
    assert relative_difference(runs["truncated"][0], runs["size-4"][0]) > 1e-4


def test_a_run_ends_with_figures_that_are_right(functions_file, tmp_path):
    """The printed lines; the loss against one of the exported model's own logits; the checkpoint's export."""
    out = tmp_path / "first"
    result = launch(*flags(functions_file, out, "--save_every", 4), script=RECIPE)
    assert "17 segments, recomputed in backward; the gradient of the full sequence" in result.stdout
    assert "precision  float32, independent of the launch" in result.stdout
    assert "load with common.tasks.long_sequence.recurrent.RecurrentLM.from_pretrained)" in result.stdout
    command = [sys.executable, "-m", "tools.checkpoint", "export", out / "checkpoints/update-000004", tmp_path / "m"]
    assert run(command).returncode == 0
    weights = [AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (out / "model", tmp_path / "m")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    model, text = AutoModelForCausalLM.from_pretrained(out / "model"), "def f(x):\n    return x\n" * 30
    (tmp_path / "held_out.txt").write_text(text)
    more = ["--model_name_or_path", out / "model", "--validation_file", tmp_path / "held_out.txt"]
    kept = [flag for flag in flags(functions_file, tmp_path / "run", *more) if flag not in ("--hidden_size", "16")]
    launch(*kept, "--truncate", 100, "--num_updates", 1, script=RECIPE)
    results = results_of(tmp_path / "run")
    model, loss = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model"), 0.0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/model")
    ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    assert len(ids) == len(text.encode()) + 2  # a token is a byte
    for start in range(0, len(ids) - 1, 300):
        block = torch.tensor(ids[start : start + 301])
        with torch.no_grad():
            logits = model(block[None, :-1])[0]
        loss += torch.nn.functional.cross_entropy(logits, block[1:], reduction="sum").item()
    assert results["validation_loss"] == pytest.approx(loss / (len(ids) - 1), rel=1e-5)
    assert results["bits_per_byte"] == pytest.approx(loss / math.log(2) / len(text), rel=1e-5)


MISTAKES = {
    "--segments 20 --levels 2": "make 400 segments, more than the steps of --sequence_length 300",
    "--segments 4 --truncate 8": "--segments has no effect with --truncate",
    "--levels 2 --segments none": "--levels has no effect without --segments",
    "--truncate 300": "--truncate 300 truncates nothing of --sequence_length 300",
    "--activation_checkpointing full": "--activation_checkpointing full is for a transformer",
    "--compile": "--compile is for a transformer",
    "--mlp_rows 8": "--mlp_rows is for a transformer",
    "--architecture transformer --segments 4": "--segments 4 is for a recurrent network",
    "--architecture transformer --hidden_size 33": "--hidden_size 33: .* needs an even size; use 32 or 34",
    "--segments many": "'many' is not",
    "--architecture gru --model_name_or_path m": "mutually exclusive",
}


@pytest.mark.parametrize(("hidden_size", "num_heads"), [(16, 1), (128, 2), (200, 2), (254, 1), (1024, 16)])
def test_a_transformer_of_any_even_width_has_heads(hidden_size, num_heads):
    args = types.SimpleNamespace(architecture="transformer", hidden_size=hidden_size, num_layers=1, sequence_length=8)
    config = make_config(args, types.SimpleNamespace(bos_token_id=1, eos_token_id=2, pad_token_id=2))
    assert config.num_attention_heads == num_heads
    AutoModelForCausalLM.from_config(config)(torch.zeros(1, 8, dtype=torch.long))


def test_segments_are_those_of_the_longest_sample(tmp_path):
    """Not of --sequence_length, where the data are shorter."""
    (tmp_path / "short.txt").write_text("abc")
    given = flags(tmp_path / "short.txt", tmp_path / "run", "--global_batch_size", 1, "--dry_run")
    result = run_recipe_alone("long_sequence.py", *given)
    assert result.returncode == 0 and "2 segments, recomputed" in result.stdout, result.stderr
    result = run_recipe_alone("long_sequence.py", *given, "--segments", 5)
    assert_mistake(result, "5 segments, more than the steps of the longest sample, of 4 tokens")
    assert_mistake(run_recipe_alone("long_sequence.py", *given, "--truncate", 4), "truncates nothing of the longest")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_of_its_own_are_refused(mistake, functions_file, tmp_path):
    result = run_recipe_alone("long_sequence.py", *flags(functions_file, tmp_path / "run", *mistake.split()))
    assert_mistake(result, MISTAKES[mistake])
    assert not (tmp_path / "run").exists()
