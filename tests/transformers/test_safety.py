"""What must not share KV does not; what cannot be restored is refused by name; damage costs time, never the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.remote import Remote, RemoteError, damage
from tests.transformers.conftest import prompt

pytestmark = pytest.mark.transformers


def test_other_weights_configurations_dtypes_and_attention_miss(worker: Remote, url: str) -> None:
    context = [prompt(20)]
    models: dict[str, dict[str, Any]] = {
        "base": {},
        "other weights": {"seed": 1},
        "another RoPE": {"rope_parameters": {"rope_type": "default", "rope_theta": 99.0}},
        "another dtype": {"dtype": "bfloat16"},
        "another attention": {"attention": "eager"},
    }
    namespaces = set()
    for name, options in models.items():
        worker.ask("make", name=name, kind="qwen3", **options)
        namespaces.add(worker.ask("open", cache="c", name=name, url=url))
        answer = worker.ask("generate", cache="c", ids=context)
        assert answer["restored"] == 0, name
        worker.ask("close", cache="c")
    assert len(namespaces) == len(models)
    worker.ask("make", name="copy", kind="qwen3")
    assert worker.ask("open", cache="c", name="copy", url=url) in namespaces
    assert worker.ask("generate", cache="c", ids=context)["restored"] == 320
    worker.ask("close", cache="c")


def test_a_name_stands_for_the_model_but_not_for_its_shape(worker: Remote, url: str) -> None:
    worker.ask("make", name="one", kind="qwen3")
    worker.ask("make", name="two", kind="qwen3", seed=1)
    worker.ask("make", name="wide", kind="qwen3", head_dim=64)
    names = [worker.ask("open", cache="c", name=name, url=url, namespace="mine") for name in ("one", "two", "wide")]
    assert names[0] == names[1] != names[2]


def test_weights_that_change_in_place_are_noticed(worker: Remote, url: str) -> None:
    worker.ask("make", name="m", kind="llama")
    worker.ask("open", cache="c", name="m", url=url)
    worker.ask("generate", cache="c", ids=[prompt(21)])
    worker.ask("touch", name="m")
    with pytest.raises(RemoteError, match="MisuseError: the model's weights have changed"):
        worker.ask("generate", cache="c", ids=[prompt(21)])
    worker.ask("close", cache="c")
    worker.ask("open", cache="c", name="m", url=url)
    assert worker.ask("generate", cache="c", ids=[prompt(21)])["restored"] == 0
    worker.ask("close", cache="c")


@pytest.mark.parametrize(
    ("kind", "sizes", "what"),
    [
        ("qwen3_next", {}, "LinearAttentionLayer"),
        ("t5", {}, "encoder"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "RoPE of type dynamic",
        ),
    ],
)
def test_models_that_keep_no_plain_tokens_are_refused_by_name(
    worker: Remote, url: str, kind: str, sizes: dict[str, Any], what: str
) -> None:
    worker.ask("make", name="m", kind=kind, **sizes)
    with pytest.raises(RemoteError, match=f"ConfigError: .*{what}"):
        worker.ask("open", cache="c", name="m", url=url)


def test_what_would_not_be_right_is_refused(worker: Remote, url: str) -> None:
    worker.ask("make", name="m", kind="llama")
    worker.ask("open", cache="c", name="m", url=url)
    for options, what in (
        ({"num_beams": 2}, "num_beams=2"),
        ({"num_return_sequences": 2}, "num_return_sequences=2"),
        ({"use_cache": False}, "use_cache=False"),
        ({"prefill_chunk_size": 64}, "prefill_chunk_size=64"),
        ({"past_key_values": []}, "leave it out"),
        ({"token_type_ids": [[0]]}, "token_type_ids may change"),
        ({"mask": [[1, 1, 1, 0]]}, "left"),
        ({"mask": [[1, 1]]}, "shape"),
    ):
        with pytest.raises(RemoteError, match=f"MisuseError: .*{what}"):
            worker.ask("generate", cache="c", ids=[prompt(22, 4)], **options)
    with pytest.raises(RemoteError, match="MisuseError: input_ids holds the padding token 0"):
        worker.ask("generate", cache="c", ids=[[0, 5, 6, 7]])
    with pytest.raises(RemoteError, match="MisuseError: inputs_embeds may change"):
        worker.ask("embeds", cache="c")
    worker.ask("train", name="m", on=True)
    with pytest.raises(RemoteError, match=r"MisuseError: .*model\.eval"):
        worker.ask("generate", cache="c", ids=[prompt(22, 4)])
    worker.ask("close", cache="c")


@pytest.mark.parametrize("how", ["flipped", "truncated", "removed"])
def test_damaged_files_are_computed_and_kept_anew(worker: Remote, tmp_path: Path, url: str, how: str) -> None:
    worker.ask("make", name="m", kind="qwen3")
    context = [prompt(23)]
    right = worker.ask("plain", name="m", ids=context)
    worker.ask("open", cache="c", name="m", url=url)
    worker.ask("generate", cache="c", ids=context)
    worker.ask("close", cache="c")
    damage(tmp_path / "pool", how)
    worker.ask("open", cache="c", name="m", url=url)
    answer = worker.ask("generate", cache="c", ids=context)
    assert answer["tokens"] == right
    assert answer["restored"] < 320
    assert bool(worker.ask("stats", cache="c")["lost"]) == (how != "removed"), (
        "files that are gone are seen at the start"
    )
    assert worker.ask("generate", cache="c", ids=context) == {"tokens": right, "restored": 320}
    worker.ask("close", cache="c")


def test_a_full_pool_refuses_and_counts(worker: Remote, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    worker.ask("make", name="m", kind="qwen3", num_hidden_layers=16)
    worker.ask("open", cache="c", name="m", url=f"file://{tmp_path / 'small'}?capacity=16MiB&save_queue=1MiB")
    context = [prompt(24, 900)]
    right = worker.ask("plain", name="m", ids=context)
    assert worker.ask("generate", cache="c", ids=context)["tokens"] == right
    found = worker.ask("stats", cache="c")
    assert found["lost"].get("save refused_budget", 0) + found["kept"] == 28
    assert found["lost"]
    assert worker.ask("generate", cache="c", ids=context)["tokens"] == right
    worker.ask("close", cache="c")
