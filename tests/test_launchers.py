"""The launchers for Kubernetes, SkyPilot and Docker: valid files, whose commands train on two nodes of this machine."""

import json
import re
import shutil
import subprocess

import pytest
import yaml
from conftest import ROOT, quick_python, read_metrics
from running import Run, free_port

SCHEMA = json.loads((ROOT / "tests/kubernetes.json").read_text())["types"]
TYPES = {"str": str, "int": int, "bool": bool, "datetime": str, "Dict": dict, "object": (str, int, dict)}
NO_GPU = {"CONFIG": "accelerate_configs/multi_cpu.yaml", "LAUNCH_FLAGS": "--mixed_precision no"}
SMALL = ["--num_updates", "2", "--sequence_length", "32", "--global_batch_size", "4", "--save_every", "2"]


def problems(value, kind, place="") -> list[str]:
    """What the schema rejects in a value: unknown fields, missing fields and other types."""
    if match := re.fullmatch(r"List\[(.*)\]", kind):
        if not isinstance(value, list):
            return [f"{place}: not a list"]
        return [line for n, item in enumerate(value) for line in problems(item, match[1], f"{place}[{n}]")]
    if match := re.fullmatch(r"Dict\[str, (.*)\]", kind):
        if not isinstance(value, dict):
            return [f"{place}: not a mapping"]
        return [line for key, item in value.items() for line in problems(item, match[1], f"{place}.{key}")]
    if kind not in SCHEMA:
        is_valid = isinstance(value, TYPES[kind]) and (kind == "bool" or not isinstance(value, bool))
        return [] if is_valid else [f"{place}: {value!r} is not of type {kind}"]
    if not isinstance(value, dict):
        return [f"{place}: not a mapping"]
    fields, required = SCHEMA[kind]["fields"], SCHEMA[kind]["required"]
    found = [f"{place}.{name}: unknown field" for name in value if name not in fields]
    found += [f"{place}.{name}: missing" for name in required if name not in value]
    known = [name for name in value if name in fields]
    return found + [line for name in known for line in problems(value[name], fields[name], f"{place}.{name}")]


def kubernetes():
    """The Service and the Job."""
    return list(yaml.safe_load_all((ROOT / "launchers/kubernetes.yaml").read_text()))


def test_the_job_and_its_service_are_valid():
    service, job = kubernetes()
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service") and problems(service, "V1Service") == []
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job") and problems(job, "V1Job") == []
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    variables = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
    assert spec["completions"] == spec["parallelism"] == int(variables["NODES"])
    gpus = pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus == variables["PROCESSES_PER_NODE"]
    # The pod with index 0 is NAME-0.SUBDOMAIN, and the Service of this name selects the pods of the job.
    name = job["metadata"]["name"]
    assert variables["MAIN_IP"] == f"{name}-0.{pod['subdomain']}" and service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == {v["name"] for v in pod["volumes"]}


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (["spec", "completionmode"], "Indexed", ".spec.completionmode: unknown field"),
        (["spec", "completions"], "2", ".spec.completions: '2' is not of type int"),
        (["spec", "template", "spec", "containers", 0, "env", 0], {"value": "2"}, "env[0].name: missing"),
        (["spec", "template", "spec", "containers", 0, "args"], "train", "args: not a list"),
        (["spec", "template", "spec", "volumes", 0, "persistentVolumeClaim"], {}, "claimName: missing"),
    ],
)
def test_an_invalid_job_is_rejected(path, value, problem):
    _, job = kubernetes()
    part = job
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    (line,) = problems(job, "V1Job")
    assert line.endswith(problem)


def on_kubernetes(out, rows):
    """The command and the variables of each pod. Kubernetes would replace $(NAME) if NAME were a variable."""
    container = kubernetes()[1]["spec"]["template"]["spec"]["containers"][0]
    script, name, *_ = container["args"]
    variables = {entry["name"]: entry.get("value", "secret-of-the-launch") for entry in container["env"]}
    assert "$$" not in script and not any(f"$({variable})" in script for variable in variables)
    variables |= NO_GPU | {"PROCESSES_PER_NODE": "1", "MAIN_IP": "127.0.0.1", "OUTPUT_DIR": str(out)}
    command = [*container["command"], script, name, "--train_file", str(rows), *SMALL]
    return [(command, variables | {"JOB_COMPLETION_INDEX": str(node)}) for node in (0, 1)]


def on_skypilot(out, rows):
    """The command and the variables of each machine, without GPUs."""
    task = yaml.safe_load((ROOT / "launchers/skypilot.yaml").read_text())
    variables = {name: str(value) for name, value in task["envs"].items()} | NO_GPU
    variables |= {"OUTPUT_DIR": str(out), "TRAIN_FILE": str(rows), "FLAGS": " ".join(SMALL)}
    variables |= {name: "secret-of-the-launch" for name in task["secrets"]}
    variables |= {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_NUM_NODES": str(task["num_nodes"])}
    variables |= {"SKYPILOT_NUM_GPUS_PER_NODE": "0"}
    return [(["bash", "-c", task["run"]], variables | {"SKYPILOT_NODE_RANK": str(node)}) for node in (0, 1)]


@pytest.mark.parametrize(("nodes", "starts"), [(on_kubernetes, 2), (on_skypilot, 1)])
def test_two_nodes_train_and_a_second_start_resumes(nodes, starts, functions_file, tmp_path):
    out = tmp_path / "run"
    for start in range(starts):
        port, directory = free_port(), tmp_path / str(start)
        directory.mkdir()
        with Run(directory) as run:
            for command, variables in nodes(out, functions_file):
                run.start(command, env=variables | {"PYTHON": quick_python(), "PORT": str(port)})
            assert run.wait(240) == [0, 0], run.output(0) + run.output(1)
            assert ("resuming from" in run.output(0)) == (start > 0)
        settings = json.loads((out / "run.json").read_text())
        assert (settings["world_size"], settings["status"]) == (2, "finished")
        assert len(read_metrics(out)) == 2


def test_services_that_start_together_get_different_ports():
    """A job fails if two of its services have one. Control: of 500 ports that the system chooses, some are equal."""
    assert len({free_port() for _ in range(500)}) == 500


def test_both_clouds_resume_alike():
    """A new run, a resumed run and a run that ended before its first checkpoint: by --resume auto, without own code."""
    for nodes in (on_kubernetes, on_skypilot):
        (script, _), *_ = nodes("out", "rows")
        assert re.findall(r"--(?:resume|overwrite)\b.{0,5}", script[2]) == ["--resume auto"]


def test_skypilot_accepts_the_task():
    """By its own library, without a network."""
    sky = pytest.importorskip("sky", reason="needs skypilot")
    task = sky.Task.from_yaml(str(ROOT / "launchers/skypilot.yaml"))
    assert task.num_nodes == 2 and task.run is not None and task.storage_mounts
    broken = yaml.safe_load((ROOT / "launchers/skypilot.yaml").read_text()) | {"nodes": 2}
    with pytest.raises(sky.exceptions.InvalidSkyPilotConfigError, match="num_nodes"):
        sky.Task.from_yaml_config(broken)


def instructions(text):
    """The instructions of a Dockerfile, each with its argument; JSON arguments are lists."""
    joined = re.sub(r"\\\n", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    pairs = [line.split(maxsplit=1) for line in joined.splitlines() if line]
    return [(name, json.loads(argument) if argument.startswith("[") else argument) for name, argument in pairs]


@pytest.mark.parametrize("is_touched", [True, False])
def test_the_image_holds_the_repository_and_installs_nothing_when_it_starts(is_touched, tmp_path):
    """What each instruction does, in a directory. Control: without `touch`, make would install the packages again."""
    image, is_run = tmp_path / "image", []
    image.mkdir()
    ignored = (ROOT / "launchers/Dockerfile.dockerignore").read_text().split()
    for name, argument in instructions((ROOT / "launchers/Dockerfile").read_text()):
        if name == "COPY" and argument == ". .":
            shutil.copytree(
                ROOT,
                image,
                ignore=shutil.ignore_patterns(*ignored, "benchmarks"),
                dirs_exist_ok=True,
                copy_function=shutil.copyfile,
            )  # as new as now
            assert not (image / ".git").exists()
        elif name == "COPY":
            for source in argument.split()[:-1]:
                shutil.copy(ROOT / source, image)
        elif name == "RUN" and argument == "make .venv/installed":
            assert (image / "requirements.txt").exists() and (image / "requirements.lock").exists()
            (image / ".venv").mkdir()
            (image / ".venv/installed").touch()
            is_run.append(argument)
        elif name == "RUN" and argument.startswith("touch ") and is_touched:
            subprocess.run(argument, shell=True, check=True, cwd=image)
        elif name == "CMD":
            command = [*argument, "--dry-run", "CONFIG=cpu"]
            result = subprocess.run(command, cwd=image, capture_output=True, text=True, check=True)
            assert ("pip install" not in result.stdout) == is_touched
            assert "accelerate launch --config_file accelerate_configs/cpu.yaml recipes/lm.py" in result.stdout
            is_run.append(argument)
    assert is_run == ["make .venv/installed", ["make", "train"]]
