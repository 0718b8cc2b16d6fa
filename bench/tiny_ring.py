"""A ReplaySSM ring in a state slot: updates of tokens that the temporal state does not contain yet.

``[0, pending) updates, oldest first | [pending, ring_tokens) rubbish``. The temporal and conv states stay at the
position before the first pending token until everything is replayed; a rejected draft is a smaller count. The count
lives in the slot, as a transient field: a restore that does not reset it would replay another request's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from bench.tiny_config import SequenceView
from bench.tiny_gdn import LayerState, Update
from hicache.errors import UsageError


def pending_count(view: SequenceView) -> int:
    """Updates in the ring. 0: the state is that of all tokens so far."""
    return int(view.state["ring_count"][0, view.slot, 0]) if view.state else 0


def set_pending(view: SequenceView, count: int) -> None:
    """Keeps the first ``count`` pending updates. Raises UsageError if there are fewer; then nothing changes.

    A model without recurrent layers has nothing to keep.
    """
    if not view.state:
        return
    held = pending_count(view)
    if not 0 <= count <= held:
        raise UsageError(f"cannot keep {count} of {held} pending updates")
    _write_count(view, count)


def read_layers(view: SequenceView) -> list[LayerState]:
    """Working copies of the state of every recurrent layer, without what is pending."""
    if not view.state:
        return []
    conv, temporal = (view.state[name][:, view.read_slot] for name in ("conv", "temporal"))
    return [LayerState(conv[layer].clone(), temporal[layer].clone()) for layer in range(len(conv))]


def write_layers(view: SequenceView, layers: Sequence[LayerState]) -> None:
    """Makes ``layers`` the state of the sequence and the ring empty."""
    for layer, state in enumerate(layers):
        view.state["conv"][layer, view.slot] = state.conv
        view.state["temporal"][layer, view.slot] = state.temporal
    if view.state:
        _write_count(view, 0)


def replay(view: SequenceView, layers: Sequence[LayerState]) -> None:
    """Applies all pending updates to ``layers``, in the order of their tokens. The slot does not change."""
    count = pending_count(view)
    for layer, state in enumerate(layers):
        ring = {name: view.state[name][layer, view.slot] for name in ("ring_conv", "ring_g", "ring_k", "ring_d")}
        for row in range(count):
            state.replay(_read_update(ring, row))


def append(view: SequenceView, layers: Sequence[LayerState]) -> None:
    """Adds the updates that ``layers`` collected. Raises UsageError when they do not fit; then nothing changes."""
    if not view.state:
        return
    count, added = pending_count(view), len(layers[0].updates or ())
    capacity = view.state["ring_d"].shape[2]
    if count + added > capacity:
        raise UsageError(f"{added} updates do not fit into a ring of {capacity} with {count} pending: fold first")
    for layer, state in enumerate(layers):
        for row, update in enumerate(state.updates or (), start=count):
            view.state["ring_conv"][layer, view.slot, row] = update.conv_input
            view.state["ring_g"][layer, view.slot, row] = update.decay[:, 0, 0]
            view.state["ring_k"][layer, view.slot, row] = update.key[:, :, 0]
            view.state["ring_d"][layer, view.slot, row] = update.d[:, 0]
    _write_count(view, count + added)


def _read_update(ring: Mapping[str, torch.Tensor], row: int) -> Update:
    """A copy of one pending update, in the shapes in which it was made."""
    return Update(
        conv_input=ring["ring_conv"][row].clone(),
        decay=ring["ring_g"][row].clone()[:, None, None],
        key=ring["ring_k"][row].clone()[:, :, None],
        d=ring["ring_d"][row].clone()[:, None],
    )


def _write_count(view: SequenceView, count: int) -> None:
    view.state["ring_count"][:, view.slot] = count
