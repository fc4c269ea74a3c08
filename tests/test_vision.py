"""The image-classification recipe, run as a user runs it, and the data that it refuses."""

import functools
import hashlib
import importlib.util
import itertools
import json
import math
import random
import re
import shutil
import weakref
from collections import Counter
from dataclasses import replace

import datasets
import numpy as np
import pytest
import torch
from conftest import (
    assert_mistake,
    assert_same_update,
    launch,
    read_metrics,
    relative_difference,
    results_of,
    run_in_float64,
    run_recipe_alone,
    run_specs,
)
from PIL import Image, ImageOps
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline

from common.checkpoint.format import hash_of
from common.errors import UserError
from common.tasks.vision import decoded_images, image_files, images
from common.tasks.vision.image_models import ConvNet, ConvNetConfig
from recipes import vision

CLASSES = ("one", "seven", "zero")
recipe = functools.partial(run_recipe_alone, "vision.py", CUDA_VISIBLE_DEVICES="")


def write_folder(directory, digits, count, first=0):
    """Images of 8 x 8 of the digits 1, 7 and 0, in one folder a class."""
    data = load_digits()
    for name, digit in zip(CLASSES, digits, strict=True):
        (directory / name).mkdir(parents=True)
        for number, pixels in enumerate(data.images[data.target == digit][first : first + count]):
            Image.fromarray((pixels * 15).astype(np.uint8)).save(directory / name / f"{number:03}.png")
    return directory


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """42 images to train on (global batches of 16, 16 and 10) and 21 held out (16 and 5), in three classes."""
    root = tmp_path_factory.mktemp("images")
    write_folder(root / "train", (1, 7, 0), 14)
    write_folder(root / "validation", (1, 7, 0), 7, first=14)
    return root


@pytest.fixture(scope="module")
def convnet_dir(tmp_path_factory, data):
    """A ConvNet for them without dropout, as the recipe saves it."""
    path = tmp_path_factory.mktemp("convnet")
    labels = dict(enumerate(CLASSES))
    config = ConvNetConfig(image_size=(8, 8), hidden_size=16, dropout=0.0, id2label=labels)
    torch.manual_seed(0)
    ConvNet(config).save_pretrained(path)
    images.preprocess(image_files.folder(data / "train")).save_pretrained(path)
    return path


def flags(data, out, *more):
    base = ["--train_dir", data / "train", "--validation_dir", data / "validation", "--output_dir", out]
    base += ["--global_batch_size", 16, "--num_updates", 4, "--warmup_updates", 0, "--save_every", 0]
    return [str(part) for part in [*base, *more]]


MODELS = {"group": ["--model_config", "resnet"], "batch": ["--model_config", "resnet", "--norm", "batch"]}
CUTS = {1: (16, 8, 2), 2: (8, 4, 1)}  # with 8 on two processes, one has nothing left in the short global batch


@pytest.fixture(scope="module")
def float64_runs(data, convnet_dir, tmp_path_factory):
    """Each model and cut, by "model-processes-micro_batch", and the mean of means."""
    out, cuts = tmp_path_factory.mktemp("float64"), {}
    models = MODELS | {"convnet": ["--model_name_or_path", convnet_dir, "--learning_rate", 1e-3]}
    for processes, sizes in CUTS.items():
        for model, own in models.items():
            for size in sizes if model == "group" else sizes[:2]:
                given = flags(data, out, *own, "--micro_batch_size", size)
                cuts[f"{model}-{processes}-{size}"] = (processes, given, {})
    given = flags(data, out, *models["convnet"], "--micro_batch_size", 4)
    return run_in_float64("vision", cuts | {"means": (1, given, {"mean_of_means": 1})}, out)


def test_the_update_is_the_same_however_the_global_batch_is_cut(float64_runs):
    """Law 1, with augmentation, a short global batch and a rank without an image. Group norm and no norm are exact.

    Control: of a mean of means, images of the short global batch's short micro-batch would count more.
    """
    for model, number in (("group", 6), ("convnet", 4)):
        first, *others = [name for name in float64_runs if name.startswith(model)]
        assert len(others) == number - 1
        assert_same_update(float64_runs, first, *others)
    losses = [float64_runs[name][1][-1]["loss"] for name in ("means", "convnet-1-16")]  # after the short global batch
    assert abs(losses[0] / losses[1] - 1) > 1e-3


def test_batch_norm_makes_another_update_of_another_cut(float64_runs):
    """What the recipe warns of: by accumulation, and by the number of processes; the same parts are the same update."""
    for name in ("batch-1-8", "batch-2-8"):
        assert relative_difference(float64_runs[name][0], float64_runs["batch-1-16"][0]) > 1e-3
    assert_same_update(float64_runs, "batch-1-8", "batch-2-8")  # two parts of eight in both
    assert [line["target_tokens"] for line in float64_runs["batch-1-16"][1]] == [16] * 4  # no short global batch


def test_batch_norms_statistics_are_resumed(data, tmp_path):
    """tests/test_resume.py resumes the model without them in every mode."""
    more = [*MODELS["batch"], "--save_every", 2, "--eval_every", 1, "--learning_rate", 1e-2]
    copies = [str(tmp_path / "whole"), str(tmp_path / "resumed"), 2]
    runs = [
        (flags(data, tmp_path / "whole", *more), {}),
        (flags(data, tmp_path / "resumed", *more, "--resume"), {"copy_run": copies}),
    ]
    assert "after update 2" in run_specs("vision", runs, tmp_path).stdout
    lines, weights = (
        [read(tmp_path / name) for name in ("whole", "resumed")]
        for read in (read_metrics, lambda out: load_file(out / "model/model.safetensors"))
    )
    for field in ("loss", "validation_loss", "accuracy"):
        assert [line[field] for line in lines[0]] == [line[field] for line in lines[1]]
    assert "resnet.embedder.embedder.normalization.running_mean" in weights[0]
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())


def measure(output_dir, directory, classes=CLASSES):
    """Loss and accuracy of a saved model, by its saved preprocessing, image by image."""
    model = AutoModelForImageClassification.from_pretrained(output_dir / "model").eval()
    processor = AutoImageProcessor.from_pretrained(output_dir / "model")
    losses, hits = [], []
    for label, name in enumerate(classes):
        for path in sorted((directory / name).iterdir()):
            with torch.no_grad():
                logits = model(**processor(Image.open(path), return_tensors="pt")).logits
            losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor([label])).item())
            hits.append(logits.argmax().item() == label)
    assert model.config.id2label == dict(enumerate(classes))
    return np.mean(losses), np.mean(hits)


def test_the_figures_are_those_of_the_saved_model(data, tmp_path):
    """Held-out loss and accuracy, computed again from `model/` with transformers' own classes of preprocessing."""
    out = tmp_path / "run"
    printed = launch(*flags(data, out, *MODELS["group"]), script="recipes/vision.py").stdout
    results = results_of(out)
    loss, accuracy = measure(out, data / "validation")
    assert results["validation_loss"] == pytest.approx(loss, rel=1e-5)
    assert results["accuracy"] == accuracy
    assert f"held-out accuracy {accuracy:.2%} of 21 images; always 'one': 33.33%" in printed
    assert re.search(r"trained in [\d.]+ s, [\d,]+ images/s \(load imbalance", printed)  # images have no padding
    assert Image.open(out / "confusion.png").width > 100
    assert "confusion" not in results


def test_a_pipeline_predicts_what_the_evaluation_did(data, convnet_dir, tmp_path):
    """Of gray and of coloured images, scaled too, in each kind of model; all of them get three channels there."""
    for path in [*data.glob("*/*/*.png")]:
        colour = tmp_path / "colour" / path.relative_to(data)
        colour.parent.mkdir(parents=True, exist_ok=True)
        gray = Image.open(path)
        Image.merge("RGB", (gray, gray.rotate(90), gray.point(lambda value: 255 - value))).save(colour)
    folders, specs = {"gray": data, "colour": tmp_path / "colour"}, []
    for colours, folder in folders.items():
        for model in vision.MODEL_CONFIGS:
            own = ["--model_config", model, "--image_size", 12 if model == "resnet" else 8, "--learning_rate", 1e-2]
            specs.append((flags(folder, tmp_path / f"{colours}-{model}", *own), {}))
    own = ["--model_name_or_path", convnet_dir]
    specs.append((flags(data, tmp_path / "gray-pretrained", *own), {}))
    printed = run_specs("vision", specs, tmp_path).stdout
    assert printed.count("needs `from common.tasks.vision import image_models`") == 5  # all but the ViTs
    for colours, folder in folders.items():
        for model in (*vision.MODEL_CONFIGS, *(["pretrained"] if colours == "gray" else [])):
            out = tmp_path / f"{colours}-{model}"
            classify = pipeline("image-classification", model=str(out / "model"), device="cpu")
            losses, hits = [], 0
            for path in sorted((folder / "validation").glob("*/*.png")):
                answers = classify(str(path), top_k=None)
                losses.append(-math.log(next(one["score"] for one in answers if one["label"] == path.parent.name)))
                hits += answers[0]["label"] == path.parent.name
            results = results_of(out)
            assert results["validation_loss"] == pytest.approx(np.mean(losses), rel=1e-4), out.name
            assert results["accuracy"] == hits / len(losses), out.name
    gray = ConvNet.from_pretrained(tmp_path / "gray-convnet/model").eval()
    pixels = torch.rand(2, 3, 8, 8)  # of colours it sees what PIL would make gray
    assert gray.config.num_channels == 1
    luma = (pixels * torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(1, keepdim=True)
    assert torch.allclose(gray(pixels).logits, gray(luma).logits, atol=1e-5)


def test_sharded_processes_evaluate_with_the_statistics_that_are_saved(data, tmp_path):
    """FSDP does not send batch norm's statistics around. Control: without the recipe's broadcast the figures differ."""
    more = [*MODELS["batch"], "--learning_rate", 1e-2]
    changes = {"run": {}, "own": {"no_broadcast": 1}}
    runs = [(flags(data, tmp_path / name, *more), change) for name, change in changes.items()]
    result = run_specs("vision", runs, tmp_path, "fsdp2", "--mixed_precision", "no")
    assert "WARNING: a global batch is split into 2 parts" in result.stdout

    def figures(name):
        return results_of(tmp_path / name)["validation_loss"], measure(tmp_path / name, data / "validation")[0]

    assert figures("run")[0] == pytest.approx(figures("run")[1], rel=1e-4)
    assert abs(figures("own")[0] / figures("own")[1] - 1) > 1e-3


@pytest.mark.parametrize("names, is_new", [(CLASSES, False), (CLASSES[::-1], False), (("a", "b", "c"), True)])
def test_a_head_for_other_classes_is_replaced(names, is_new, data, convnet_dir, tmp_path):
    """One for the same names is kept, in whichever order it has them: the weights and each label's number."""
    shutil.copytree(convnet_dir, tmp_path / "model")
    settings = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(settings | {"id2label": dict(enumerate(names))}))
    more = ["--model_name_or_path", tmp_path / "model", "--num_updates", 1, "--learning_rate", 1e-30]
    result = recipe(*flags(data, tmp_path / "run", *more))
    assert result.returncode == 0, result.stderr
    assert ("new head  classifier.bias, classifier.weight start at random" in result.stdout) == is_new
    before, after = (load_file(path / "model/model.safetensors") for path in (tmp_path, tmp_path / "run"))
    assert torch.equal(before["features.0.weight"], after["features.0.weight"])
    assert torch.equal(before["classifier.weight"], after["classifier.weight"]) != is_new
    if not is_new:
        found = results_of(tmp_path / "run")["validation_loss"]
        assert found == pytest.approx(measure(tmp_path / "run", data / "validation", names)[0], rel=1e-5)


def test_augmentation_depends_on_seed_epoch_and_image_only(data):
    """Not on what was drawn before, in which order, or in which process; and it draws nothing from dropout's stream."""
    found = image_files.folder(data / "train")
    preprocessing = images.preprocess(found)
    samples = images.ImageSamples(found, preprocessing, ("shift", "flip"), seed=3)
    before = torch.get_rng_state()
    first = [samples.of_epoch(2)[i][0] for i in range(42)]
    assert torch.equal(before, torch.get_rng_state())
    again = [samples.of_epoch(2)[i][0] for i in reversed(range(42))][::-1]
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    others = [images.ImageSamples(found, preprocessing, ("shift", "flip"), seed=4).of_epoch(2), samples.of_epoch(3)]
    for other in [*others, images.ImageSamples(found, preprocessing)]:
        assert sum((other[i][0] != first[i]).any() for i in range(42)) > 20


def test_an_image_is_decoded_once_and_augmented_as_by_pillow(tmp_path, monkeypatch):
    """Of gray and colour images of several sizes, for models that take colours or gray images."""
    generator, names = np.random.default_rng(0), ("flip", "shift")
    for number in range(9):
        (tmp_path / f"{number % 2}").mkdir(exist_ok=True)
        pixels = generator.integers(0, 256, (20 + number, 24) + ((3,) if number % 3 else ()), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number % 2}/{number}.png")
    found, opened = image_files.folder(tmp_path), []
    monkeypatch.setattr(images, "open_image", lambda *args: opened.append(args[1]) or image_files.open_image(*args))
    colours = images.preprocess(found, (16, 18))
    for preprocessing in (colours, replace(colours, mean=colours.mean[:1], std=colours.std[:1])):
        channels, samples = len(preprocessing.mean), images.ImageSamples(found, preprocessing, names, seed=3)
        opened.clear()
        for epoch, index in itertools.product(range(3), range(9)):
            image = images.scaled(image_files.open_image(found, index), 16, 18)
            digest = hashlib.blake2b(f"3/{epoch}/{index}".encode(), digest_size=8).digest()
            draws = random.Random(int.from_bytes(digest, "little") >> 1)
            image = ImageOps.mirror(image) if draws.random() < 0.5 else image
            down, right = draws.randint(-2, 2), draws.randint(-2, 2)
            rows, columns = np.clip(np.arange(16) - down, 0, 15), np.clip(np.arange(18) - right, 0, 17)
            expected = images.to_array(Image.fromarray(np.asarray(image)[rows][:, columns]), 16, 18, channels)
            np.testing.assert_array_equal(samples.of_epoch(epoch)[index][0], expected)
        # A model that takes gray images keeps only these.
        assert Counter(opened) == {index: 1 if channels == 3 or index % 3 == 0 else 3 for index in range(9)}
    size = 9 * 3 * 16 * 18
    for limit, times in ((size, 1), (size - 1, 2)):
        monkeypatch.setattr(decoded_images, "KEPT_BYTES", limit)
        samples = images.ImageSamples(found, colours)
        opened.clear()
        assert [len(samples[0]), len(samples[0])] == [2, 2]
        assert opened == [0] * times


def test_the_torchvision_augmentations_are_a_function_of_the_image_too(data):
    reason = "needs torchvision, of which the package index has no wheel for a CPU build of torch"
    pytest.importorskip("torchvision", reason=reason, exc_type=ImportError)
    found = image_files.folder(data / "train")
    samples = images.ImageSamples(found, images.preprocess(found), ("crop", "rand"), seed=3)
    first = [samples.of_epoch(1)[i][0] for i in range(10)]
    assert all((samples.of_epoch(1)[i][0] == first[i]).all() for i in reversed(range(10)))
    assert any((samples.of_epoch(2)[i][0] != first[i]).any() for i in range(10))


def test_pixels_are_normalised_to_mean_zero_and_deviation_one(data):
    found = image_files.folder(data / "train")
    preprocessing = images.preprocess(found)
    samples = images.ImageSamples(found, preprocessing)
    pixels = images.collate_images([samples[i] for i in range(42)], preprocessing)["pixel_values"]
    assert pixels.shape == (42, 1, 8, 8)
    assert abs(pixels.mean()) < 1e-5 and abs(pixels.std(correction=0) - 1) < 1e-5


def test_large_images_are_looked_at_one_at_a_time_and_small(tmp_path, monkeypatch):
    """The statistics are nearly those of whole images."""
    generator, opened, sizes = np.random.default_rng(0), [], []
    for number in range(6):
        coarse = generator.integers(0, 256, (6, 8, 3), np.uint8)
        path = tmp_path / f"train/{'ab'[number % 2]}/{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        exif = Image.Exif()
        exif[274] = 6 if number == 5 else 1
        Image.fromarray(coarse).resize((640, 480), Image.Resampling.BICUBIC).save(path, quality=95, exif=exif)
    open_image = images.open_image

    def open_counted(*args):
        assert sum(one() is not None for one in opened) <= 1  # the one before this
        image = open_image(*args)
        opened.append(weakref.ref(image))
        sizes.append(image.size)
        return image

    monkeypatch.setattr(images, "open_image", open_counted)
    found = image_files.folder(tmp_path / "train")
    small = images.preprocess(found, (30, 30))
    assert set(sizes) == {(80, 60), (60, 80)}
    monkeypatch.setattr(images, "open_image", lambda images, number, *_: open_image(images, number))
    whole = images.preprocess(found, (30, 30))
    np.testing.assert_allclose((small.mean, small.std), (whole.mean, whole.std), rtol=1e-2)
    assert images.ImageSamples(found, small)[0][0].shape == (3, 30, 30)


def test_gray_images_among_others_have_the_statistics_of_three_equal_channels(tmp_path):
    for name, image in {"a/1": Image.new("L", (4, 4), 51), "b/2": Image.new("RGB", (4, 4), (102, 0, 255))}.items():
        (tmp_path / name).parent.mkdir()
        image.save(tmp_path / f"{name}.png")
    found = image_files.folder(tmp_path)
    np.testing.assert_allclose(images.preprocess(found).mean, (0.3, 0.1, 0.6))
    with pytest.raises(UserError, match="has colours, but the model takes gray images"):
        images.preprocess(found, channels=1)


def test_images_of_every_mode_are_read(tmp_path):
    """Gray, colours, a palette, transparency (which lies on white), an EXIF turn; 16 bits are refused."""
    red = Image.new("RGB", (4, 2), "red")
    red.save(tmp_path / "rgb.png")
    red.convert("P").save(tmp_path / "palette.png")
    Image.new("RGBA", (4, 2), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    Image.new("L", (4, 2), 128).save(tmp_path / "gray.png")
    exif = Image.Exif()
    exif[274] = 6
    red.save(tmp_path / "turned.jpg", exif=exif)
    Image.fromarray(np.full((2, 4), 4000, np.uint16)).save(tmp_path / "deep.png")
    names = ("rgb.png", "palette.png", "clear.png", "gray.png", "turned.jpg", "deep.png")
    found = image_files.Images(
        "d", "", ("a",), np.zeros(6, np.int64), lambda i: tmp_path / names[i], lambda i: names[i]
    )
    opened = [image_files.open_image(found, i) for i in range(5)]
    assert [image.mode for image in opened] == ["RGB", "RGB", "RGB", "L", "RGB"]
    assert [image.getpixel((0, 0)) for image in opened[:4]] == [(255, 0, 0), (255, 0, 0), (255, 255, 255), 128]
    assert opened[4].size == (2, 4)
    assert images.to_array(opened[3], 2, 4, 3).shape == (3, 2, 4)
    with pytest.raises(UserError, match="deep.png.*8 bits"):
        image_files.open_image(found, 5)


def test_a_saved_data_set_is_read(data, tmp_path):
    """What `save_to_disk` of `datasets` wrote: images and classes by their columns' kinds, test is held out."""
    parts = {}
    for split in ("train", "test"):
        found = image_files.folder(data / ("train" if split == "train" else "validation"))
        rows = {"img": [found.read(i) for i in range(len(found.labels))], "kind": found.labels.tolist()}
        features = datasets.Features(img=datasets.Image(), kind=datasets.ClassLabel(names=list(CLASSES)))
        parts[split] = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    name = str(tmp_path / "saved")
    assert image_files.held_out(name, None).name.endswith("[test]")
    parts["train"].save_to_disk(tmp_path / "one")
    assert image_files.held_out(str(tmp_path / "one"), None) is None
    assert (image_files.hub(str(tmp_path / "one"), None, "train").labels == parts["train"]["kind"]).all()
    train, expected = image_files.hub(name, None, "train"), image_files.folder(data / "train")
    assert train.classes == CLASSES and (train.labels == expected.labels).all()
    for i in (0, 41):
        assert image_files.open_image(train, i).tobytes() == image_files.open_image(expected, i).tobytes()
    assert train.unused == expected.unused == ""
    parts["train"].add_column("weight", [1.0] * len(train.labels)).save_to_disk(tmp_path / "weighted")
    assert image_files.hub(str(tmp_path / "weighted"), None, "train").unused == "columns not used: weight"
    shutil.copytree(data / "train", tmp_path / "folder")
    for other in ("metadata.csv", f"{CLASSES[0]}/notes.txt", ".hidden"):
        (tmp_path / "folder" / other).touch()
    unused = image_files.folder(str(tmp_path / "folder")).unused
    assert unused == f"files not used: metadata.csv, {CLASSES[0]}/notes.txt"
    with pytest.raises(UserError, match="no column nothing; there are: img, kind"):
        image_files.hub(name, None, "train", "nothing")


@pytest.mark.parametrize(
    "labels, kind, pattern",
    [
        ([0, None, 1], "class", "row 1: column label is null"),
        (["a", None, "b"], "string", "row 1: column label is null"),
        (
            [0.5, 1.5, 2.5],
            "float32",
            "column label has no classes.* pass a different --label_column; there are: image, la",
        ),
        ([0, 1, -1], "class", r"row 2: its label is hidden \(-1\)"),
    ],
)
def test_a_data_set_without_good_labels(labels, kind, pattern, tmp_path):
    """Of `test`, where all of them are hidden, nothing is held out."""
    feature = datasets.ClassLabel(names=["a", "b"]) if kind == "class" else datasets.Value(kind)
    features = datasets.Features(image=datasets.Image(), label=feature)
    rows = {"image": [Image.new("L", (8, 8))] * 3, "label": labels}
    parts = {"train": datasets.Dataset.from_dict(rows, features=features)}
    if -1 in labels:
        parts["test"] = parts["train"].select([2])
    name = str(tmp_path / "saved")
    datasets.DatasetDict(parts).save_to_disk(name)
    with pytest.raises(UserError, match=pattern):
        image_files.check_labels(image_files.hub(name, None, "train", "label"))
    with pytest.raises(UserError, match="column image has no classes"):
        image_files.hub(name, None, "train", "image")
    if -1 in labels:
        assert image_files.held_out(name, None) is None


def test_bad_data_is_named(data, tmp_path):
    """One line that says what, where and how to mend it; each is a UserError."""

    def refused(pattern, function, *args):
        with pytest.raises(UserError, match=pattern) as caught:
            function(*args)
        assert "\n" not in str(caught.value)

    good = image_files.folder(data / "train")
    refused("nowhere: no such directory", image_files.folder, str(tmp_path / "nowhere"))
    refused("has no subfolder", image_files.folder, str(data / "train/one"))
    broken = tmp_path / "broken"
    shutil.copytree(data / "train", broken)
    path = broken / "seven/003.png"
    path.write_bytes(path.read_bytes()[:-40])
    refused("seven/003.png: cannot be read as an image.*replace", images.preprocess, image_files.folder(str(broken)))
    path.write_text("no image")
    refused("seven/003.png: cannot be read as an image", images.preprocess, image_files.folder(str(broken)))
    Image.new("L", (9, 8)).save(path)
    refused(r"003.png of 9 x 8 and .* of 8 x 8; give --image_size", images.preprocess, image_files.folder(str(broken)))
    assert images.preprocess(image_files.folder(str(broken)), (16, 16)).height == 16
    shutil.rmtree(broken / "one")
    (broken / "one").mkdir()
    refused("one: the class has no image", image_files.folder, str(broken))
    for name in ("one", "zero"):
        shutil.rmtree(broken / name)
    refused("all images are of one class, seven", image_files.check_classes, image_files.folder(str(broken)), None)
    (broken / "seven").rename(broken / "nine")
    refused("class nine does not occur in", image_files.check_classes, good, image_files.folder(str(broken)))
    held_out = write_folder(tmp_path / "two", (1, 7, 0), 2)
    shutil.rmtree(held_out / "one")
    assert image_files.check_classes(good, image_files.folder(str(held_out))).labels.tolist() == [1, 1, 2, 2]


def test_flags_that_do_not_fit_are_refused_together(data, tmp_path):
    """All at once, nothing written."""
    more = ["--norm", "sync_batch", "--dataset_name", "mnist", "--augment", "rand", "none"]
    patterns = ["--augment rand none: none cannot be combined", "--train_dir and --dataset_name"]
    patterns += ["sync_batch: torch synchronises", "sync_batch: convnet has no batch norm"]
    if importlib.util.find_spec("torchvision") is None:
        patterns.append(r"--augment rand needs torchvision .*; pip install it")
    result = recipe(*flags(data, tmp_path / "run", *more))
    assert_mistake(result, *patterns, lines=len(patterns))
    result = recipe(*flags(data, tmp_path / "run", *MODELS["batch"], "--micro_batch_size", 1))
    assert_mistake(result, "--micro_batch_size 1: batch norm needs several images")
    assert not (tmp_path / "run").exists()


def test_a_model_that_does_not_fit_the_images(data, convnet_dir, tmp_path):
    """A ConvNet for images that make it huge, and one channel for colours; and images that no memory holds."""
    result = recipe(*flags(data, tmp_path / "run", "--image_size", 99999))
    assert_mistake(result, "--image_size 99999: an image may have 134,217,728 pixels; use at most 11585")
    result = recipe(*flags(data, tmp_path / "run", "--image_size", 512))
    assert_mistake(result, "images of 512 x 512 make 529 M parameters; use --model_config resnet")
    shutil.copytree(data / "train", tmp_path / "train")
    Image.new("RGB", (8, 8)).save(tmp_path / "train/one/000.png")
    more = ["--train_dir", tmp_path / "train", "--model_name_or_path", convnet_dir]
    result = recipe(*flags(data, tmp_path / "run", *more))
    assert_mistake(result, "one/000.png: has colours, but the model takes gray images")


def test_other_images_of_the_same_names_and_sizes_are_other_data(tmp_path):
    """A checkpoint whose manifest has names and sizes alone, as it was written once, is resumed."""
    random = np.random.default_rng(0)
    for number, name in itertools.product(range(4), ("a/x", "a/y", "b/x", "b/y")):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 255, (8, 8), np.uint8)
        Image.fromarray(pixels).save(tmp_path / name / f"{number}.bmp")
    given = ["--global_batch_size", 4, "--num_updates", 1, "--output_dir", tmp_path / "run", "--train_dir"]
    run = functools.partial(run_recipe_alone, "vision.py", *given, CUDA_VISIBLE_DEVICES="")
    assert run(tmp_path / "a").returncode == 0
    result = run(tmp_path / "b", "--resume")
    assert_mistake(result, "the training data differs: .*; pass the same files and --image_size, or")
    path = tmp_path / "run/checkpoints/update-000001/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["identity"]["dataset"] = manifest["identity"]["dataset"].partition("-")[0]
    path.write_text(json.dumps(manifest | {"sha256": hash_of(manifest)}))
    assert run(tmp_path / "a", "--resume").returncode == 0
