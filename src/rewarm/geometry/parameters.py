"""Estimates the weights that one token is multiplied with, from the fields of a configuration.

Counted as gpt-oss counts its active parameters: attention projections, the dense or the chosen and shared experts'
gated MLP (3 h i), routers, and the output head; the input embedding is a lookup and is not counted, nor are norms and
biases. With h the hidden size:

* grouped attention   h H_q d + 2 h H_kv d + H_q d h (one more h H_q d where the output is gated)
* latent attention    query h r_q + r_q H d_qk (or h H d_qk), key/value h (r_kv + d_rope) + r_kv H (d_nope + d_v),
                      output H d_v h
* sparse indexer      r_q H_idx d_idx + h d_idx + h H_idx
* gated delta net     h (2 H_k d_k + 2 H_v d_v + 2 H_v) + H_v d_v h
* mixture of experts  top_k x 3 h i_moe + shared 3 h i_shared + h experts; dense layers 3 h i

It comes out within 8 % of the published counts, mostly under them; presets carry those instead. Where a field is
missing there is no estimate: None.
"""

from __future__ import annotations

from rewarm.geometry.fields import EXPERTS_MAX, LAYERS_MAX, Fields
from rewarm.geometry.model import Layer, LayerKind


def active_parameters(fields: Fields, layers: tuple[Layer, ...], *, experts: bool, gated_output: bool) -> int | None:
    """The estimate, or None when the fields do not say enough. `experts`: the architecture has some."""
    hidden = fields.maybe("hidden_size")
    vocabulary = fields.maybe("vocab_size")
    if hidden is None or vocabulary is None:
        return None
    total = hidden * vocabulary
    sparse = _expert_layers(fields, len(layers)) if experts else frozenset()
    dense_mlp = _dense_mlp(fields, hidden) if len(sparse) < len(layers) else 0
    sparse_mlp = _sparse_mlp(fields, hidden) if sparse else 0
    for index, layer in enumerate(layers):
        mlp = sparse_mlp if index in sparse else dense_mlp
        attention = _attention(fields, layer, hidden, gated_output)
        if mlp is None or attention is None:
            return None
        total += mlp + attention
    return total


def _attention(fields: Fields, layer: Layer, hidden: int, gated_output: bool) -> int | None:
    match layer.kind:
        case LayerKind.MLA:
            return _latent_attention(fields, layer, hidden)
        case LayerKind.LINEAR:
            keys, values = layer.query_heads * layer.key_dim, layer.kv_heads * layer.value_dim
            return hidden * (2 * keys + 2 * values + 2 * layer.kv_heads) + values * hidden
        case _:
            query, output = layer.query_heads * layer.key_dim, layer.query_heads * layer.value_dim
            shared = layer.kv_heads * (layer.key_dim + layer.value_dim)
            return hidden * (query * (2 if gated_output else 1) + shared + output)


def _latent_attention(fields: Fields, layer: Layer, hidden: int) -> int | None:
    rank = fields.maybe("q_lora_rank")
    if layer.index_dim and rank is None:
        return None
    heads, queries = layer.query_heads, layer.query_heads * layer.key_dim
    query = hidden * queries if rank is None else rank * (hidden + queries)
    expand = layer.latent_dim * heads * (layer.key_dim - layer.rope_dim + layer.value_dim)
    indexer = (rank or 0) * layer.index_heads * layer.index_dim + hidden * (layer.index_dim + layer.index_heads)
    return query + hidden * (layer.latent_dim + layer.rope_dim) + expand + heads * layer.value_dim * hidden + indexer


def _dense_mlp(fields: Fields, hidden: int) -> int | None:
    width = fields.maybe("intermediate_size")
    return None if width is None else 3 * hidden * width


def _sparse_mlp(fields: Fields, hidden: int) -> int | None:
    experts = fields.maybe("num_experts", "num_local_experts", "n_routed_experts", most=EXPERTS_MAX)
    chosen = fields.maybe("num_experts_per_tok", "experts_per_token", most=EXPERTS_MAX)
    width = fields.maybe("moe_intermediate_size", "intermediate_size")
    if experts is None or chosen is None or width is None:
        return None
    if chosen > experts:
        raise fields.refuse("num_experts_per_tok", f"({chosen}) is more than the number of experts ({experts})")
    shared = fields.maybe("shared_expert_intermediate_size", least=0)
    if shared is None:
        shared = (fields.maybe("n_shared_experts", most=EXPERTS_MAX, least=0) or 0) * width
    return 3 * hidden * (chosen * width + shared) + hidden * experts


def _expert_layers(fields: Fields, count: int) -> frozenset[int]:
    """Indexes of the layers whose MLP is a mixture of experts."""
    first = fields.count_or("first_k_dense_replace", 0, LAYERS_MAX, least=0)
    step = fields.count_or("decoder_sparse_step", 1, LAYERS_MAX)
    dense = fields.indexes("mlp_only_layers", count)
    return frozenset(i for i in range(first, count) if (i + 1) % step == 0 and i not in dense)
