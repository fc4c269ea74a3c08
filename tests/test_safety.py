"""What a checkpoint, a model directory or a data set brings is never executed; and no secret is written or printed."""

import contextlib
import json
import logging
import os
import pickle
import re
import shutil
import struct
import sys
import traceback

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from conftest import BIN, ROOT, assert_mistake, example_flags, launch, run, run_recipe_alone, run_specs, write_jsonl

from common.checkpoint.format import hash_of
from common.checkpoint.read import find_damage, list_checkpoints
from common.data.source_types import Source
from common.data.sources import open_source
from common.data.text import tokenize
from common.data.tokenizer import load_tokenizer
from common.errors import UserError
from common.files import write_file
from common.models.load import build_model, load_config
from common.output import guard_output
from common.parallel import failures
from common.redaction import HIDDEN, redact
from common.report.records import to_json_line, write_run
from tools.checkpoint.__main__ import main
from tools.checkpoint.export import export


class Payload:
    """Unpickled, it leaves a file."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return open, (str(self.canary), "w")


def zipped(path, canary):
    """What torch.save writes: a ZIP with a pickle."""
    with open(path, "wb") as file:
        torch.save({"weight": Payload(canary)}, file)


def pickled(path, canary):
    path.write_bytes(pickle.dumps({"weight": Payload(canary)}, protocol=4))


def python(path, canary):
    path.write_text(f"open({str(canary)!r}, 'w')\n\ndef generate(*_, **__):\n    pass\n\nclass Evil:\n    pass\n")


def flags(functions_file, model_dir, output_dir, *more):
    return example_flags(functions_file, model_dir, output_dir, "--num_updates", 4, "--save_every", 2, *more)


@pytest.fixture(scope="module")
def finished(functions_file, model_dir, tmp_path_factory):
    """A run with the checkpoints of updates 2 and 4."""
    out = tmp_path_factory.mktemp("finished") / "run"
    launch(*flags(functions_file, model_dir, out))
    return out


# --- checkpoints: each attack changes the directory of a sound one, whose manifest the attacker then makes anew


def edit_header(change):
    """Changes the header of the safetensors file, and leaves the rest."""

    def edit(at, canary):
        path = at / "rank-00000.safetensors"
        content = path.read_bytes()
        size = struct.unpack("<Q", content[:8])[0]
        header = change(json.loads(content[8 : 8 + size]), canary)
        path.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + size :])

    return edit


def edit_json(name, change):
    def edit(at, canary):
        value = json.loads((at / name).read_text())
        change(value)
        (at / name).write_text(json.dumps(value))

    return edit


def edit_rank(change):
    return edit_json("rank-00000.json", change)


def edit_manifest(change):
    return edit_json("manifest.json", change)


def write(name, content):
    return lambda at, canary: (at / name).write_bytes(content)


def out_of_range(header, _):
    return json.dumps({name: one | {"data_offsets": [0, 1 << 40]} for name, one in header.items()}).encode()


def replace_by_link(at, _):
    path = at / "rank-00000.safetensors"
    path.symlink_to(path.rename(at.parent.parent / "elsewhere"))


def replace_by_pipe(at, _):
    (at / "model/config.json").unlink()
    os.mkfifo(at / "model/config.json")


def first_tensor(rank):
    return next(iter(rank["tensors"].values()))


SHA_256 = "44136fa355b3678a1146ad16f7e8649e94fb4fc2"
ATTACKS = {
    "weights are a ZIP with a pickle": lambda at, canary: zipped(at / "rank-00000.safetensors", canary),
    "weights are a pickle": lambda at, canary: pickled(at / "rank-00000.safetensors", canary),
    "header is a pickle": edit_header(lambda _, canary: pickle.dumps(Payload(canary))),
    "offsets out of range": edit_header(out_of_range),
    "giant header": write("rank-00000.safetensors", struct.pack("<Q", 1 << 62) + b"{}"),
    "rank JSON is a pickle": lambda at, canary: pickled(at / "rank-00000.json", canary),
    "rank JSON is a list": write("rank-00000.json", b"[]"),
    "rank JSON is deep": write("rank-00000.json", b"[" * 100_000),
    "a tensor of a giant shape": edit_rank(lambda rank: first_tensor(rank).update(shape=[1 << 50])),
    "a range that begins before its tensor": edit_rank(lambda rank: first_tensor(rank).update(start=-8)),
    "a count that is text": edit_rank(lambda rank: rank["numbers"].update({"optimizer.step/x": "__import__('os')"})),
    "a count without end": edit_rank(lambda rank: rank["numbers"].update({"optimizer.step/x": 10**18})),
    "random states beyond their memory": edit_rank(lambda rank: rank["random"]["numpy"].__setitem__(2, 10**6)),
    "random states are pickles": edit_rank(lambda rank: rank["random"].update(torch="gASVCgAAAA==")),
    "path traversal": edit_manifest(lambda m: m["files"].update({"../../../x": {"bytes": 2, "sha256": SHA_256}})),
    "an absolute path": edit_manifest(lambda m: m["files"].update({"/etc/hostname": {"bytes": 1, "sha256": ""}})),
    "a file that the manifest does not name": edit_manifest(lambda m: m["files"].pop("rank-00000.json")),
    "a world without end": edit_manifest(lambda m: m.update(world_size=10**12)),
    "a position with a field too many": edit_manifest(lambda m: m["position"].update(__class__="os.system")),
    "a manifest of other types": edit_manifest(lambda m: m.update(files=[], scaler="x")),
    "a link to a file outside": replace_by_link,
    "a pipe": replace_by_pipe,
    "manifest is a pickle": lambda at, canary: pickled(at / "manifest.json", canary),
    "manifest is deep": write("manifest.json", b'{"a":' * 100_000),
}
# Beside the sound files, under the names that other libraries load with pickle: nothing looks at them.
LOADED_ELSEWHERE = ("pytorch_model.bin", "model.pt", "optimizer.bin", "optimizer.pt", "scheduler.bin", "scaler.pt")
LOADED_ELSEWHERE += ("random_states_0.pkl", "rng_state_0.pth", "training_args.bin", "custom_checkpoint_0.pkl")
LOADED_ELSEWHERE += ("global_step4/mp_rank_00_model_states.pt", "global_step4/zero_pp_rank_0_optim_states.pt")
LOADED_ELSEWHERE += ("adapter_model.bin", "tf_model.h5", "pytorch_model_fsdp_0/.metadata", "rank-00001.safetensors")


def put_beside(directory, canary):
    for name in LOADED_ELSEWHERE:
        (directory / name).parent.mkdir(exist_ok=True)
        zipped(directory / name, canary)
    (directory / "latest").write_text("global_step4")


def sign(directory, update=None):
    """A manifest that fits the files as they are now, as an attacker can make it."""
    path = directory / "manifest.json"
    with contextlib.suppress(UserError, ValueError, RecursionError):  # a manifest that is none any more
        manifest = json.loads(path.read_text())
        if update is not None:
            manifest["update"] = manifest["position"]["update"] = update
        if isinstance(manifest["files"], dict):
            for name in [name for name in manifest["files"] if (directory / name).is_file() and ".." not in name]:
                manifest["files"] |= {name: write_file(directory / "copy", [(directory / name).read_bytes()])}
            (directory / "copy").unlink()
        path.write_text(json.dumps(manifest | {"sha256": hash_of(manifest)}))


def attacked(finished, output_dir, canary, name, update=9):
    """A copy of a sound checkpoint with one attack, as a newer one."""
    directory = output_dir / f"checkpoints/update-{update:06}"
    shutil.copytree(finished / "checkpoints/update-000004", directory)
    sign(directory, update)
    if name is not None:
        ATTACKS[name](directory, canary)
        sign(directory)
    return directory


@pytest.mark.parametrize("name", [*ATTACKS, None])
def test_an_attacked_checkpoint_is_refused_in_one_line(name, finished, tmp_path, capsys, monkeypatch):
    directory = attacked(finished, tmp_path, tmp_path / "canary", name)
    found, problems = list_checkpoints(tmp_path)
    lines = problems + [line for path, manifest in found if (line := find_damage(path, manifest))]
    assert len(lines) == (name is not None) and not any("\n" in line for line in lines), lines
    if name is None:  # the control: the same copy without an attack
        export(directory, tmp_path / "exported")
        return
    monkeypatch.setattr(sys, "argv", ["checkpoint", "export", str(directory), str(tmp_path / "exported")])
    with pytest.raises(SystemExit) as ended:
        main()
    errors = capsys.readouterr().err
    assert ended.value.code == 2 and errors.startswith("error: ") and errors.count("\n") == 1, errors
    assert not (tmp_path / "canary").exists() and not (tmp_path / "exported").exists()


def test_a_resume_passes_all_attacks_and_takes_the_sound_checkpoint(finished, functions_file, model_dir, tmp_path):
    """One launch, a newer checkpoint for every attack: each is told in a line, and what trained goes on."""
    out, canary = tmp_path / "run", tmp_path / "canary"
    shutil.copytree(finished, out)
    for number, name in enumerate(ATTACKS):
        attacked(finished, out, canary, name, update=10 + number)
    shutil.rmtree(out / "checkpoints/update-000004")
    put_beside(out / "checkpoints/update-000002", canary)
    put_beside(out, canary)
    result = launch(*flags(functions_file, model_dir, out, "--resume"))
    assert "Traceback" not in result.stderr, result.stderr
    assert "update-000002, after update 2" in result.stdout and not canary.exists()
    told = re.findall(r"^\S+/update-0000(\d\d): ", result.stderr, re.MULTILINE)
    assert sorted(map(int, told)) == [10 + number for number in range(len(ATTACKS))], result.stderr


def test_a_resume_with_other_tensors_ends_in_one_line(finished, functions_file, model_dir, tmp_path):
    """A checkpoint of the right form, whose tensors are not the model's."""

    def renamed(names):
        return {name.replace("layers.0", "layers.7"): one for name, one in names.items()}

    directory = attacked(finished, tmp_path / "run", None, None, update=3)
    edit_rank(lambda rank: rank.update({key: renamed(rank[key]) for key in ("tensors", "numbers")}))(directory, None)
    edit_header(lambda header, _: json.dumps(renamed(header)).encode())(directory, None)
    sign(directory)
    result = run_recipe_alone("lm.py", *flags(functions_file, model_dir, tmp_path / "run", "--resume"))
    assert_mistake(result, "not there in it")


def test_an_export_takes_no_code_and_nothing_that_only_lies_there(finished, tmp_path):
    directory, canary = attacked(finished, tmp_path, tmp_path / "canary", None), tmp_path / "canary"
    brought = {"modeling_evil.py": python, "pytorch_model.bin": zipped, "adapter_model.bin": zipped}
    for name, write in brought.items():
        write(directory / "model" / name, canary)
    edit_manifest(lambda m: m["files"].update({f"model/{name}": {} for name in brought}))(directory, canary)
    auto_map = {"AutoConfig": "modeling_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    edit_json("model/config.json", lambda config: config.update(auto_map=auto_map))(directory, canary)
    sign(directory)
    (directory / "model/secret.json").symlink_to("/etc/hostname")
    (directory / "model/added.json").write_text("{}")
    export(directory, tmp_path / "exported")
    names = {path.name for path in (tmp_path / "exported").iterdir()}
    assert "model.safetensors" in names and "tokenizer.json" in names and not canary.exists()
    assert not names & {*brought, "secret.json", "added.json"}

    for name in ("pipeline", "LlamaConfig", "BertForMaskedLM"):  # no model, or not these weights'
        edit_manifest(lambda m, name=name: m.update(architecture=name))(directory, canary)
        sign(directory)
        with pytest.raises(UserError, match=f"do not form a {name}"):
            export(directory, tmp_path / "another")
        assert not (tmp_path / "another").exists()


# --- models and data


CODE = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil", "AutoTokenizer": ["evil.Evil", "evil.Evil"]}
TEMPLATE = "{{{{ cycler.__init__.__globals__.os.mkdir('{canary}') }}}}{{% for m in messages %}}{{{{ m.content }}}}"
TEMPLATE += "{{% endfor %}}"


def bring_code(at, canary):
    python(at / "evil.py", canary)
    for name in ("config.json", "tokenizer_config.json"):
        edit_json(name, lambda config: config.update(auto_map=CODE))(at, canary)


def bring_unknown_code(at, canary):
    """Of a model and a tokenizer that the library does not have itself."""
    bring_code(at, canary)
    edit_json("config.json", lambda config: config.update(model_type="evil", architectures=["Evil"]))(at, canary)
    edit_json("tokenizer_config.json", lambda config: config.update(tokenizer_class="Evil"))(at, canary)


def bring_generate(at, canary):
    (at / "custom_generate").mkdir()
    python(at / "custom_generate/generate.py", canary)
    edit_json("generation_config.json", lambda config: config.update(custom_generate=str(at)))(at, canary)


def only_pickled(write, name="pytorch_model.bin"):
    return lambda at, canary: ((at / "model.safetensors").unlink(), write(at / name, canary))


def bring_index(at, canary):
    (at / "model.safetensors").unlink()
    zipped(at.parent / "outside.bin", canary)
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "../outside.bin"}}
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        (at / name).write_text(json.dumps(index))


def bring_adapter(at, canary):
    (at / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(at)}))
    zipped(at / "adapter_model.bin", canary)


KERNELS = {"_attn_implementation": "evil/kernel", "_attn_implementation_internal": "evil/kernel", "use_kernels": True}
MODELS = {
    "pytorch_model.bin of torch.save": only_pickled(zipped),
    "pytorch_model.bin, a pickle": only_pickled(pickled),
    "model.safetensors of torch.save": only_pickled(zipped, "model.safetensors"),
    "model.safetensors, a pickle": only_pickled(pickled, "model.safetensors"),
    "an index that leads outside": bring_index,
    "pickles beside the weights": put_beside,
    "an adapter": bring_adapter,
    "code of its own": bring_code,
    "code that it needs": bring_unknown_code,
    "its own generate": bring_generate,
    "a chat template": lambda at, canary: (at / "chat_template.jinja").write_text(TEMPLATE.format(canary=canary)),
    "tokenizer.json, a pickle": lambda at, canary: pickled(at / "tokenizer.json", canary),
    "config.json, a pickle": lambda at, canary: pickled(at / "config.json", canary),
    "kernels of the hub": edit_json("config.json", lambda config: config.update(KERNELS)),
}


def use_model(path, directory, trust_remote_code=False):
    """All that a recipe does with a model's directory. Returns the line with which it is refused, or None."""
    chats = directory / "chats.jsonl"
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello, world"}]
    chats.write_text(json.dumps({"messages": chat}) + "\n")
    try:
        config = load_config(str(path), trust_remote_code)
        tokenizer = load_tokenizer(str(path), trust_remote_code)
        model = build_model(config, str(path), trust_remote_code)
        model.generate(torch.ones(1, 2, dtype=torch.long), max_new_tokens=2)
        tokenize(Source(files=(str(chats),)), tokenizer, 64)
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", [*MODELS, None])
def test_nothing_in_a_models_directory_is_executed(name, model_dir, tmp_path):
    """It loads without what it brings, or is refused in one line."""
    shutil.copytree(model_dir, tmp_path / "model")
    if name is not None:
        MODELS[name](tmp_path / "model", tmp_path / "canary")
    line = use_model(tmp_path / "model", tmp_path)
    assert line is None or "\n" not in line
    assert not (tmp_path / "canary").exists(), line


def test_no_data_set_is_executed(tmp_path):
    """A loading script, and a column of Parquet whose type is a pickle."""
    folder, canary = tmp_path / "folder", tmp_path / "canary"
    folder.mkdir()
    python(folder / "folder.py", canary)
    kind = {"name": b"arrow.py_extension_type", "metadata": pickle.dumps(Payload(canary))}
    kind = {f"ARROW:extension:{name}": value for name, value in kind.items()}
    schema = pa.schema([pa.field("text", pa.string(), metadata=kind)])
    pa.parquet.write_table(pa.table([["some text"] * 9], schema=schema), tmp_path / "train.parquet")
    for source in (Source(dataset_name=str(folder)), Source(files=(str(tmp_path / "train.parquet"),))):
        with contextlib.suppress(UserError, ValueError):
            list(open_source(source).rows(("text",), False))
    assert not canary.exists()


def test_each_payload_runs_where_it_is_executed(tmp_path, model_dir, monkeypatch):
    """The control of all tests above."""
    import jinja2
    from transformers import dynamic_module_utils

    def fires(action):
        canary = tmp_path / "canary"
        with contextlib.suppress(Exception):
            action(canary)
        assert canary.exists()
        canary.rmdir() if canary.is_dir() else canary.unlink()

    file = tmp_path / "payload"
    fires(lambda canary: (pickled(file, canary), pickle.loads(file.read_bytes())))
    fires(lambda canary: (zipped(file, canary), torch.load(file, weights_only=False)))
    fires(lambda canary: jinja2.Environment().from_string(TEMPLATE.format(canary=canary)).render(messages=[]))
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for number, name in enumerate(("code of its own", "code that it needs", "its own generate")):
        path = shutil.copytree(model_dir, tmp_path / f"model{number}")

        def run_it(canary, name=name, path=path):
            MODELS[name](path, canary)
            use_model(path, tmp_path, trust_remote_code=True)

        fires(run_it)


# --- secrets


def token(letter):
    return "hf_" + f"{letter}1{letter}2" * 9


IN_ENVIRONMENT = {
    "HF_TOKEN": token("E"),
    "WANDB_API_KEY": "0123abcd" * 5,
    "COMET_API_KEY": "canary-of-comet",
    "NEPTUNE_API_TOKEN": "canary-of-neptune",
    "AZURE_DEVOPS_EXT_PAT": "canary-of-pat",
    "REGISTRY_AUTH": "canary-of-auth",
    "DB_PWD": "canary1",  # shorter than 8
    "MY_TOKEN_FILE_CONTENT": "canary-of-token/with+signs",
    "CLIENT_SECRET_VALUE": "canary-of-secret",
    "PASSWORD_OF_ADMIN": "canary-of-password",
    "SIGNING_KEY": "canary-of-key",
    "HF_ENDPOINT": "https://canary-user:canary-word@127.0.0.1:9",
    "http_proxy": "http://canary-user:canary-word@127.0.0.1:9",
    "NCCL_DEBUG_FILE": f"{token('N')}.log",
    # Ordinary values of variables that are named as secrets.
    "USE_TOKEN": "true",
    "HAS_KEY": "1",
    "CACHE_KEY": "cpu",
}
CANARIES = ["canary", "0123abcd", *(token(letter) for letter in "ENFCY")]
# Texts of errors, messages and settings.
IN_TEXTS = [
    *(f"https://host/x?sv=1&{name}=canary&y=2" for name in ("sig", "token", "X-Amz-Signature", "api_key", "code")),
    *(f"https://host/x?{name}=canary" for name in ("X-Amz-Credential", "X-Amz-Security-Token", "X-Goog-Signature")),
    *(f"{scheme}://me:canary@host/x" for scheme in ("https", "s3", "postgresql", "git+ssh", "redis")),
    *("https://canary@host/x", "https:/me:canary@host/x", "proxy http://u:can%40canary@host:80 failed"),
    *(f"header Authorization: {kind} canary" for kind in ("Bearer", "Basic", "Token")),
    *("sent Bearer canary", "{'Authorization': 'Bearer canary'}", "X-Api-Key: canary", "PRIVATE-TOKEN: canary"),
    *("AccountName=x;AccountKey=canary==;EndpointSuffix=y", "SharedAccessSignature=canary", "Server=x;Pwd=canary;"),
    *("aws_secret_access_key = canary", "password: canary", "client_secret='canary'", '{"hf_token": "canary"}'),
    *("{'db_password': 'canary with blanks'}", "--hf_token canary", "--api_key=canary", "['x', '--token', 'canary']"),
    *("HF_TOKEN=canary python x.py", "-----BEGIN RSA PRIVATE KEY-----\ncanary\n-----END RSA PRIVATE KEY-----"),
    *("eyJcanary0.eyJcanary0.canary", "glpat-canary" + "x" * 20, "sk-proj-canary" + "x" * 20, "AIzacanary" + "x" * 30),
    *("xoxb-1234567890-canary", "https://hooks.slack.com/services/T0/B0/canary", "npm_canary" + "x" * 30),
    *("x/canary-of-secret/model", "of canary-of-token%2Fwith%2Bsigns", "a: canary1."),  # of variables
]


def found_canaries(directory, *outputs):
    """Which of the secrets stand in a name or in the bytes of a file below the directory, or in an output."""
    places = {"output": "".join(outputs).encode()}
    for path in directory.rglob("*"):
        places[str(path)] = str(path.relative_to(directory)).encode() + (path.read_bytes() if path.is_file() else b"")
    return {canary for canary in CANARIES for content in places.values() if canary.encode() in content}


def test_no_secret_is_written_or_printed(functions_file, model_dir, tmp_path):
    """In flags, environment and config file; a run with a checkpoint and a tracker, then a dry run of it.

    Control: what is shown in the place of the secrets is in each file and output that had them.
    """
    column, text = token("C"), tmp_path / f"{token('F')}.jsonl"
    rows = [json.loads(line)["text"] for line in functions_file.read_text().splitlines()]
    write_jsonl(text, [{column: row} for row in rows])
    config, out = tmp_path / "config.yaml", tmp_path / "run"
    config.write_text((ROOT / "accelerate_configs/cpu.yaml").read_text() + f"tpu_env: [HF_TOKEN={token('Y')}]\n")
    base = shutil.copytree(model_dir, tmp_path / "elsewhere" / "canary-of-secret")
    given = flags(text, base, out, "--text_column", column, "--num_updates", 2, "--report_to", "tensorboard")
    runs = [(given, {}), ([*given, "--overwrite", "--dry_run"], {})]
    result = run_specs("lm", runs, tmp_path, config, **IN_ENVIRONMENT)
    assert "--text_column" in result.stdout and "1 process on cpu" in result.stdout, result.stderr
    assert (out / "checkpoints/update-000002/manifest.json").is_file() and list(out.rglob("events.out.tfevents*"))
    assert found_canaries(out, result.stdout, result.stderr) == set()
    files = [out / "run.json", out / "model/README.md", *out.rglob("hparams.yml")]
    hidden = [result.stdout, *(path.read_text() for path in files)]
    assert len(hidden) == 4 and all(HIDDEN in content for content in hidden)


def test_a_line_of_metrics_looks_through_the_environment_once(monkeypatch):
    """Rank 0 writes one at each update. Control: two lines look twice."""
    looks = []

    class Environment(dict):
        def items(self):
            looks.append(self)
            return super().items()

    monkeypatch.setattr(os, "environ", Environment(os.environ))
    for lines in (1, 2):
        looks.clear()
        for update in range(lines):
            to_json_line({"update": update, "sample_digest": "a", "validation_loss/a": 2.0, "notes": ["a", "b"]})
        assert len(looks) == lines


def test_what_leaves_a_process_has_no_secret_and_no_control_character(tmp_path, monkeypatch, capfd):
    """By all streams, loggers and writers of files. Control: every text has a secret or a control character."""
    for name, value in IN_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert len(IN_TEXTS) >= 40 and all("canary" in text for text in IN_TEXTS)
    harmful = ["a\33[2Jb", "a\rb", "a\x9b1mb", "a\u202eb", "a\x00b", "a\x07b", "a\ud800b"]
    texts = [*IN_TEXTS, *harmful, "true 1 cpu"]
    logger, handler = logging.getLogger("tests.of.output"), logging.StreamHandler()
    logger.addHandler(handler)
    logger.propagate = False  # else pytest captures harmful texts, which it cannot send to its main process
    with monkeypatch.context() as patch:
        for name in ("stdout", "stderr"):
            patch.setattr(sys, name, getattr(sys, name))  # which the block restores
        guard_output()
        for text in texts:
            print(text)
            print(UserError(text), file=sys.stderr)
            logger.error("%s", text)
            failures.print_errors([text])
        try:
            raise ValueError("\n".join(IN_TEXTS))
        except ValueError:
            traceback.print_exc()
        for kept in ("\r 5%|", "\n\n", "\33[A\33[A", "\r"):  # of progress bars
            sys.stderr.write(kept)
        sys.stderr.write("\33[1m\33[34mwandb\33[0m: done")
        sys.stdout.flush()
        sys.stderr.flush()
    logger.removeHandler(handler)
    outputs = capfd.readouterr()
    printed = outputs.out + outputs.err
    moves = "\r 5%|\n\n\33[A\33[A\rwandb: done"
    assert printed.endswith(moves)
    printed = printed.removesuffix(moves)
    assert printed.count("true 1 cpu\n") == 4 and len(printed) > 4 * len(texts)
    write_run(tmp_path, {"status": "x", "arguments": dict(enumerate(texts)), "texts": texts, **{t: t for t in texts}})
    (tmp_path / "line").write_text(to_json_line({text: text for text in IN_TEXTS}))
    left = [text for text in printed.splitlines() if "canary" in text]
    assert not left and not found_canaries(tmp_path, printed)
    assert all(character.isprintable() or character in "\n\t" for character in printed)
    assert "a\\x1b[2Jb" in printed and "a\\u202eb" in printed and "\\ud800" in printed


def test_an_error_shows_no_secret(tmp_path):
    given = ["--dataset_name", "https://me:canary@host/name?token=canary", "--output_dir", tmp_path / "run"]
    # In a Python of its own: the hub's library reads the variables when it is imported.
    result = run([BIN / "python", "-B", "recipes/lm.py", *given], **IN_ENVIRONMENT)
    assert result.returncode == 2 and result.stderr.startswith("error: "), result.stderr
    assert "//(not shown)@host/name?token=(not shown)" in result.stderr
    assert not found_canaries(tmp_path, result.stdout, result.stderr)


def test_only_secrets_are_taken_out():
    for text in (
        "--num_updates 10 --micro_batch_tokens 1024: does not hold the longest sample of 256 tokens",
        "https://huggingface.co/docs/accelerate, http://127.0.0.1:29500/x, me@host, C:/text, runs/hf_transfer",
        "the tokenizer has 389 tokens; set eos_token in its tokenizer_config.json; pad_token is None",
        "eos_token='</s>', sorted(key=len), HF_TOKEN: not set; set it",
        "--experts_per_token cannot change",  # it ends as the name of a secret does
    ):
        assert redact(text) == text
    kept = {"tokens": 3, "nested": {"model": ["a", 1.5, None]}, "token_id": 7, "experts_per_token": 2}
    secrets = {"api_key": ["a", "b"], "nested2": {"token": "y"}, "hf_token": "short"}
    hidden = {"api_key": HIDDEN, "nested2": {"token": HIDDEN}, "hf_token": HIDDEN}
    assert redact(kept | secrets) == kept | hidden and HIDDEN == "(not shown)"
    text = "https://me:p@ss/word@host/path and ghp_" + "a" * 36
    assert redact(text) == f"https://{HIDDEN}@host/path and {HIDDEN}"
    text = "dataset https://host/x?token=abc: is not there, nor HF_TOKEN=abc: it is not"
    assert redact(text) == text.replace("abc", HIDDEN)  # what follows a name in a message stays
    assert redact("--hf_token abc") == f"--hf_token {HIDDEN}"
    assert redact(["--hf_token", "abc", "--experts_per_token", "2"])[1::2] == [HIDDEN, "2"]
    for text in ("token=abc", "https://u:abc@h", '{"api_key": "abc"}', "Bearer abc", "--hf_token abc", "password: abc"):
        assert redact(redact(text)) == redact(text) != text
    assert redact("--api_key abc, HF_TOKEN=abc, x?access_token=abc&y=1").count("abc") == 0
