"""Bad input to howvits.data, by kinds: every error is of a standard type, one sentence, names the culprit and gives the remedy."""
import gzip
import pickle
import random
import shutil
import socket

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

from howvits import data as howvits_data
from howvits.data import DATASETS, FASHION_FILES, MINI, ImageDataset, batches, load_dataset, make_mini, write_idx

MINI_NAME = "fashion_mnist_mini"
PARTS = [(split, kind) for split in ("train", "test") for kind in ("images", "labels")]


def fails(error, call, *words):
    "`call` raises `error` in one line that holds all the words."
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and message.endswith((".", "?")), message
    for word in words:
        assert str(word) in message, message


@pytest.fixture
def folder(tmp_path):
    "A copy of the mini set that a test may break."
    return shutil.copytree(MINI, tmp_path / "mini")


@pytest.fixture
def nothing_found(monkeypatch, tmp_path):
    "A machine without any data set; the folder is where downloads would go."
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.delenv("HOWVITS_DATA", raising=False)
    monkeypatch.setattr(howvits_data.platformdirs, "user_cache_path", lambda _: cache)
    search = howvits_data.data_folders
    monkeypatch.setattr(howvits_data, "data_folders",
                        lambda root=None: [place for place in search(root) if "Debian" not in place[1]])
    monkeypatch.setattr(howvits_data, "_said", set())
    return cache


# Names and numbers

@pytest.mark.parametrize(("arguments", "words"), [
    (dict(name="fashion-mnist"), ["fashion-mnist", "fashion_mnist"]),
    (dict(name="cifar"), ["cifar10", "cifar100"]),
    (dict(name="zzz"), ["imagenet"]),
    (dict(name=None), ["None"]),
    (dict(split="tset"), ["test"]),
    (dict(split="validation"), ["val"]),
    (dict(augment="storng"), ["strong"]),
    (dict(augment=True), ["True", "weak"]),
])
def test_unknown_name(arguments, words):
    fails(ValueError, lambda: load_dataset(**arguments), *words)


@pytest.mark.parametrize("subset", [0, -1, 1, 9, 2001, 0.0, -0.1, 1.5, 0.001, float("nan"), float("inf"), np.int64(3)])
def test_subset_out_of_range(subset):
    fails(ValueError, lambda: load_dataset(MINI_NAME, subset=subset))


@pytest.mark.parametrize("subset", [True, "10", [10], 1j])
def test_subset_of_wrong_type(subset):
    fails(TypeError, lambda: load_dataset(MINI_NAME, subset=subset), "subset")


@pytest.mark.parametrize("subset", [10, 25, 0.25, 1.0, np.int64(30), np.float32(0.5)])
@pytest.mark.parametrize("split", ["test", "val"])
def test_subset_is_balanced(subset, split):
    counts = load_dataset(MINI_NAME, split, subset=subset).labels.bincount(minlength=10)
    assert counts.min() >= 1 and counts.max() - counts.min() <= 1


def test_subset_follows_its_seed_and_grows():
    draw = lambda subset, seed: {x.numpy().tobytes() for x in load_dataset(MINI_NAME, subset=subset, seed=seed).raw}
    assert draw(100, 0) == draw(100, 0) != draw(100, 1)
    assert draw(100, 0) < draw(500, 0)


# Folders

@pytest.mark.parametrize("name", list(DATASETS))
def test_root_that_does_not_exist(name, tmp_path):
    fails(FileNotFoundError, lambda: load_dataset(name, root=tmp_path / "absent"), tmp_path / "absent", "root")


@pytest.mark.parametrize("name", list(DATASETS))
def test_root_without_the_data(name, tmp_path):
    fails(FileNotFoundError, lambda: load_dataset(name, root=tmp_path), "root=")


@pytest.mark.parametrize("name", [n for n in DATASETS if n != MINI_NAME])
def test_environment_names_no_folder(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HOWVITS_DATA", str(tmp_path / "absent"))
    fails(FileNotFoundError, lambda: load_dataset(name), "$HOWVITS_DATA", tmp_path / "absent")


def test_order_of_the_search(tmp_path, monkeypatch):
    monkeypatch.setenv("HOWVITS_DATA", str(tmp_path))
    sources = [source for _, source in howvits_data.data_folders()]
    assert len(sources) == 3 and all(word in source for word, source in zip(("$HOWVITS_DATA", "Debian", "cache"), sources))
    assert [folder for folder, _ in howvits_data.data_folders("/")] == [howvits_data.Path("/")]


@pytest.mark.parametrize("layout", ["", "FashionMNIST/raw"])
def test_environment_comes_first(layout, tmp_path, monkeypatch):
    shutil.copytree(MINI, tmp_path / layout, dirs_exist_ok=True)
    monkeypatch.setenv("HOWVITS_DATA", str(tmp_path))
    fails(ValueError, load_dataset, tmp_path / layout, "(10000, 28, 28)")  # found there first, and it is the mini set


def test_mini_set_stands_in_aloud_and_once(nothing_found, capsys):
    dataset = load_dataset("fashion_mnist")
    assert dataset.name == MINI_NAME and len(dataset) == 2000
    assert "standing in" in dataset.note and "not found" in dataset.note
    load_dataset("fashion_mnist", "val")
    assert capsys.readouterr().out.count("stands in") == 1


def test_mini_set_by_name_is_quiet(nothing_found, capsys):
    assert "standing in" not in load_dataset(MINI_NAME).note
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "imagenet"])
def test_no_other_set_has_a_stand_in(name, nothing_found):
    fails(FileNotFoundError, lambda: load_dataset(name), "root=", "$HOWVITS_DATA")


def test_make_mini_without_the_full_set(nothing_found, tmp_path):
    fails(FileNotFoundError, lambda: make_mini(tmp_path / "out"), "full Fashion-MNIST")
    assert not (tmp_path / "out").exists()


# Files

BREAKS = {
    "empty": lambda path: path.write_bytes(b""),
    "short": lambda path: path.write_bytes(gzip.decompress(path.read_bytes())[:3]),
    "cut in the header": lambda path: path.write_bytes(gzip.decompress(path.read_bytes())[:6]),
    "cut in the data": lambda path: path.write_bytes(gzip.decompress(path.read_bytes())[:-1]),
    "too long": lambda path: path.write_bytes(gzip.decompress(path.read_bytes()) + b"\0"),
    "archive cut": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "archive with a wrong byte": lambda path: path.write_bytes(flip(path.read_bytes())),
    "archive of nothing": lambda path: path.write_bytes(gzip.compress(b"")),
    "web page": lambda path: path.write_bytes(b"\n<!DOCTYPE html><html>404</html>"),
    "packed web page": lambda path: path.write_bytes(gzip.compress(b"<html>404</html>")),
    "other data": lambda path: path.write_bytes(b"\x93NUMPY" + bytes(100)),
}


def flip(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1:]


@pytest.mark.parametrize("fault", BREAKS)
@pytest.mark.parametrize(("split", "kind"), PARTS)
def test_damaged_file(fault, split, kind, folder):
    path = folder / (FASHION_FILES[split][kind] + ".gz")
    BREAKS[fault](path)
    fails(ValueError, lambda: load_dataset(MINI_NAME, split, root=folder), path, "replace it")


@pytest.mark.parametrize(("split", "kind"), PARTS)
def test_missing_file(split, kind, folder):
    path = folder / (FASHION_FILES[split][kind] + ".gz")
    path.unlink()
    fails(FileNotFoundError, lambda: load_dataset(MINI_NAME, split, root=folder), path, "missing")
    path.mkdir()
    fails(FileNotFoundError, lambda: load_dataset(MINI_NAME, split, root=folder), path, "missing")


@pytest.mark.parametrize("split", FASHION_FILES)
def test_images_and_labels_swapped(split, folder):
    images, labels = (folder / (name + ".gz") for name in FASHION_FILES[split].values())
    content = images.read_bytes()
    images.write_bytes(labels.read_bytes())
    labels.write_bytes(content)
    fails(ValueError, lambda: load_dataset(MINI_NAME, split, root=folder), images, "swapped")


@pytest.mark.parametrize("kind", ["images", "labels"])
@pytest.mark.parametrize("split", FASHION_FILES)
def test_training_and_test_files_swapped(kind, split, folder):
    paths = {part: folder / (names[kind] + ".gz") for part, names in FASHION_FILES.items()}
    other = next(part for part in paths if part != split)
    paths[split].write_bytes(paths[other].read_bytes())
    fails(ValueError, lambda: load_dataset(MINI_NAME, split, root=folder), paths[split], "swapped")


def test_label_out_of_range(folder):
    path = folder / (FASHION_FILES["test"]["labels"] + ".gz")
    labels = load_dataset(MINI_NAME).labels.byte()
    labels[77] = 10
    write_idx(path, labels)
    fails(ValueError, lambda: load_dataset(MINI_NAME, root=folder), path, "label 10")


def test_images_of_another_size(folder):
    path = folder / (FASHION_FILES["test"]["images"] + ".gz")
    write_idx(path, torch.zeros(2000, 32, 32, dtype=torch.uint8))
    fails(ValueError, lambda: load_dataset(MINI_NAME, root=folder), path, "32")


def test_unpacked_files_are_read_too(folder):
    for path in folder.glob("*.gz"):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    assert torch.equal(load_dataset(MINI_NAME, root=folder).raw, load_dataset(MINI_NAME).raw)


def test_the_full_set_is_not_taken_for_the_mini_set(folder):
    fails(ValueError, lambda: load_dataset("fashion_mnist", root=folder), folder, "(10000, 28, 28)")


def test_shipped_files():
    assert sum(path.stat().st_size for path in MINI.iterdir()) < 8e6
    licence = (MINI / "LICENSE").read_text(encoding="utf-8")
    assert "Zalando SE" in licence and "Permission is hereby granted" in licence


def test_written_files_are_the_same_bytes(tmp_path):
    for name in ("a.gz", "b.gz"):
        write_idx(tmp_path / name, torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4))
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()
    assert (tmp_path / "a.gz").read_bytes()[4:8] == bytes(4)  # no time of day


# Downloads

@pytest.mark.parametrize("name", ["fashion_mnist", "cifar10", "cifar100", "imagenet"])
def test_no_network_unless_asked(name, nothing_found, monkeypatch):
    def refuse(*args): raise AssertionError("the network was touched")
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    try: load_dataset(name)
    except FileNotFoundError: assert name != "fashion_mnist"


@pytest.mark.parametrize("name", ["fashion_mnist", "cifar10", "cifar100"])
def test_download_that_fails(name, nothing_found, monkeypatch):
    timeouts = []

    def refuse(*args, **kwargs):
        timeouts.append(socket.getdefaulttimeout())
        raise OSError("no network")
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    fails(ConnectionError, lambda: load_dataset(name, download=True), nothing_found, "root=")
    assert timeouts[0] == 30 and socket.getdefaulttimeout() is None


def test_download_completes_a_part(nothing_found, monkeypatch):
    raw = nothing_found / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    shutil.copy(next(MINI.glob("train-images*")), raw)
    fails(FileNotFoundError, lambda: load_dataset(), raw, "missing")
    monkeypatch.setattr(torchvision.datasets, "FashionMNIST",
                        lambda root, download: shutil.copytree(MINI, root / "FashionMNIST" / "raw", dirs_exist_ok=True))
    fails(ValueError, lambda: load_dataset(download=True), raw, "(10000, 28, 28)")  # complete, though with the mini set


# CIFAR, from made-up pixels in the layout of the real files

@pytest.fixture(params=["cifar10", "cifar100"])
def cifar(request, tmp_path, monkeypatch):
    name = request.param
    cls = getattr(torchvision.datasets, name.upper())
    classes = DATASETS[name].num_classes
    for files in ("train_list", "test_list"):
        monkeypatch.setattr(cls, files, [(file, None) for file, _ in getattr(cls, files)])
    monkeypatch.setattr(cls, "meta", {**cls.meta, "md5": None})
    base = tmp_path / cls.base_folder
    base.mkdir()
    content = {"data": np.random.randint(0, 256, (200, 3072), dtype=np.uint8),
               "labels" if name == "cifar10" else "fine_labels": [i % classes for i in range(200)]}
    for file, _ in cls.train_list + cls.test_list:
        (base / file).write_bytes(pickle.dumps(content))
    (base / cls.meta["filename"]).write_bytes(pickle.dumps({cls.meta["key"]: [f"class {i}" for i in range(classes)]}))
    return name, tmp_path, base, content["data"]


def test_cifar(cifar):
    name, root, base, pixels = cifar
    dataset = load_dataset(name, root=root)
    assert dataset.name == name and dataset.num_classes == len(dataset.classes) == DATASETS[name].num_classes
    assert torch.equal(dataset.raw, torch.from_numpy(pixels).reshape(-1, 3, 32, 32))
    for augment in (None, "weak", "strong"):
        images, labels = load_dataset(name, root=root, augment=augment).batch(range(5))
        assert images.shape == (5, 3, 32, 32) and labels.tolist() == list(range(5))
    assert len(load_dataset(name, "val", root=root)) == len(load_dataset(name, "train", root=root)) // 10


def test_cifar_with_a_missing_file(cifar):
    name, root, base, _ = cifar
    next(path for path in base.iterdir() if "meta" not in path.name).unlink()
    fails(ValueError, lambda: load_dataset(name, root=root), base, "download")


def test_cifar_with_a_damaged_file(cifar, monkeypatch):
    name, root, base, _ = cifar
    cls = getattr(torchvision.datasets, name.upper())
    monkeypatch.setattr(cls, "test_list", [(file, "0" * 32) for file, _ in cls.test_list])  # the sum no longer fits
    fails(ValueError, lambda: load_dataset(name, root=root), base, "download")


# ImageNet, from made-up pictures in the layout of the real tree

@pytest.fixture
def tree(tmp_path):
    for part in ("train", "val"):
        for label, name in enumerate(("n01", "n02", "n03")):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(4):
                Image.new("RGB", (300, 260), (80 * label, 50, 50)).save(tmp_path / part / name / f"{i}.JPEG")
    return tmp_path


@pytest.mark.parametrize("augment", [None, "weak", "strong"])
@pytest.mark.parametrize(("split", "count"), [("train", 12), ("test", 12), ("fit", 11), ("val", 1)])
def test_imagenet(tree, augment, split, count):
    dataset = load_dataset("imagenet", split, root=tree, augment=augment)
    assert len(dataset) == count and dataset.classes == ["n01", "n02", "n03"] and dataset.raw is None
    images, labels = dataset.batch([0])
    assert images.shape == (1, 3, 224, 224) and labels[0] == dataset.labels[0]


def test_imagenet_with_a_missing_class(tree):
    shutil.rmtree(tree / "val" / "n02")
    fails(ValueError, lambda: load_dataset("imagenet", root=tree), tree, "n02")


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(path.read_bytes()[:200]), lambda path: path.write_bytes(b"<html>"),
                                    lambda path: path.write_bytes(b"")])
def test_imagenet_with_a_damaged_picture(tree, damage):
    damage(tree / "val" / "n02" / "1.JPEG")
    fails(ValueError, lambda: load_dataset("imagenet", root=tree).batch(range(12)), tree / "val" / "n02" / "1.JPEG")


# Batches

x, y = torch.zeros(6, 3, 8, 8), torch.arange(6)


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("argument", ["images", "batch_size"])
@pytest.mark.parametrize("make", [lambda: TensorDataset(x, y), lambda: DataLoader(TensorDataset(x, y)), lambda: [(x, y)]])
def test_count_below_one(argument, value, make):
    fails(ValueError, lambda: batches(make(), **{argument: value}), argument)


@pytest.mark.parametrize("value", [1.5, "4", True])
@pytest.mark.parametrize("argument", ["images", "batch_size"])
def test_count_of_wrong_type(argument, value):
    fails(TypeError, lambda: batches([(x, y)], **{argument: value}), argument)


@pytest.mark.parametrize("make", [lambda: TensorDataset(x, y), lambda: DataLoader(TensorDataset(x, y))])
def test_more_images_than_there_are(make):
    fails(ValueError, lambda: batches(make(), images=7), "7", "6")


def test_more_images_than_a_stream_yields():
    fails(ValueError, lambda: list(batches(iter([(x, y)]), images=7)), "7", "6")


@pytest.mark.parametrize("images", [None, 4])
def test_batch_larger_than_the_data(images):
    fails(ValueError, lambda: batches(TensorDataset(x, y), 7, images, whole=True), "batch_size=7", images or 6)
    assert [len(labels) for _, labels in batches(TensorDataset(x, y), 7, images)] == [images or 6]


@pytest.mark.parametrize("empty", [TensorDataset(x[:0], y[:0]), DataLoader(TensorDataset(x[:0], y[:0])), [], iter([])])
def test_no_data(empty):
    fails(ValueError, lambda: list(batches(empty)), "no images")


def test_generator_that_was_used_up():
    stream = iter([(x, y)])
    list(batches(stream))
    fails(ValueError, lambda: list(batches(stream)), "used up")


@pytest.mark.parametrize("data", [None, 3, torch.nn.Linear(1, 1), "fashion_mnist", x, (x, y), [x, y], [x], [{"image": x}], [(x,)]])
def test_what_is_no_data(data):
    fails(TypeError, lambda: list(batches(data)))


@pytest.mark.parametrize(("images", "labels", "word"), [
    (x[0], y[:1], "(B, C, H, W)"), (x.flatten(1), y, "(B, C, H, W)"), (x[:, :, None], y, "(B, C, H, W)"),
    (x.byte(), y, "normalised"), (x.long(), y, "normalised"), (x[:, :1], y, "channel"), (torch.zeros(6, 8, 8, 3), y, "channel"),
    (x, y[:5], "one per image"), (x, y[:, None], "one per image"), (x, y.float(), "integers"), (x, y > 2, "integers"),
    (x, torch.eye(6).long(), "one per image"), (x, y - 1, "-1"), (x, torch.tensor(3), "one per image"),
])
def test_malformed_batch(images, labels, word):
    fails(ValueError, lambda: list(batches([(images, labels)])), word)


@pytest.mark.parametrize("make", [lambda: TensorDataset(x, y), lambda: DataLoader(TensorDataset(x, y), 2), lambda: [(x, y)]])
def test_label_above_the_classes(make):
    fails(ValueError, lambda: list(batches(make(), num_classes=5)), "label 5", "0 to 4")
    assert sum(len(labels) for _, labels in batches(make(), num_classes=6)) == 6


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: DataLoader(d, 4), lambda d: torch.utils.data.Subset(d, range(4))])
def test_a_data_set_knows_its_classes(wrap):
    dataset = load_dataset(MINI_NAME, subset=10)
    dataset.labels[1] = 10
    fails(ValueError, lambda: list(batches(wrap(dataset))), "label 10", "0 to 9")


def test_any_number_of_channels_if_asked():
    assert next(batches([(x[:, :1], y)], channels=None))[0].shape == (6, 1, 8, 8)


# Randomness

def one_image_many_times(count):
    dataset = load_dataset(MINI_NAME, augment="strong")
    dataset.raw, dataset.labels = dataset.raw[:1].expand(count, -1, -1, -1), dataset.labels[:1].expand(count)
    return dataset


@pytest.mark.filterwarnings("ignore:.*fork")
def test_workers_draw_different_augmentations():
    torch.manual_seed(0)
    first, second = (images for images, _ in DataLoader(one_image_many_times(32), 16, num_workers=2))
    assert not torch.equal(first, second)
    assert len({image.numpy().tobytes() for image in torch.cat([first, second])}) > 24


def test_augmentation_follows_the_global_seeds():
    dataset = one_image_many_times(16)

    def draw(seed):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        return dataset.batch(range(16))[0]
    assert torch.equal(draw(0), draw(0)) and not torch.equal(draw(0), draw(1))


def test_plain_data_draw_nothing():
    state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    for data in (load_dataset(MINI_NAME, subset=50), TensorDataset(x, y)):
        list(batches(data, 4))
    assert state == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


@pytest.mark.parametrize("index", [2000, -2001])
def test_index_out_of_range(index):
    with pytest.raises(IndexError):
        load_dataset(MINI_NAME)[index]


def test_a_loader_reads_the_same_images():
    dataset = load_dataset(MINI_NAME, subset=20)
    assert isinstance(dataset, ImageDataset)
    images, labels = next(iter(DataLoader(dataset, 20)))
    assert torch.equal(images, dataset.batch(range(20))[0]) and torch.equal(labels, dataset.labels)
