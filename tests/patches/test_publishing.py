"""`Publisher` and `Subscriber` over folders. For random histories see `tests/patches/histories.py`."""

from __future__ import annotations

import gzip
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparsecomm.errors import InvalidInputError
from sparsecomm.patches import Publisher, Subscriber, apply, diff
from sparsecomm.patches.versions import parse
from tests.interrupts import InterruptError, interrupted
from tests.patches import histories
from tests.patches.faults import failing
from tests.patches.histories import MANIFEST, content


@pytest.fixture
def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        "a": rng.standard_normal((200, 30)).astype(np.float32),
        "b": np.arange(9),
        "c": np.zeros((2, 0), np.float16),
    }


def train(weights: dict[str, np.ndarray], seed: int) -> None:
    a = weights["a"].reshape(-1)
    a[np.random.default_rng(seed).integers(0, a.size, 40)] += 0.5


def newest(folder: Path, weights: dict[str, np.ndarray]) -> tuple[int | None, dict[str, np.ndarray]]:
    """Return what a new subscriber gets."""
    subscriber = Subscriber({name: np.zeros_like(x) for name, x in weights.items()}, folder)
    return subscriber.update(), dict(subscriber.tensors)


def named(folder: Path) -> set[str]:
    """Return the files that the list of versions names."""
    versions = json.loads((folder / MANIFEST).read_bytes())["versions"]
    return {file[0] for version in versions for file in version[4:6] if file}


@pytest.mark.parametrize("chunk", range(4))
def test_random_histories(chunk: int) -> None:
    for seed in range(50 * chunk, 50 * chunk + 50):
        histories.play(seed)


def test_the_clean_up_deletes_no_files_of_others(tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    others = {"vae.safetensors.gz", "v2.patch", "v000000001-0123456.patch", ".vimrc.part", "model.safetensors"}
    for name in others:
        (tmp_path / name).touch()
    orphans = ["v000000001-01234567.patch", "v1000000000-01234567.safetensors.gz", ".versions.json-01234567.part"]
    for name in [*orphans, ".v000000001-01234567.patch-01234567.part"]:
        (tmp_path / name).touch()
    Publisher(weights, tmp_path).publish(1)
    assert {path.name for path in tmp_path.iterdir()} == others | named(tmp_path) | {MANIFEST}


def test_an_error_in_the_background_is_raised_once(tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    with Publisher(weights, tmp_path) as publisher:
        for ask in (lambda future: future.exception(), lambda future: future.result(), None):
            with failing(0):
                future = publisher.publish_in_background(1)
                if ask is not None:
                    with pytest.raises(OSError, match="No space left"):
                        raise ask(future)
                    continue
                with pytest.raises(OSError, match="No space left"):
                    publisher.wait()
            publisher.wait()
        train(weights, 1)
        future = publisher.publish_in_background(3)
        before = content(weights)
        train(weights, 2)
        publisher.wait()
        assert future.result().version == 1
        step, tensors = newest(tmp_path, weights)
        assert (step, content(tensors)) == (3, before)


@pytest.mark.parametrize("every", [1, 3])
def test_anchors_come_every_n_patches_and_pruning_leaves_two(
    every: int, tmp_path: Path, weights: dict[str, np.ndarray]
) -> None:
    publisher = Publisher(weights, tmp_path, anchor_every=every)
    with_anchor = []
    for step in range(20):
        train(weights, step)
        published = publisher.publish(step)
        assert (published.version, published.step) == (step + 1, step)
        assert (published.patch_bytes == 0) == (step == 0)
        assert published.changed in ([-1] if step == 0 else range(1, 41))
        if published.anchor_bytes:
            with_anchor.append(step)
        assert newest(tmp_path, weights)[0] == step
        versions = parse((tmp_path / MANIFEST).read_bytes())
        assert [v.step for v in versions] == list(range(with_anchor[-2] if len(with_anchor) > 1 else 0, step + 1))
        assert {path.name for path in tmp_path.iterdir()} == named(tmp_path) | {MANIFEST}
    assert with_anchor == list(range(0, 20, every))


def test_a_restarted_publisher_goes_on_with_a_patch_if_the_weights_are_equal(
    tmp_path: Path, weights: dict[str, np.ndarray]
) -> None:
    Publisher(weights, tmp_path).publish(1)
    follower = Subscriber({name: x.copy() for name, x in weights.items()}, tmp_path)
    assert follower.update() == 1
    same = Publisher(weights, str(tmp_path), copy="host").publish(2)
    assert (same.version, same.patch_bytes, same.anchor_bytes, same.changed) == (2, 0, 0, 0)
    assert follower.update() == 2
    publisher = Publisher(weights, tmp_path)
    train(weights, 1)
    assert publisher.publish(3).patch_bytes > 0
    train(weights, 2)
    other = Publisher(weights, tmp_path).publish(0)  # steps may go back
    assert (other.patch_bytes, other.changed) == (0, -1)
    assert other.anchor_bytes > 0
    assert (follower.update(), content(follower.tensors)) == (0, content(weights))
    resized = {"a": weights["a"][:7].copy()}
    publisher = Publisher(resized, tmp_path)
    assert publisher.publish(5).anchor_bytes > 0
    assert publisher.publish(6, {"a": resized["a"], "more": np.zeros(3)}).anchor_bytes > 0
    with pytest.raises(InvalidInputError, match="not expected: 'b', 'c'"):
        follower.update()
    assert (follower.step, content(follower.tensors)) == (0, content(weights))


def test_a_second_publisher_in_a_folder_is_refused(tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    first, second = Publisher(weights, tmp_path), Publisher(weights, tmp_path)
    second.publish(1)
    for _ in range(2):
        with pytest.raises(InvalidInputError, match="another publisher has written to"):
            first.publish(2)
        train(weights, 1)
        second.publish(3)
    assert newest(tmp_path, weights)[0] == 3


def test_anchors_are_files_of_safetensors(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    load = pytest.importorskip("safetensors.torch").load
    names = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 bool complex64"
    bits = torch.randint(0, 256, (16 * 35,), dtype=torch.uint8)
    tensors = {name: bits.clone() for name in names.split()} | {"": torch.zeros(()), "empty": torch.zeros(2, 0)}
    for name in names.split():
        dtype = getattr(torch, name)
        tensors[name] = (bits % 2).bool() if name == "bool" else tensors[name].view(dtype).reshape(5, -1)
    Publisher(tensors, tmp_path).publish(5)
    loaded = load(gzip.decompress(next(tmp_path.glob("*.gz")).read_bytes()))
    assert loaded.keys() == tensors.keys()
    for name, x in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (x.dtype, x.shape)
        assert torch.equal(loaded[name].reshape(-1).view(torch.uint8), x.reshape(-1).view(torch.uint8)), name
    subscriber = Subscriber({name: torch.zeros_like(x) for name, x in tensors.items()}, tmp_path, in_place=False)
    assert subscriber.update() == 5
    assert torch.equal(subscriber.tensors["float8_e5m2"].view(torch.uint8), tensors["float8_e5m2"].view(torch.uint8))


@pytest.mark.parametrize(
    "tensors", [{"z": np.zeros(3, np.complex128)}, {"__metadata__": np.zeros(3)}, {"s": np.zeros(3, "U1")}, {"x": 5}, 5]
)
def test_tensors_that_no_anchor_can_have_are_refused(tensors: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError):
        Publisher(tensors, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_arguments_of_all_kinds(tmp_path: Path) -> None:
    """Covers single arrays, pairs of names and tensors, generators and NumPy numbers."""
    x = np.arange(5.0)
    for i, tensors in enumerate((x, [("w", x)], iter([("w", x)]))):
        publisher = Publisher(tensors, tmp_path / str(i), anchor_every=np.int64(3))
        zeros = np.zeros(5)
        target = zeros if i == 0 else [("w", zeros)] if i == 1 else iter([("w", zeros)])
        subscriber = Subscriber(target, tmp_path / str(i))
        for step in np.arange(2):
            x += 1
            assert publisher.publish(step).step == step
            assert subscriber.update() == step
            assert (zeros == x).all()
    for wrong in (-1, 1.0, True, "1", None):
        with pytest.raises(InvalidInputError, match="step="):
            publisher.publish(wrong)
    for options in ({"anchor_every": 0}, {"copy": "gpu"}, {"folder": 5}):
        with pytest.raises(InvalidInputError, match=next(iter(options))):
            Publisher(x, **({"folder": tmp_path} | options))
    for source in (5, None, b"x"):
        with pytest.raises(InvalidInputError, match="source="):
            Subscriber(x, source)
    x.flags.writeable = False
    with pytest.raises(InvalidInputError, match="read-only"):
        Subscriber(x, tmp_path)


def test_tensors_that_share_memory(tmp_path: Path) -> None:
    """Tied weights share memory."""
    x, y = np.arange(6.0), np.zeros(6)
    publisher = Publisher({"x": x, "tied": x}, tmp_path)
    subscriber = Subscriber({"x": y, "tied": y}, tmp_path)
    copies = Subscriber({"x": np.zeros(6), "tied": np.zeros(6)}, tmp_path, in_place=False)
    for step in range(3):
        publisher.publish(step)
        assert subscriber.update() == copies.update() == step
        assert (y == x).all()
        assert all((tensor == x).all() for tensor in copies.tensors.values())
        x[step] = 9
    untied = Publisher({"x": x, "tied": x + 1}, tmp_path)
    untied.publish(3)
    with pytest.raises(InvalidInputError, match="x and tied share memory"):
        subscriber.update()
    assert subscriber.step == 2
    assert (y == np.where(np.arange(6) < 2, 9, np.arange(6))).all()
    assert copies.update() == 3
    z = np.zeros(6)
    with pytest.raises(InvalidInputError, match="a and b share memory"):
        apply(diff({"a": z, "b": z}, {"a": z, "b": z + 1}), {"a": z, "b": z})
    assert not z.any()


@pytest.mark.parametrize("pattern", ["*.gz", "*.patch"])
def test_files_of_other_versions_are_refused(pattern: str, tmp_path: Path) -> None:
    """Even a patch that applies: two versions follow the same weights."""
    x = np.zeros(300)
    publisher, subscriber = Publisher(x, tmp_path), Subscriber(np.ones(300), tmp_path)
    for step, value in enumerate((0, 1, 0, 2)):
        x[0] = value
        publisher.publish(step)
        if pattern == "*.patch" and step == 2:
            assert subscriber.update() == 2
    x[:] = np.arange(300)
    Publisher(x, tmp_path, anchor_every=1).publish(4)
    first, *_, last = sorted(tmp_path.glob(pattern))
    sizes = [f'"{last.name}", {path.stat().st_size}]' for path in (last, first)]
    (tmp_path / MANIFEST).write_text((tmp_path / MANIFEST).read_text().replace(*sizes))
    last.write_bytes(first.read_bytes())
    if pattern == "*.patch":
        max(tmp_path.glob("*.gz")).unlink()
    assert subscriber.update() == (2 if pattern == "*.patch" else 3)
    assert "leads to other weights" in " ".join(subscriber.problems)
    assert subscriber.tensors[""][0] == (0 if pattern == "*.patch" else 2)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # interrupted between opening a file and using it
@pytest.mark.parametrize("doing", ["load", "update", "update copies", "publish", "publish in background"])
def test_publisher_and_subscriber_continue_after_an_interrupt_at_any_place(doing: str, tmp_path: Path) -> None:
    at, came = 0, 1
    while came:
        weights, folder, contents = {"a": np.random.default_rng(1).standard_normal(99)}, tmp_path / str(at), {}
        publisher = Publisher(weights, folder, anchor_every=2)
        subscriber = Subscriber({"a": np.zeros(99)}, folder, in_place=doing != "update copies")
        for number in range(3 if doing.startswith("publish") else 4):
            weights["a"][number] += 1
            contents[number] = content(weights)
            publisher.publish(number)
            if number == 0 and doing != "load":
                subscriber.update()
        old, before = subscriber.tensors, content(subscriber.tensors)
        with suppress(InterruptError), interrupted(at) as points:
            if doing in ("load", "update", "update copies"):
                subscriber.update()
            elif doing == "publish":
                contents[3] = content(weights)
                publisher.publish(3)
            else:
                contents[3] = content(weights)
                publisher.publish_in_background(3)
                weights["a"][5] = 7
                publisher.wait()
        assert doing != "update copies" or content(old) == before, points.where
        for _ in range(2):  # the second time after a publication
            assert subscriber.step is None or content(subscriber.tensors) == contents[subscriber.step], points.where
            step = subscriber.update()
            assert content(subscriber.tensors) == contents.get(step), points.where
            weights["a"][6] = 9
            contents[9] = content(weights)
            publisher.publish(9)
        publisher.close()
        at, came = at + 29, points.interrupts
    assert at > 29


def test_a_missing_list_is_reported_and_published_tensors_are_checked(
    tmp_path: Path, weights: dict[str, np.ndarray]
) -> None:
    subscriber = Subscriber(weights, tmp_path)
    assert subscriber.update() is None
    assert "nothing has been published" in subscriber.problems[0]
    publisher = Publisher(weights, tmp_path)
    with pytest.raises(InvalidInputError, match="complex128"):
        publisher.publish(0, {"z": np.zeros(3, np.complex128)})
    assert not any(tmp_path.iterdir())
