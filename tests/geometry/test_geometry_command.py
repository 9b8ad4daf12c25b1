"""`rewarm geometry` as its users run it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rewarm.cli import main

CONFIGS = Path(__file__).parent / "configs"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["geometry", *arguments], prog_name="rewarm")


def answer(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    loaded: dict[str, Any] = json.loads(result.stdout)
    return loaded


def test_the_json_of_a_preset() -> None:
    told = answer("qwen3-coder-480b", "--tokens", "30208", "--tp", "8", "--block-tokens", "256")
    assert told["model"] == "Qwen3-Coder-480B-A35B"
    assert told["architecture"] == "Qwen3MoeForCausalLM"
    assert told["bytes_per_token"] == 2 * 62 * 8 * 128 * 2 == 253_952
    assert told["bytes_per_rank_token"] == 253_952 // 8
    assert told["bytes_total"] == 7_671_382_016
    assert told["bytes_per_rank_total"] == 7_671_382_016 // 8
    assert (told["block_tokens"], told["block_bytes"]) == (256, 256 * 253_952)
    assert told["block_bytes_per_rank"] == 32 * 253_952
    assert (told["kv_dtype"], told["tp"], told["pp"], told["tokens"]) == ("bf16", 8, 1, 30_208)
    assert told["layers"] == [
        {"kind": "full", "layers": 62, "window": None, "bytes_per_token": 253_952, "state_bytes": 0}
    ]


def test_the_total_is_null_without_tokens() -> None:
    told = answer("Llama-3.1-8B")
    assert told["bytes_total"] is None
    assert told["bytes_per_rank_total"] is None
    assert answer("Llama-3.1-8B", "--tokens", "0")["bytes_total"] == 0


def test_a_configuration_file_or_its_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((CONFIGS / "mixtral.json").read_text())
    from_file, from_directory = answer(str(tmp_path / "config.json")), answer(str(tmp_path))
    assert from_file == from_directory
    assert from_file["bytes_per_token"] == 2 * 32 * 8 * 128 * 2


def test_dtypes_and_the_precision_of_an_indexer() -> None:
    assert answer("DeepSeek-V3.2")["bytes_per_token"] == 85_888
    told = answer("DeepSeek-V3.2", "--kv-dtype", "fp8_e4m3", "--index-dtype", "fp8")
    assert told["bytes_per_token"] == 61 * (512 + 64 + 128)
    assert (told["kv_dtype"], told["index_dtype"]) == ("fp8", "fp8")
    assert answer("Llama-3.1-8B", "--kv-dtype", "float16")["kv_dtype"] == "fp16"
    assert answer("Llama-3.1-8B")["index_dtype"] is None


def test_a_latent_and_replicated_heads_are_explained() -> None:
    latent = answer("DeepSeek-V3", "--tp", "8")
    assert latent["bytes_per_rank_token"] == latent["bytes_per_token"] == 70_272
    assert "store it once" in latent["notes"][0]
    replicated = answer("Qwen3-235B-A22B", "--tp", "8")
    assert replicated["bytes_per_rank_token"] == 192_512 // 4
    assert replicated["notes"] == ["4 key/value heads on 8 ranks: each head is held by 2 ranks"]
    assert answer("Qwen3-235B-A22B", "--tp", "4")["notes"] == []


def test_windows_and_states_are_explained_to_people() -> None:
    text = " ".join(run("gemma-3-27b", "--tokens", "30208").stdout.split())
    assert "the last 1,024 tokens" in text
    assert "81,920 B" in text
    assert f"{2 * 16 * 128 * 2 * (10 * 30_208 + 52 * 1024):,} B" in text
    assert "note: 52 of 62 layers keep the last 1,024 tokens only" in text
    hybrid = " ".join(run("Qwen3-Next-80B-A3B").stdout.split())
    assert "note: 36 of 48 layers keep a state of" in hybrid
    assert "again only at the positions where it was stored" in hybrid


def test_more_tokens_than_the_context_is_a_note() -> None:
    told = answer("Qwen3-32B", "--tokens", "50000")
    assert told["notes"] == ["50,000 tokens are more than the context the model names, 40,960"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Qwen3-33B"], "did you mean 'Qwen3-32B'?"),
        (["no/such/config.json"], "no such file"),
        (["Qwen3-8B", "--tp", "3"], "tp=3 does not divide the 32 attention heads"),
        (["Qwen3-8B", "--pp", "99"], "has more stages than"),
        (["Qwen3-8B", "--kv-dtype", "bf61"], "did you mean 'bf16'?"),
        (["Qwen3-8B", "--tp", "0"], "--tp"),
        (["Qwen3-8B", "--tokens", "many"], "--tokens"),
        (["Qwen3-8B", "--tokens", str(10**15)], "tokens must be a whole number"),
        (["Qwen3-8B", "--tokns", "1"], "--tokens"),
        ([], "MODEL"),
    ],
)
def test_mistakes_are_usage_errors_that_say_what_to_do(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert result.stdout == ""


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["JambaForCausalLM"], "model_type": "jamba"}')
    result = run(str(tmp_path), "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "architecture 'JambaForCausalLM' is not understood" in result.stderr
