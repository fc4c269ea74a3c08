"""adamw8bit under FSDP2 and HSDP: bit for bit the updates of bitsandbytes on full parameters, in checkpoints too."""

import pytest
import torch
from conftest import assert_refused, need, run_specs
from safetensors.torch import load_file
from test_checkpoint import outcome

from common.checkpoint.read import Reader, list_checkpoints

NUM_UPDATES, SAVED = 4, 2


def flags(functions_file, output_dir, *more):
    """A model whose matrices are large enough for 8 bits."""
    base = [
        "--train_file",
        functions_file,
        "--sequence_length",
        32,
        "--optimizer",
        "adamw8bit",
        "--global_batch_size",
        8,
    ]
    base += ["--num_updates", NUM_UPDATES, "--warmup_updates", 1, "--save_every", SAVED, "--keep_last", 9]
    return [*base, "--weight_decay", 0.5, "--output_dir", output_dir, *more]


def replay(steps):
    """Yields the weights and the optimizers' states after each of these steps, by bitsandbytes alone."""
    import bitsandbytes

    weights = {name: torch.nn.Parameter(weight) for name, weight in steps[0]["weights"].items()}
    embedding = "model.embed_tokens.weight"
    kinds = {name: "AdamW32bit" if name == embedding else "AdamW8bit" for name in weights}
    optimizers = {
        name: getattr(bitsandbytes.optim, kinds[name])(
            [p], betas=(0.9, 0.95), weight_decay=steps[0]["decays"][name], min_8bit_size=4096
        )
        for name, p in weights.items()
    }
    for step in steps:
        for name, optimizer in optimizers.items():
            weights[name].grad = step["gradients"][name].clone()
            optimizer.param_groups[0]["lr"] = step["rate"]
            optimizer.step()
        yield weights, {name: optimizer.state[weights[name]] for name, optimizer in optimizers.items()}


@pytest.fixture(scope="module")
def recorded(functions_file, tmp_path_factory):
    """A run under FSDP2; resumed there; and resumed by one process, all from update 2."""
    need("bitsandbytes")
    directory = tmp_path_factory.mktemp("8bit")
    runs = [(flags(functions_file, directory / "run"), {"save_steps": str(directory / "run.pt")})]
    for name in ("again", "alone"):
        changes = {"copy_run": [str(directory / "run"), str(directory / name), SAVED]}
        changes |= {"save_steps": str(directory / f"{name}.pt")}
        runs.append((flags(functions_file, directory / name, "--resume"), changes))
    for config, some in (("fsdp2", runs[:2]), ("cpu", runs[2:])):
        run_specs("lm", some, directory, config, "--mixed_precision", "no")
    return directory


@pytest.mark.parametrize("config", ["fsdp2", "hsdp"])
def test_the_updates_are_those_of_full_parameters(config, recorded, functions_file):
    name = {"fsdp2": "run"}.get(config, config)
    if config == "hsdp":
        changes = {"save_steps": str(recorded / "hsdp.pt")}
        given = flags(functions_file, recorded / "hsdp")
        run_specs("lm", [(given, changes)], recorded, config, "--mixed_precision", "no")
    steps = torch.load(recorded / f"{name}.pt")
    assert len(steps) == NUM_UPDATES
    *_, (weights, states) = replay(steps)
    exported = load_file(recorded / f"{name}/model/model.safetensors")
    assert sum(state["state1"].dtype == torch.uint8 for state in states.values()) > 20
    for name, weight in weights.items():
        assert torch.equal(exported[name], weight), name


def test_a_checkpoint_has_the_states_of_full_parameters(recorded):
    """In 8 bits, with each scale and each code book once."""
    *_, (_, states) = replay(torch.load(recorded / "run.pt")[:SAVED])
    found = {manifest["update"]: (path, manifest) for path, manifest in list_checkpoints(recorded / "run")[0]}
    reader = Reader(*found[SAVED])
    for name, state in states.items():
        for key in ("state1", "state2", "absmax1", "absmax2", "qmap1", "qmap2"):
            assert (key in state) == (f"optimizer.{key}/{name}" in reader.tensors), (key, name)
            if key in state:
                saved = reader.read(f"optimizer.{key}/{name}")
                assert saved.dtype == state[key].dtype and torch.equal(saved, state[key]), (key, name)


def test_a_run_resumes_bit_for_bit_and_with_fewer_processes(recorded):
    assert outcome(recorded / "again", NUM_UPDATES) == outcome(recorded / "run", NUM_UPDATES)
    alone = torch.load(recorded / "alone.pt")
    steps = torch.load(recorded / "run.pt")[:SAVED] + alone
    *_, (weights, _) = replay(steps)
    exported = load_file(recorded / "alone/model/model.safetensors")
    for name, weight in weights.items():
        assert torch.equal(exported[name], weight), name
    assert not torch.equal(exported[name], alone[0]["weights"][name])  # control: it was updated


def test_a_shard_that_splits_a_block_is_refused(functions_file, tmp_path):
    need("bitsandbytes")
    given = flags(functions_file, tmp_path / "run", "--global_batch_size", 6)
    result = run_specs("lm", [(given, {})], tmp_path, "fsdp2", "--num_processes", 3, check=False)
    assert_refused(
        result,
        r"--optimizer adamw8bit: a shard of model.layers.0.self_attn.q_proj.weight \(128, 128\) has 43 rows on 3 "
        "processes, which is no multiple of bitsandbytes' blocks of 256 elements; use a different number",
    )
    assert not (tmp_path / "run").exists()
