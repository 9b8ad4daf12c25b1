"""Sessions of a job: the blocks that each one restores, their lengths, their keys, and a number that no other has.

Everything follows from the model and the seed, so that a run can be repeated and its bytes checked without keeping
them. Sessions share nothing: every one has its own prefix, the hard case of cold recovery.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from rewarm.errors import ConfigError
from rewarm.geometry.dtypes import DType
from rewarm.geometry.model import LayerKind, Model
from rewarm.geometry.parallel import RankShape, rank_shapes

KEY_BYTES = 32


@dataclass(frozen=True)
class Sessions:
    """`count` sessions that all have blocks of the same `lengths`: bytes of each stored block, in prefix order."""

    seed: int
    count: int
    lengths: tuple[int, ...]

    @property
    def bytes_per_session(self) -> int:
        """Payload bytes that one session stores and restores, all ranks together."""
        return sum(self.lengths)

    @property
    def bytes_total(self) -> int:
        """Payload bytes of all sessions."""
        return self.count * self.bytes_per_session

    def numbers(self, session: int) -> Sequence[int]:
        """The numbers of a session's stored blocks, in prefix order."""
        if not 0 <= session < self.count:
            raise IndexError(f"session {session} of {self.count}")
        return range(session * len(self.lengths), (session + 1) * len(self.lengths))

    def keys(self, session: int) -> list[bytes]:
        """The keys of a session's stored blocks, in the order of `numbers`."""
        return [self._key(number) for number in self.numbers(session)]

    def _key(self, number: int) -> bytes:
        text = struct.pack("<QQ", self.seed, number)
        return hashlib.blake2b(text, digest_size=KEY_BYTES, person=b"rewarm session").digest()


@dataclass(frozen=True)
class RankSessions(Sessions):
    """What one rank stores and restores of the sessions: the blocks at `places` among the `stride` of a session.

    `lengths` are those of its own blocks; keys and numbers are those that the whole sessions have.
    """

    stride: int
    places: tuple[int, ...]

    def numbers(self, session: int) -> Sequence[int]:
        """The numbers of this rank's blocks of a session, in prefix order."""
        if not 0 <= session < self.count:
            raise IndexError(f"session {session} of {self.count}")
        return [session * self.stride + place for place in self.places]


def of_rank(sessions: Sessions, ranks: Sequence[int], rank: int) -> RankSessions:
    """The part of the sessions that a rank stores; `ranks` names the rank of every block, as `block_ranks` does."""
    places = tuple(place for place, owner in enumerate(ranks) if owner == rank)
    lengths = tuple(sessions.lengths[place] for place in places)
    return RankSessions(sessions.seed, sessions.count, lengths, len(sessions.lengths), places)


def block_lengths(model: Model, tokens: int, block_tokens: int, tp: int, kv_dtype: DType | str | None) -> list[int]:
    """Bytes of every block that an engine stores for a prefix of `tokens`, in prefix order, ranks side by side.

    Whole token blocks only: the rest is always computed. What several ranks hold alike is stored and read once. A
    window layer keeps the blocks that its window still reaches, a linear layer one state with the last block.
    Raises `ConfigError` when there is not one whole block.
    """
    return [length for _, length in _blocks(model, tokens, block_tokens, tp, kv_dtype)]


def block_ranks(model: Model, tokens: int, block_tokens: int, tp: int, kv_dtype: DType | str | None) -> list[int]:
    """The rank that stores and restores each block of `block_lengths`."""
    return [rank for rank, _ in _blocks(model, tokens, block_tokens, tp, kv_dtype)]


def _blocks(
    model: Model, tokens: int, block_tokens: int, tp: int, kv_dtype: DType | str | None
) -> list[tuple[int, int]]:
    """(rank, bytes) of every stored block."""
    blocks = tokens // block_tokens
    if blocks < 1:
        raise ConfigError(f"{tokens} tokens are less than one block of {block_tokens}; nothing would be stored")
    ranks = [
        rank for rank in rank_shapes(model, tp, block_tokens=block_tokens, kv_dtype=kv_dtype) if rank.replica_of is None
    ]
    found = [(rank.rank, _stored(rank, block, blocks)) for block in range(blocks) for rank in ranks]
    return [(rank, length) for rank, length in found if length]


def _stored(rank: RankShape, block: int, blocks: int) -> int:
    """Bytes of one token block on one rank."""
    tokens_after = (blocks - block - 1) * (rank.groups[0].block_tokens if rank.groups else 0)
    attention = sum(
        group.block_bytes for group in rank.groups if group.kind is not LayerKind.SLIDING or tokens_after < group.window
    )
    return attention + (rank.state_bytes if block == blocks - 1 else 0)
