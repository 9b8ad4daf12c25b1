"""A namespace changes with every part, is the same wherever it is made, and is refused where a part is unknown."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewarm.errors import ConfigError
from rewarm.geometry import Namespace, commit_of, model_namespace
from rewarm.store.contract import NamespaceLike, resolve_namespace

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FINGERPRINT = "ab" * 32
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "rope_theta": 500000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
    "tie_word_embeddings": False,
    "eos_token_id": [1, 2],
}
PARTS: dict[str, Any] = {
    "config": CONFIG,
    "commit": COMMIT,
    "fingerprint": None,
    "overrides": {},
    "kv_dtype": "bf16",
    "block_tokens": 16,
    "layout": "vllm NHD",
    "tp": 1,
    "pp": 1,
    "rank_split": False,
    "tenant_salt": "",
}
OTHERS: dict[str, list[Any]] = {
    "commit": ["f" * 40],
    "fingerprint": [FINGERPRINT, "cd" * 32],
    "overrides": [{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, {"quantization": "fp8"}, {"a": None}],
    "kv_dtype": ["fp16", "fp8", "fp8_e5m2", "fp32"],
    "block_tokens": [1, 17, 256],
    "layout": ["vllm HND", "vllm nhd"],
    "tp": [2, 8],
    "pp": [2, 8],
    "rank_split": [True],
    "tenant_salt": ["alice", "bob", b"\0"],
}


def namespace(**changes: Any) -> Namespace:
    return model_namespace(**(PARTS | changes))


def test_the_store_accepts_it() -> None:
    made = namespace()
    assert isinstance(made, NamespaceLike)
    digest, description = resolve_namespace(made)
    assert (digest, description) == (made.digest, made.describe())
    assert len(digest) == 32


def test_every_changed_part_is_another_namespace() -> None:
    digests = [namespace().digest]
    digests += [namespace(**{part: value}).digest for part, values in OTHERS.items() for value in values]
    assert len(set(digests)) == len(digests)
    assert set(OTHERS) | {"config"} == set(PARTS)


def edits(value: Any) -> st.SearchStrategy[Any]:
    """The same JSON value with one thing in it changed, added or taken away."""
    fresh = st.sampled_from([None, True, False, 0, 1, -7, 0.5, "x", [], {}, [0], {"a": 0}])
    ways = [fresh]
    if isinstance(value, dict):
        for name in value:
            ways.append(edits(value[name]).map(lambda new, name=name: value | {name: new}))  # type: ignore[misc]
            ways.append(st.just({other: value[other] for other in value if other != name}))
        ways.append(fresh.map(lambda new: value | {"new": new}))
    if isinstance(value, list):
        ways.append(fresh.map(lambda new: [*value, new]))
        ways.append(st.just(list(reversed(value))))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        ways.append(st.just(value + 1))
    return st.one_of(ways)


@given(edits(CONFIG))
def test_any_edit_of_the_configuration_is_another_namespace(edited: Any) -> None:
    if not isinstance(edited, dict) or not edited:
        return
    same = json.dumps(edited, sort_keys=True) == json.dumps(CONFIG, sort_keys=True)
    assert (namespace(config=edited).digest == namespace().digest) == same
    moved = namespace(config=CONFIG, overrides=edited)
    assert moved.digest != namespace(config=edited, overrides=CONFIG).digest or same


@given(st.permutations(list(CONFIG)))
def test_the_order_of_names_does_not_matter(names: list[str]) -> None:
    shuffled = {name: CONFIG[name] for name in names}
    assert namespace(config=shuffled).digest == namespace().digest
    assert namespace(config=json.loads(json.dumps(shuffled))).text == namespace().text


def test_the_digest_is_sha256_of_the_canonical_text() -> None:
    # what a program in another language has to do: sorted names, no blanks, ASCII
    made = namespace(tenant_salt="s")
    text = json.dumps(json.loads(made.describe()), sort_keys=True, separators=(",", ":"))
    assert made.digest == hashlib.sha256(text.encode()).digest()


def test_another_process_with_another_hash_seed_makes_the_same_digest() -> None:
    script = f"""
from rewarm.geometry import model_namespace
print(model_namespace(**{PARTS!r}).digest.hex())
"""
    for seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        )
        assert done.stdout.strip() == namespace().digest.hex()


def test_the_format_of_the_digest_never_changes() -> None:
    # Pools on disk carry these digests: if this fails, every pool in the field goes cold.
    assert namespace().digest.hex() == "3620d19b0654d082c357788c8271272875431e5ec001faed535b7e133448cb43"


def test_the_salt_is_kept_as_its_hash_only() -> None:
    made = namespace(tenant_salt="hunter2-secret")
    assert "hunter2" not in made.describe()
    assert namespace(tenant_salt="a").digest == namespace(tenant_salt=b"a").digest


def test_the_description_names_every_part() -> None:
    described = json.loads(namespace(overrides={"rope_theta": 1e6}).describe())
    assert described["config"] == CONFIG
    assert described["overrides"] == {"rope_theta": 1e6}
    assert (described["commit"], described["kv_dtype"], described["block_tokens"]) == (COMMIT, "bf16", 16)


@pytest.mark.parametrize("part", ["kv_dtype", "block_tokens", "layout", "tp", "pp", "rank_split"])
def test_a_part_that_is_missing_is_refused_with_the_way_out(part: str) -> None:
    with pytest.raises(ConfigError, match=rf"needs {part}.*give an explicit namespace"):
        namespace(**{part: None})


def test_unknown_weights_are_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"commit or the fingerprint of its weights; .*explicit namespace"):
        namespace(commit=None)
    with pytest.raises(ConfigError, match=r"configuration; .*explicit namespace"):
        namespace(config={})
    with pytest.raises(ConfigError, match="as resolved by the engine"):
        namespace(kv_dtype="auto")


@pytest.mark.parametrize("commit", ["main", "v1.0", "abc123", COMMIT.upper(), COMMIT + "0", "g" * 40, ""])
def test_a_commit_that_can_move_is_refused(commit: str) -> None:
    with pytest.raises(ConfigError, match=r"commit must be 40 hex digits.*branch or tag can move"):
        namespace(commit=commit)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fingerprint": "ab"}, "fingerprint must be 64"),
        ({"kv_dtype": "bf17"}, "unknown KV cache dtype"),
        ({"block_tokens": 0}, "block_tokens must be"),
        ({"block_tokens": True}, "block_tokens must be"),
        ({"tp": 0}, "tp must be"),
        ({"pp": -1}, "pp must be"),
        ({"rank_split": 1}, "rank_split must be True or False"),
        ({"layout": "  "}, "needs layout"),
        ({"overrides": {"rope": float("nan")}}, "overrides: rope is nan"),
        ({"overrides": {"rope": object()}}, "overrides: rope holds a object, whose meaning is not known"),
        ({"overrides": {1: 2}}, "has the name 1, which is no string"),
        ({"overrides": {"n": 10**5000}}, "overrides: n is a whole number beyond"),
        ({"config": CONFIG | {"x": "y" * (17 << 20)}}, "bytes as JSON, more than"),
    ],
)
def test_parts_that_cannot_be_compared_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        namespace(**changes)


def test_endless_nesting_is_refused() -> None:
    deep: dict[str, Any] = {}
    deep["inner"] = deep
    with pytest.raises(ConfigError, match="nested too deep"):
        namespace(overrides=deep)


def test_the_commit_of_a_snapshot_is_its_folder(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / COMMIT
    assert commit_of(snapshot) == COMMIT
    assert commit_of(f"{snapshot}/") == COMMIT
    assert commit_of(tmp_path / COMMIT) is None  # a folder of that name somewhere else proves nothing
    assert commit_of(tmp_path / "snapshots" / "main") is None
