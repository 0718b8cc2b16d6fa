"""Pinning host memory for a device: who does it, and what stands in the way when it fails."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from hicache.errors import ConfigError

_CUDA_HOST_REGISTER_PORTABLE = 1  # pinned for all contexts of the process


class RegistrationFailed(Exception):
    """A registrar could not pin a region. The text says what it answered."""


class Region(NamedTuple):
    """Memory that is pinned in one call."""

    address: int
    size_bytes: int


class HostRegistrar(Protocol):
    """Pins memory that stays mapped until it is unregistered."""

    name: str
    counts_against_memlock: bool  # whether the kernel holds RLIMIT_MEMLOCK against it (ibverbs, mlock; not CUDA)

    def register(self, address: int, size_bytes: int) -> None:
        """Pin a region. Raises RegistrationFailed, after which nothing of it is pinned."""
        ...

    def unregister(self, address: int) -> None:
        """Undo ``register`` of the same address. Raises RegistrationFailed."""
        ...


class CudaRegistrar:
    """cudaHostRegister: the device then copies to and from the memory without staging."""

    name = "CUDA"
    counts_against_memlock = False

    def register(self, address: int, size_bytes: int) -> None:
        """See HostRegistrar."""
        status = _cudart().cudaHostRegister(address, size_bytes, _CUDA_HOST_REGISTER_PORTABLE)
        self._check(status, "cudaHostRegister")

    def unregister(self, address: int) -> None:
        """See HostRegistrar."""
        self._check(_cudart().cudaHostUnregister(address), "cudaHostUnregister")

    def _check(self, status: int, call: str) -> None:
        if int(status) != 0:
            raise RegistrationFailed(f"{call} answered {status!r}")


def _cudart() -> Any:  # torch's binding of the CUDA runtime, which has no types
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # nor has its getter


def registrar_for(device: torch.device) -> HostRegistrar | None:
    """What pins L2 for copies to and from ``device``; None where nothing has to."""
    return CudaRegistrar() if device.type == "cuda" else None


def register_all(registrar: HostRegistrar, regions: Sequence[Region], *, setting: str) -> None:
    """Pin all regions or none. Raises ConfigError that tells ``setting``, the limit and what lifts it.

    Region by region, since a driver may hold locks of the whole machine while it pins one.
    """
    size_bytes = sum(region.size_bytes for region in regions)
    limit_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    limited = limit_bytes != resource.RLIM_INFINITY
    if registrar.counts_against_memlock and limited and limit_bytes < size_bytes:
        raise ConfigError(setting, size_bytes, f"at most RLIMIT_MEMLOCK ({limit_bytes} bytes) to pin; {_REMEDY}")
    for done, region in enumerate(regions):
        try:
            registrar.register(*region)
        except RegistrationFailed as error:
            left = [str(undone) for undone in unregister_all(registrar, regions[:done])]
            answer = "; ".join((str(error), *left))
            pinned_bytes = sum(before.size_bytes for before in regions[:done])
            now = f"{limit_bytes} bytes" if limited else "unlimited"
            expected = (
                f"memory that {registrar.name} can pin ({answer}, after {pinned_bytes} bytes, for a region of "
                f"{region.size_bytes}; RLIMIT_MEMLOCK is {now}); {_REMEDY}"
            )
            raise ConfigError(setting, size_bytes, expected) from error


def unregister_all(registrar: HostRegistrar, regions: Sequence[Region]) -> list[RegistrationFailed]:
    """Undo ``register_all``, as far as the registrar lets. Returns what it answered to those that stay pinned."""
    failures = []
    for region in regions:
        try:
            registrar.unregister(region.address)
        except RegistrationFailed as error:
            failures.append(error)
    return failures


_REMEDY = "raise it (ulimit -l, LimitMEMLOCK= in systemd, --ulimit memlock in containers) or lower the setting"
