"""A small hybrid decoder with random weights: the reference engine's model, made to prove a cache right to the bit.

Full-attention, sliding-window and gated-delta-rule layers over the pages and state slots of an engine's L1 pool.
Float32 on the CPU, one thread. Logits, pages and states are bit-identical however a sequence is cut into calls,
wherever it is resumed, and whether its tokens came from a prompt, from greedy decode or from accepted drafts:

- The sequence is computed in blocks of ``block_tokens`` at absolute multiples of it. A call over a part of a block
  runs the whole shape, with rubbish or padding in the other rows. All products have fixed shapes, so a row is summed
  in the same order whatever the rows beside it hold, and a token is always in the same row.
- Full attention reads its context in blocks of ``context_block_tokens`` at absolute multiples, sliding attention in
  one block of fixed width. Rows that must not count have weight 0.0 and a finite value: they add nothing.
- The delta rule runs token by token, with the same operations in the same shapes in prefill, decode and replay.
- Operands are private and contiguous: the pool's strides, alignment and unwritten rows do not reach the arithmetic.

Bits may differ between machines and torch versions; within one they do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from bench import tiny_ring as ring
from bench.tiny_attention import PagedAttention, Rope
from bench.tiny_config import GROUP_NAMES, BlockRows, LayerKind, SequenceView, TinyConfig
from bench.tiny_gdn import GatedDelta, LayerState
from hicache.errors import ConfigError, StateNotCommitted, UsageError
from hicache.spec import CacheSpec

__all__ = ["BoundaryStates", "SequenceView", "TinyConfig", "TinyHybrid"]

# Small beside what the layers add: the past says more about the next token than the last one alone.
EMBEDDING_SCALE = 0.3

# By number of tokens: the persistent state fields after them, [layers, *shape] each.
BoundaryStates: TypeAlias = dict[int, dict[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Layer:
    """One decoder layer: a mixer, then a gated MLP, each on the normalised residual stream."""

    kind: LayerKind
    kind_index: int  # which layer of its group it is
    mixer: PagedAttention | GatedDelta
    gate_up: torch.Tensor  # [hidden, 2 * mlp_hidden]
    down: torch.Tensor  # [mlp_hidden, hidden]


class TinyHybrid:
    """The model: weights, and functions over sequences that live in somebody's pools. Holds no sequence itself.

    Raises ConfigError unless torch runs on one thread: more would cut sums elsewhere.
    """

    def __init__(self, config: TinyConfig, seed: int) -> None:
        if torch.get_num_threads() != 1:
            raise ConfigError("torch threads", torch.get_num_threads(), "1: call torch.set_num_threads(1) first")
        self.config = config
        self.seed = seed
        generator = torch.Generator().manual_seed(seed)
        self._rope = Rope(config)
        self._embedding = torch.randn(config.vocab, config.hidden, generator=generator) * EMBEDDING_SCALE
        self._layers = [self._make_layer(index, generator) for index in range(len(config.layers))]
        self._head = torch.randn(config.hidden, config.vocab, generator=generator) * config.hidden**-0.5

    def spec(self, *, revision: str | None = None) -> CacheSpec:
        """What this model keeps in a cache. The seed stands for the weights unless ``revision`` names them."""
        return self.config.cache_spec(revision=f"seed-{self.seed}" if revision is None else revision)

    def advance(
        self, view: SequenceView, tokens: Sequence[int], position: int, *, boundaries: BoundaryStates | None = None
    ) -> torch.Tensor:
        """Computes ``tokens`` at ``position`` and after; the state moves with them. Returns the last one's logits.

        Writes their rows of the pages and the conv and temporal state of the slot. Adds the state at every page
        boundary passed to ``boundaries``. Raises StateNotCommitted while updates are pending: the state is elsewhere.
        """
        if pending := ring.pending_count(view):
            raise StateNotCommitted(f"{pending} tokens are pending in the ring of slot {view.slot}: fold first")
        layers = ring.read_layers(view)
        if boundaries is not None:
            for layer in layers:
                layer.boundaries = {}
        with torch.inference_mode():
            logits = self._run(view, tokens, position, layers, logit_rows=1)
            ring.write_layers(view, layers)
        if boundaries is not None and layers:
            _collect_boundaries(layers, boundaries)
        return logits[0]

    def draft(self, view: SequenceView, tokens: Sequence[int], position: int) -> torch.Tensor:
        """Computes ``tokens`` tentatively, after what is pending. Returns the logits of each, [len(tokens), vocab].

        Writes their rows of the pages and appends what they bring to the ring; the conv and temporal state stay.
        Raises UsageError when the ring has no room for them: nothing has changed then.
        """
        pending = ring.pending_count(view)
        if pending + len(tokens) > self.config.ring_tokens:
            raise UsageError(f"{pending} + {len(tokens)} tokens exceed ring_tokens = {self.config.ring_tokens}")
        layers = ring.read_layers(view)
        with torch.inference_mode():
            ring.replay(view, layers)
            for layer in layers:
                layer.drafts = []
            logits = self._run(view, tokens, position, layers, logit_rows=len(tokens))
            ring.append(view, layers)
        return logits

    def pending(self, view: SequenceView) -> int:
        """Tokens in the ring, accepted or open. 0: the state is committed."""
        return ring.pending_count(view)

    def keep(self, view: SequenceView, pending: int) -> None:
        """Drops all pending tokens after the first ``pending`` ones: rejected drafts. Raises UsageError if too many."""
        ring.set_pending(view, pending)

    def fold(self, view: SequenceView) -> None:
        """Replays everything pending into the conv and temporal state. The ring is empty afterwards."""
        if not ring.pending_count(view):
            return
        layers = ring.read_layers(view)
        with torch.inference_mode():
            ring.replay(view, layers)
            ring.write_layers(view, layers)

    def _make_layer(self, index: int, generator: torch.Generator) -> _Layer:
        config = self.config
        kind = config.layers[index]
        mixer: PagedAttention | GatedDelta
        if kind == "gdn":
            mixer = GatedDelta(config, generator)
        else:
            mixer = PagedAttention(config, self._rope, generator, sliding=kind == "swa")
        gate_up = torch.randn(config.hidden, 2 * config.mlp_hidden, generator=generator) * config.hidden**-0.5
        down = torch.randn(config.mlp_hidden, config.hidden, generator=generator) * config.mlp_hidden**-0.5
        return _Layer(kind, config.layer_ids(kind).index(index), mixer, gate_up, down)

    def _run(
        self, view: SequenceView, tokens: Sequence[int], position: int, states: list[LayerState], *, logit_rows: int
    ) -> torch.Tensor:
        """Runs the blocks that hold ``tokens``. Returns the logits of the last ``logit_rows`` of them."""
        assert tokens, "nothing to compute"
        end, block = position + len(tokens), self.config.block_tokens
        if end > self.config.tokens_max:
            raise UsageError(f"{end} tokens exceed tokens_max = {self.config.tokens_max}")
        logits: list[torch.Tensor] = []
        for start in range(position // block * block, end, block):
            rows = BlockRows(start, max(start, position), min(start + block, end))
            hidden = self._run_block(view, tokens[rows.first - position : rows.end - position], rows, states)
            first_wanted = max(rows.first, end - logit_rows)
            if first_wanted < rows.end:
                block_logits = self._normed(hidden) @ self._head
                logits.append(block_logits[first_wanted - start : rows.end - start])
        return torch.cat(logits)

    def _run_block(
        self, view: SequenceView, tokens: Sequence[int], rows: BlockRows, states: list[LayerState]
    ) -> torch.Tensor:
        """The residual stream of one block after all layers, [block_tokens, hidden]."""
        padded = torch.zeros(self.config.block_tokens, dtype=torch.int64)
        padded[rows.first - rows.start : rows.end - rows.start] = torch.tensor(tokens)
        hidden = self._embedding[padded]
        for layer in self._layers:
            normed = self._normed(hidden)
            if isinstance(layer.mixer, GatedDelta):
                mixed = layer.mixer(normed, rows, states[layer.kind_index])
            else:
                group = GROUP_NAMES[layer.kind]
                mixed = layer.mixer(normed, rows, view.pages[group][layer.kind_index], view.tables[group])
            hidden = hidden + mixed
            gate, up = (self._normed(hidden) @ layer.gate_up).chunk(2, dim=1)
            hidden = hidden + (torch.nn.functional.silu(gate) * up) @ layer.down
        return hidden

    def _normed(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.rms_norm(hidden, (self.config.hidden,), eps=1e-6)


def _collect_boundaries(layers: Sequence[LayerState], boundaries: BoundaryStates) -> None:
    """Joins what the layers kept at each boundary."""
    kept = [layer.boundaries or {} for layer in layers]
    for tokens in kept[0]:
        conv, temporal = zip(*(layer[tokens] for layer in kept), strict=True)
        boundaries[tokens] = {"conv": torch.stack(conv), "temporal": torch.stack(temporal)}
