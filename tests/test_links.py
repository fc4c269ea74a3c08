"""A run writes only to its own directory and cache, whatever links or directories others have put there."""

import os

import pytest

from common.data.cache import cached
from common.errors import UserError
from common.files import lock_output_dir, open_new, open_to_append, replace_text, write_file
from common.report import curves
from common.report.records import write_run
from tools.compare.__main__ import write as write_report


def draw(path):
    (path.parent / "metrics.jsonl").write_text('{"update": 1, "loss": 1.0, "target_tokens": 3}\n')
    curves.draw(path.parent, "tokens")


# What writes a file, the file, and its temporary name.
WRITERS = {
    "run.json": (lambda path: write_run(path.parent, {"status": "x"}), "run.json.partial"),
    "README.md": (lambda path: replace_text(path, "x"), "README.md.partial"),
    "manifest.json": (lambda path: write_file(path, [b"x"]), "manifest.json"),
    "report.html": (lambda path: write_report(path, b"x"), "report.html.partial"),
    "curves.png": (draw, "curves.png.partial"),
    "trace.json": (lambda path: open_new(path).close(), "trace.json"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_link_is_replaced_and_never_followed(name, tmp_path):
    """Neither that of the file nor that of its temporary file. Control: Path.write_text follows it."""
    write, partial = WRITERS[name]
    victim, directory = tmp_path / "victim", tmp_path / "run"
    directory.mkdir()
    for planted in {name, partial}:
        victim.write_text("kept")
        (directory / planted).unlink(missing_ok=True)
        (directory / planted).symlink_to(victim)
        write(directory / name)
        assert victim.read_text() == "kept" and (directory / name).is_file() and not (directory / name).is_symlink()
    (directory / "control").symlink_to(victim)
    (directory / "control").write_text("changed")
    assert victim.read_text() == "changed"


def test_metrics_are_not_appended_to_what_a_link_names(tmp_path):
    (tmp_path / "victim").write_text("kept")
    (tmp_path / "metrics.jsonl").symlink_to("victim")
    with pytest.raises(OSError):
        open_to_append(tmp_path / "metrics.jsonl")
    with open_to_append(tmp_path / "victim") as file:  # the control
        file.write(" and more\n")
    assert (tmp_path / "victim").read_text() == "kept and more\n"


def test_a_directory_with_links_is_not_used_for_a_run(tmp_path):
    """Links are refused before its lock is taken. Control: without a link, it is; so is a link within a checkpoint."""
    (tmp_path / "victim").write_text("kept")
    names = [".lock", "run.json", "metrics.jsonl.partial", "curves.png", "checkpoints", "checkpoints/update-000001"]
    names += [
        "checkpoints/update-000002.partial",
        "model",
        "model/README.md",
        "profile/partial-x",
        "lm/a/b/hparams.yml",
    ]
    for number, name in enumerate([*names, "checkpoints/update-000001/x", None]):
        directory = tmp_path / str(number)
        directory.mkdir()
        if name is not None:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).symlink_to(tmp_path / "victim")
        if name in names:
            with pytest.raises(UserError, match=f"{directory / name}: is a link to .*/victim; remove it"):
                lock_output_dir(directory)
        else:
            lock_output_dir(directory)
    assert (tmp_path / "victim").read_text() == "kept"


def test_a_cache_of_a_different_user_is_not_used(tmp_path, monkeypatch):
    """Nor a directory in which every user can write. Control: their own one is used, and closed to others."""

    def use(parent):
        monkeypatch.setenv("XDG_CACHE_HOME", str(parent))
        return cached("kind", [], lambda directory: (directory / "x").write_text("x"))

    own = use(tmp_path / "own").parent
    assert own.stat().st_mode & 0o777 == 0o700
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/accelerate_recipes").symlink_to(own)
    assert use(tmp_path / "linked").is_dir()
    refused = {"writable": tmp_path / "writable/accelerate_recipes", "link": tmp_path / "link/accelerate_recipes"}
    refused["writable"].mkdir(parents=True)
    refused["writable"].chmod(0o777)
    (refused["writable"] / "kind-0.partial").symlink_to(own)
    refused["link"].parent.mkdir()
    refused["link"].symlink_to(refused["writable"])
    if os.geteuid() == 0:
        refused["other"] = tmp_path / "other/accelerate_recipes"
        refused["other"].mkdir(parents=True)
        os.chown(refused["other"], 65534, 65534)
    for directory in refused.values():
        before = sorted(directory.iterdir())
        with pytest.raises(
            UserError, match=r"belongs to user \d+, or every user can write to it\); set XDG_CACHE_HOME"
        ):
            use(directory.parent)
        assert sorted(directory.iterdir()) == before


@pytest.mark.parametrize("name", ["a$b$c", r"$\frac{$", "$x^$", "a\33[2J", "a\udcffb"])
def test_every_name_of_a_run_has_its_curves(name, tmp_path):
    """Control: as a formula, the second name stops matplotlib."""
    directory = tmp_path / name
    directory.mkdir()
    draw(directory / "curves.png")
    assert (directory / "curves.png").read_bytes().startswith(b"\x89PNG")
