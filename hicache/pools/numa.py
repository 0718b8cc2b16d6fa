"""Memory beside the device that copies from it: on a machine with several NUMA nodes, half of the bus lies between."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from pathlib import Path
from typing import Any

import torch

_MBIND = {"x86_64": 237, "aarch64": 235}  # the number of the system call: the C library has no function for it
_MPOL_PREFERRED = 1  # another node where that one has no room: never a process killed for want of memory
_NODES_MAX = 1024  # as many as Linux knows


def node_of(device: torch.device, *, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """The NUMA node that a CUDA device is attached to; None where there is nothing to choose, or nothing known."""
    if device.type != "cuda":
        return None
    about: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks what says where it is
    try:
        address = f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"
        node = int((devices / address / "numa_node").read_text())
    except (OSError, ValueError, AttributeError):  # an older torch does not say
        return None
    return node if 0 <= node < _NODES_MAX else None  # the kernel says -1 on a machine of one node


def prefer_node(mapping: mmap.mmap, node: int) -> str:
    """Have pages of ``mapping`` that are touched from here on come from ``node``. Returns what came of it; never fails.

    Part of a line for people, such as ``on NUMA node 1``.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        return f"on any NUMA node (no mbind known on {platform.machine()})"
    nodes = (ctypes.c_ulong * (_NODES_MAX // 64))()
    nodes[node // 64] = 1 << node % 64
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    call = ctypes.CDLL(None, use_errno=True).syscall
    arguments = (number, address, len(mapping), _MPOL_PREFERRED, ctypes.addressof(nodes), _NODES_MAX + 1, 0)
    if call(*(ctypes.c_long(argument) for argument in arguments)) != 0:
        return f"on any NUMA node (node {node} refused: {os.strerror(ctypes.get_errno())})"
    return f"on NUMA node {node}"
