"""The fingerprint of weights: what it tells apart, what it does not depend on, and which files it refuses."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewarm.errors import ConfigError
from rewarm.geometry import directory_namespace, weights_fingerprint
from rewarm.geometry.fingerprint import SAMPLE_BYTES
from rewarm.geometry.safetensors import HEADER_BYTES_MAX, read_header

Tensors = dict[str, np.ndarray]
DTYPES = {"float32": "F32", "float16": "F16", "uint8": "U8", "int64": "I64"}


def save(path: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> None:
    """A .safetensors file, written here from the format's description: length, JSON header, bytes in order."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, array in tensors.items():
        end = offset + array.nbytes
        header[name] = {"dtype": DTYPES[str(array.dtype)], "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"".join(array.tobytes() for array in tensors.values()))


def base_weights() -> Tensors:
    random = np.random.default_rng(3)
    return {
        "embed.weight": random.normal(size=(512, 64)).astype(np.float32),
        "layers.0.q.weight": random.normal(size=(64, 64)).astype(np.float32),
        "layers.0.norm.weight": np.ones(64, dtype=np.float32),
        "layers.1.q.weight": random.normal(size=(64, 64)).astype(np.float16),
        "empty": np.zeros((0, 4), dtype=np.float32),
        "steps": np.array(7, dtype=np.int64),
    }


def fingerprint(folder: Path, tensors: Tensors, name: str = "model.safetensors") -> str:
    folder.mkdir(exist_ok=True)
    save(folder / name, tensors)
    return weights_fingerprint(folder)


def test_a_fine_tune_differs_though_names_and_shapes_are_equal(tmp_path: Path) -> None:
    base = base_weights()
    tuned = dict(base) | {"layers.0.q.weight": base["layers.0.q.weight"] + np.float32(1e-4)}
    assert fingerprint(tmp_path / "base", base) != fingerprint(tmp_path / "tuned", tuned)


@pytest.mark.parametrize("name", [name for name, array in base_weights().items() if array.size])
def test_every_tensor_counts(tmp_path: Path, name: str) -> None:
    base = base_weights()
    assert fingerprint(tmp_path / "a", base) != fingerprint(tmp_path / "b", base | {name: base[name] + 1})


def test_names_dtypes_and_shapes_count(tmp_path: Path) -> None:
    base = base_weights()
    renamed = {name.replace("layers.1", "layers.2"): array for name, array in base.items()}
    reshaped = base | {"embed.weight": base["embed.weight"].reshape(256, 128)}
    retyped = base | {"layers.1.q.weight": base["layers.1.q.weight"].view(np.uint8).reshape(64, 128)}
    fewer = {name: array for name, array in base.items() if name != "empty"}
    variants = [base, renamed, reshaped, retyped, fewer]
    found = {fingerprint(tmp_path / str(i), variant) for i, variant in enumerate(variants)}
    assert len(found) == len(variants)


def test_files_order_and_metadata_do_not_count(tmp_path: Path) -> None:
    base = base_weights()
    whole = fingerprint(tmp_path / "whole", base)
    assert fingerprint(tmp_path / "reversed", dict(reversed(base.items())), "other-name.safetensors") == whole
    parts = tmp_path / "parts"
    parts.mkdir()
    for i, (name, array) in enumerate(base.items()):
        save(parts / f"model-{i}.safetensors", {name: array}, metadata={"format": "pt"})
    assert weights_fingerprint(parts) == whole


def test_samples_are_taken_at_the_start_the_middle_and_the_end(tmp_path: Path) -> None:
    data = np.zeros(1 << 20, dtype=np.uint8)
    plain = fingerprint(tmp_path / "plain", {"w": data})
    middle = (len(data) - SAMPLE_BYTES) // 2
    seen = [0, SAMPLE_BYTES - 1, middle, middle + SAMPLE_BYTES - 1, len(data) - SAMPLE_BYTES, len(data) - 1]
    for position in seen:
        edited = data.copy()
        edited[position] = 1
        assert fingerprint(tmp_path / "edited", {"w": edited}) != plain
    edited = data.copy()
    edited[SAMPLE_BYTES] = 1  # the limit that the documentation admits
    assert fingerprint(tmp_path / "edited", {"w": edited}) == plain


def test_the_fingerprint_never_changes(tmp_path: Path) -> None:
    tensors = {"a": np.arange(10_000, dtype=np.int64), "b": np.arange(3, dtype=np.uint8)}
    known = "5010ec163283c47d0610f34a3226d7b42f3a0827929a331509bba601db3b0a17"
    assert fingerprint(tmp_path / "m", tensors) == known


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_the_index_says_which_files_belong_to_the_model(tmp_path: Path) -> None:
    base = base_weights()
    alone = fingerprint(tmp_path / "alone", base)
    both = tmp_path / "both"
    both.mkdir()
    save(both / "model-1.safetensors", base)
    save(both / "consolidated.safetensors", base)  # the same weights once more, as some publishers add them
    with pytest.raises(ConfigError, match=r"tensor 'embed.weight' is in .*consolidated.safetensors and in .*model-1"):
        weights_fingerprint(both)
    write_index(both, dict.fromkeys(base, "model-1.safetensors"))
    assert weights_fingerprint(both) == alone
    write_index(both, dict.fromkeys(base, "model-2.safetensors"))
    with pytest.raises(ConfigError, match=r"model-2.safetensors is missing"):
        weights_fingerprint(both)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "", "..", "a\0b"])
def test_an_index_may_not_name_files_elsewhere(tmp_path: Path, name: str) -> None:
    write_index(tmp_path, {"w": name})
    with pytest.raises(ConfigError, match="is no file beside it"):
        weights_fingerprint(tmp_path)


@pytest.mark.parametrize("weight_map", [None, [], {"w": 1}, {"w": None}, "x"])
def test_a_damaged_index_is_refused(tmp_path: Path, weight_map: object) -> None:
    write_index(tmp_path, weight_map)
    with pytest.raises(ConfigError, match="weight_map must map"):
        weights_fingerprint(tmp_path)


def test_a_directory_without_weights_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no .safetensors files in .*commit or an explicit namespace"):
        weights_fingerprint(tmp_path)
    with pytest.raises(ConfigError, match="cannot read"):
        weights_fingerprint(tmp_path / "missing")
    save(tmp_path / "none.safetensors", {})
    with pytest.raises(ConfigError, match="hold no tensors"):
        weights_fingerprint(tmp_path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="no regular file"):
        weights_fingerprint(tmp_path)


def entry(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def raw_file(path: Path, header: object, data: bytes = b"abcd", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


HOSTILE: dict[str, tuple[object, str]] = {
    "unknown dtype": ({"w": entry(dtype="F99")}, "unknown dtype 'F99'"),
    "dtype of another type": ({"w": entry(dtype=["U8"])}, "unknown dtype"),
    "negative shape": ({"w": entry(shape=[-4])}, "impossible shape"),
    "boolean shape": ({"w": entry(shape=[True, 4])}, "impossible shape"),
    "shape of text": ({"w": entry(shape="4")}, "impossible shape"),
    "overflowing shape": ({"w": entry(shape=[1 << 40, 1 << 40])}, "takes 4 bytes"),
    "endless shape": ({"w": entry(shape=[1] * 65)}, "impossible shape"),
    "huge number": ({"w": entry(shape=[1 << 63])}, "impossible shape"),
    "size against shape": ({"w": entry(shape=[5])}, "takes 4 bytes, but U8 .* needs 5"),
    "offsets backwards": ({"w": entry(offsets=[4, 0])}, "takes -4 bytes"),
    "negative offsets": ({"w": entry(offsets=[-4, 0])}, "impossible data_offsets"),
    "three offsets": ({"w": entry(offsets=[0, 4, 4])}, "impossible data_offsets"),
    "outside the file": ({"w": entry(shape=[8], offsets=[0, 8])}, "is it cut off"),
    "a hole at the start": ({"w": entry(shape=[2], offsets=[2, 4])}, "starts at byte"),
    "bytes of nobody": ({"w": entry(shape=[2], offsets=[0, 2])}, "its header describes"),
    "overlap": ({"a": entry(), "b": entry()}, "starts at byte"),
    "no shape": ({"w": {"dtype": "U8", "data_offsets": [0, 4]}}, "must have dtype, shape and data_offsets"),
    "more fields": ({"w": entry() | {"x": 1}}, "must have dtype, shape and data_offsets"),
    "no object": ({"w": 5}, "must have dtype, shape and data_offsets"),
    "a list": ([1, 2], "not an object"),
    "a long name": ({"w" * 5000: entry()}, "is too long"),
    "twice": (b'{"w": {"dtype":"U8","shape":[4],"data_offsets":[0,4]}, "w": {}}', "occurs twice"),
    "cut": (b'{"w": {"dtype"', "is not a JSON object"),
    "no text": (b"\xff\xfe\xfd\xfc", "is not a JSON object"),
    "deep": (b'{"w":' * 50_000, "is not a JSON object"),
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_hostile_headers_are_refused_by_file(tmp_path: Path, attack: str) -> None:
    header, message = HOSTILE[attack]
    path = raw_file(tmp_path / "bad.safetensors", header)
    with pytest.raises(ConfigError, match=message) as error:
        read_header(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("length", [0, 1, 1 << 20, HEADER_BYTES_MAX + 1, (1 << 64) - 1])
def test_impossible_header_lengths_are_refused_before_reading(tmp_path: Path, length: int) -> None:
    path = raw_file(tmp_path / "bad.safetensors", {"w": entry()}, length=length)
    with pytest.raises(ConfigError, match="is no safetensors file"):
        read_header(path)


def test_a_header_beyond_the_limit_is_refused_though_the_file_is_long_enough(tmp_path: Path) -> None:
    path = tmp_path / "sparse.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", HEADER_BYTES_MAX + 1))
        file.truncate(2 * HEADER_BYTES_MAX)
    with pytest.raises(ConfigError, match="is no safetensors file"):
        read_header(path)


@given(st.binary(max_size=200), st.integers(0, 300))
def test_any_bytes_are_a_header_or_a_clear_refusal(data: bytes, cut: int) -> None:
    good = json.dumps({"w": entry(), "v": entry(offsets=(4, 8))}).encode()
    whole = struct.pack("<Q", len(good)) + good + b"abcdefgh"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "any.safetensors"
        for content in (data, whole[:cut] + data):
            path.write_bytes(content)
            try:
                tensors = read_header(path)
            except ConfigError:
                continue
            assert sum(tensor.size for tensor in tensors) <= len(content)


def test_sub_byte_dtypes_are_measured_in_bits(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "fp4.safetensors", {"w": entry(dtype="F4", shape=[2, 4])})
    assert read_header(path)[0].size == 4
    raw_file(path, {"w": entry(dtype="F4", shape=[7])})
    with pytest.raises(ConfigError, match="needs"):
        read_header(path)


ENGINE: dict[str, Any] = {
    "kv_dtype": "bf16", "block_tokens": 16, "layout": "x", "tp": 1, "pp": 1, "rank_split": False,
}  # fmt: skip


def test_the_namespace_of_a_directory_uses_its_weights_or_its_commit(tmp_path: Path) -> None:
    commit = "0" * 39 + "1"
    base, tuned, snapshot = tmp_path / "base", tmp_path / "tuned", tmp_path / "snapshots" / commit
    snapshot.mkdir(parents=True)
    weights = base_weights()
    fingerprint(base, weights)
    fingerprint(tuned, weights | {"steps": np.array(8, dtype=np.int64)})
    for folder in (base, tuned, snapshot):
        (folder / "config.json").write_text('{"model_type": "llama"}')
    spaces = [directory_namespace(folder, **ENGINE) for folder in (base, tuned, snapshot)]
    assert len({space.digest for space in spaces}) == 3
    assert json.loads(spaces[0].text)["weights_sha256"] == weights_fingerprint(base)
    assert json.loads(spaces[2].text)["commit"] == commit  # no weights there, and none needed
    assert directory_namespace(base, **ENGINE).digest == spaces[0].digest
    assert directory_namespace(base, **ENGINE | {"overrides": {"rope_theta": 1.0}}).digest != spaces[0].digest


def test_a_directory_without_weights_or_commit_has_no_namespace(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="explicit namespace"):
        directory_namespace(tmp_path, **ENGINE)
