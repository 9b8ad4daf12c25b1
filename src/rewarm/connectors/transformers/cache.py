"""`PrefixCache`: restores the longest kept prefix of a prompt before `generate`, and keeps what was computed after it.

It promises that KV of other weights, another configuration, dtype or attention is never used; that blocks come back
verified or are computed; and that nothing on the way raises but misuse: what the storage does not give within the
deadline is computed, counted and logged. One thread at a time, as the model itself.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from rewarm.connectors.common import Failures
from rewarm.connectors.transformers import layers, prompts
from rewarm.connectors.transformers.identity import check_model, namespace_of, stamp
from rewarm.errors import ConfigError, MisuseError
from rewarm.geometry.parallel import BLOCK_TOKENS_MAX
from rewarm.store.contract import Stats, Store, Transfer
from rewarm.tiers.opening import open_tier
from rewarm.units import parse_duration

torch: Any = importlib.import_module("torch")
log = logging.getLogger("rewarm.transformers")

BLOCK_TOKENS = 64
"""Whole blocks are kept: smaller ones reuse more of a prompt, larger ones read faster."""
DEADLINE = "10s"
"""A restore that takes longer is given up, and the prompt computed."""
ATTEMPTS = 3
"""How often a shorter prefix is tried after blocks turned out to be damaged."""


class PrefixStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the cache was opened, in tokens of prompts and blocks of the store."""

    prompts: int
    prompt_tokens: int
    restored_tokens: int
    kept_blocks: int
    lost: dict[str, int]
    """Blocks that were neither restored nor kept, by verb and cause."""
    store: Stats


class PrefixCache:
    """The kept prefixes of one model. A context manager, or call `close`."""

    def __init__(
        self,
        url: str,
        model: Any,
        *,
        namespace: str | None = None,
        block_tokens: int = BLOCK_TOKENS,
        deadline: str | float = DEADLINE,
    ) -> None:
        """Open the store at `url` for a loaded model. Runs two tokens through it and reads samples of its weights.

        `namespace` stands for weights and configuration in place of the model's own; you answer for what shares it.
        Raises `ConfigError` (the URL, a model that is not supported) and `StorageError`.
        """
        if not 1 <= block_tokens <= BLOCK_TOKENS_MAX:
            raise ConfigError(f"block_tokens must be from 1 to {BLOCK_TOKENS_MAX}, got {block_tokens}")
        self._deadline_s = parse_duration(deadline)
        check_model(model)
        self._check_mode(model)
        self._model = model
        self._block_tokens = block_tokens
        self._groups = layers.groups_of(model, block_tokens)
        self.namespace = namespace_of(model, layers.describe(self._groups), block_tokens, namespace)
        self._stamp = stamp(model)
        self._known = set(inspect.signature(model.generate).parameters) | {"attention_mask"}
        self._store: Store = open_tier(url, namespace=self.namespace, block_tokens=block_tokens)
        self._saving: deque[Transfer] = deque()
        self._count: Counter[str] = Counter()
        self._failures = Failures(log)

    # The obvious way.

    def generate(self, input_ids: Any, attention_mask: Any = None, **options: Any) -> Any:
        """`model.generate` with the same arguments and answer, after a restore; prompt and answer are kept afterwards.

        Raises `MisuseError` for inputs beside tokens (images, embeddings), beams, several answers to a prompt, and
        options that handle the cache in their own way.
        """
        config = options.get("generation_config") or self._model.generation_config
        prompts.check_options(options, config, self._known)
        past = self.restore(input_ids, attention_mask)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        output = self._model.generate(input_ids, attention_mask=mask, past_key_values=past, **options)
        self.keep(output if isinstance(output, torch.Tensor) else output.sequences, past, attention_mask)
        return output

    # Its two halves.

    def restore(self, input_ids: Any, attention_mask: Any = None) -> Any:
        """A cache for `model.generate(input_ids, past_key_values=..)` that holds the longest kept prefix, or nothing.

        `input_ids` has shape (rows, columns). At least the last column is left to compute. With padding on the left
        the shortest hit decides, because all rows of a cache have one length.
        """
        self._check_model()
        pad_token = getattr(self._model.generation_config, "pad_token_id", None)
        rows = prompts.rows_of(input_ids, attention_mask, pad_token)
        cache = layers.new_cache(self._model)
        columns = self._fill(cache, rows, input_ids.shape[1] - 1)
        self._count.update(
            prompts=len(rows),
            prompt_tokens=sum(len(row.tokens) for row in rows),
            restored_tokens=sum(max(0, columns - row.padding) for row in rows),
        )
        return cache

    def keep(self, input_ids: Any, cache: Any, attention_mask: Any = None) -> int:
        """Queue every whole block of these tokens that a cache holds and the store does not; returns how many.

        `input_ids` may be longer than the prompt that `attention_mask` covers: the answer follows it.
        """
        self._check_model()
        rows = prompts.rows_of(input_ids, _longer(attention_mask, input_ids))
        columns = min(cache.get_seq_length(), input_ids.shape[1])
        queued = 0
        for number, row in enumerate(rows):
            keys = row.keys(self._block_tokens)[: max(0, columns - row.padding) // self._block_tokens]
            queued += sum(self._keep_group(group, keys, cache, number, row.padding) for group in self._groups)
        self._settle(0)
        return queued

    def flush(self) -> None:
        """Wait until everything kept so far is on the medium."""
        self._store.flush()
        self._settle(None)

    def stats(self) -> PrefixStats:
        """Counters since open."""
        self._settle(0)
        return PrefixStats(
            prompts=self._count["prompts"],
            prompt_tokens=self._count["prompt_tokens"],
            restored_tokens=self._count["restored_tokens"],
            kept_blocks=self._count["kept"],
            lost=dict(self._failures.counts),
            store=self._store.stats(),
        )

    def close(self) -> None:
        """Finish what is queued within a bounded time and give the store back."""
        self._store.close()
        self._settle(0)

    def __enter__(self) -> PrefixCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Restoring.

    def _fill(self, cache: Any, rows: Sequence[prompts.Row], most: int) -> int:
        """Fill a cache with the longest prefix of at most `most` columns; the columns."""
        end_s = time.monotonic() + self._deadline_s
        names = [row.keys(self._block_tokens) for row in rows]
        held = [[self._held(keys, group) for group in self._groups] for keys in names]
        for _ in range(ATTEMPTS):
            columns = self._columns(rows, held, most)
            tokens = [max(0, columns - row.padding) for row in rows]
            if not any(tokens):
                return 0
            regions = self._load(names, held, tokens, end_s)
            if regions is not None:
                for group, of_group in zip(self._groups, regions, strict=True):
                    layers.fill(group, cache, of_group, tokens, columns)
                return columns
        return 0

    def _held(self, keys: Sequence[bytes], group: layers.Group) -> Any:
        return self._store.lookup([key + group.suffix for key in keys]).mask.copy()

    def _columns(self, rows: Sequence[prompts.Row], held: Sequence[Sequence[Any]], most: int) -> int:
        """Columns that every row can restore up to: lowered until all rows agree, which ends at 0 at the latest."""
        columns = most
        while columns > 0:
            able = min(
                row.padding + self._able(masks, columns - row.padding) if columns > row.padding else columns
                for row, masks in zip(rows, held, strict=True)
            )
            if able == columns:
                break
            columns = able
        return columns

    def _able(self, masks: Sequence[Any], tokens: int) -> int:
        """The longest prefix of at most `tokens` of which every block that is needed is held."""
        while tokens > 0:
            last = -(-tokens // self._block_tokens)
            if all(
                last <= len(mask) and mask[group.first(tokens) : last].all()
                for group, mask in zip(self._groups, masks, strict=True)
            ):
                break
            tokens = (last - 1) * self._block_tokens
        return tokens

    def _load(
        self, names: Sequence[Sequence[bytes]], held: Sequence[Sequence[Any]], tokens: Sequence[int], end_s: float
    ) -> list[list[Any]] | None:
        """A region for each group and row; None when blocks did not come, which `held` then no longer lists."""
        wanted: list[tuple[int, int, int]] = []
        regions: list[list[Any]] = []
        buffers: list[Any] = []
        for at, group in enumerate(self._groups):
            regions.append([])
            for row, count in enumerate(tokens):
                blocks = range(group.first(count), -(-count // self._block_tokens))
                region = group.region(len(blocks))
                regions[-1].append(region)
                buffers.extend(region.numpy())
                wanted.extend((row, at, block) for block in blocks)
        keys = [names[row][block] + self._groups[at].suffix for row, at, block in wanted]
        transfer = self._store.load(keys, buffers)
        good = transfer.wait(max(0.0, end_s - time.monotonic()))
        if all(good):
            return regions
        for (row, at, block), ok in zip(wanted, good, strict=True):
            held[row][at][block] &= ok
        self._failures.note_outcomes("load", transfer.outcomes)
        return None

    # Keeping.

    def _keep_group(self, group: layers.Group, keys: Sequence[bytes], cache: Any, row: int, padding: int) -> int:
        """Queue the blocks of one row and group that the cache holds whole and the store does not."""
        first = -(-max(0, layers.kept_from(group, cache) - padding) // self._block_tokens)
        missing = [int(block) for block in np.flatnonzero(~self._held(keys, group)) if block >= first]
        if not missing:
            return 0
        start = missing[0]
        region = group.region(len(keys) - start)
        layers.pack(group, cache, row, padding + start * self._block_tokens, region)
        blocks = region.numpy()
        names = [keys[block] + group.suffix for block in missing]
        self._saving.append(self._store.save(names, [blocks[block - start] for block in missing]))
        return len(missing)

    def _settle(self, timeout_s: float | None) -> None:
        """Count the saves that have ended; with a timeout of None wait for all of them."""
        while self._saving and (timeout_s is None or self._saving[0].done()):
            transfer = self._saving.popleft()
            self._count["kept"] += sum(transfer.wait())
            self._failures.note_outcomes("save", transfer.outcomes)

    # What must not have changed.

    def _check_model(self) -> None:
        self._check_mode(self._model)
        if stamp(self._model) != self._stamp:
            raise MisuseError("the model's weights have changed since the cache was opened: open another one")

    @staticmethod
    def _check_mode(model: Any) -> None:
        if model.training:
            raise MisuseError("the model is in training mode, where the same tokens give other KV: call model.eval()")


def _longer(mask: Any, input_ids: Any) -> Any:
    """A prompt's mask, continued over the answer."""
    if mask is None or mask.shape == input_ids.shape:
        return mask
    more = input_ids.shape[1] - mask.shape[1]
    return torch.nn.functional.pad(mask, (0, more), value=1) if more > 0 else mask
