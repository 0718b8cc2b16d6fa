"""A ReplaySSM ring in a state slot: updates of tokens that the temporal state does not contain yet.

::

    [0, settled) updates: d, k, g | [settled, pending) of drafts: rawk, rawv, beta, g | [pending, ring_tokens) rubbish

The temporal and conv states stay at the position before the first pending token until everything is replayed; a
rejected draft is a smaller count. What is settled is replayed without its serial dependency. A draft's inputs become
the update that they make when the next tokens are computed on top of them: those before them are final then. Both
counts live in the slot, as a transient field: a restore that does not reset them would replay another request's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from bench.tiny_config import SequenceView
from bench.tiny_gdn import DraftUpdate, LayerState, Update
from hicache.errors import UsageError

_ROW_FIELDS = ("conv", "g", "k", "d", "rawk", "rawv", "beta")  # of one token each


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
    _write_counts(view, pending=count, settled=min(count, _settled_count(view)))


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
        _write_counts(view, pending=0, settled=0)


def replay(view: SequenceView, layers: Sequence[LayerState]) -> None:
    """Applies all pending updates to ``layers``, in the order of their tokens, and settles those of drafts.

    What the ring stands for does not change: replaying again gives the same bits.
    """
    if not view.state:
        return
    settled, pending = _settled_count(view), pending_count(view)
    for layer, state in enumerate(layers):
        ring = {name: view.state[f"ring_{name}"][layer, view.slot] for name in _ROW_FIELDS}
        for row in range(settled):
            state.replay(_read_update(ring, row))
        for row in range(settled, pending):
            update = state.settle(_read_draft(ring, row))
            ring["k"][row] = update.key[:, :, 0]
            ring["d"][row] = update.d[:, 0]
    _write_counts(view, pending=pending, settled=pending)


def append(view: SequenceView, layers: Sequence[LayerState]) -> None:
    """Adds what ``layers`` collected, as drafts. Raises UsageError when it does not fit; then nothing changes."""
    if not view.state:
        return
    count, added = pending_count(view), len(layers[0].drafts or ())
    capacity = view.state["ring_d"].shape[2]
    if count + added > capacity:
        raise UsageError(f"{added} updates do not fit into a ring of {capacity} with {count} pending: fold first")
    for layer, state in enumerate(layers):
        ring = {name: view.state[f"ring_{name}"][layer, view.slot] for name in _ROW_FIELDS}
        for row, draft in enumerate(state.drafts or (), start=count):
            ring["conv"][row] = draft.conv_input
            ring["g"][row] = draft.decay[:, 0, 0]
            ring["rawk"][row] = draft.raw_key
            ring["rawv"][row] = draft.raw_value
            ring["beta"][row] = draft.beta[:, 0]
    _write_counts(view, pending=count + added, settled=_settled_count(view))


def _read_update(ring: Mapping[str, torch.Tensor], row: int) -> Update:
    """A copy of one settled update, in the shapes in which it was made."""
    return Update(
        conv_input=ring["conv"][row].clone(),
        decay=ring["g"][row].clone()[:, None, None],
        key=ring["k"][row].clone()[:, :, None],
        d=ring["d"][row].clone()[:, None],
    )


def _read_draft(ring: Mapping[str, torch.Tensor], row: int) -> DraftUpdate:
    """A copy of the inputs of one draft, in the shapes in which they were computed."""
    return DraftUpdate(
        conv_input=ring["conv"][row].clone(),
        decay=ring["g"][row].clone()[:, None, None],
        raw_key=ring["rawk"][row].clone(),
        raw_value=ring["rawv"][row].clone(),
        beta=ring["beta"][row].clone()[:, None],
    )


def _settled_count(view: SequenceView) -> int:
    return int(view.state["ring_count"][0, view.slot, 1])


def _write_counts(view: SequenceView, *, pending: int, settled: int) -> None:
    view.state["ring_count"][:, view.slot, 0] = pending
    view.state["ring_count"][:, view.slot, 1] = settled
