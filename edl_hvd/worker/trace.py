"""Whether tensors have moved, as far as it can be told without reading them.

Writes are seen by the tensors' version counters, and those that bypass them (``parameter.data``) by one element of each
parameter, on the CPU only: on a GPU every look would wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Trace:
    """What some tensors were at one moment, as far as it can be told without reading them."""

    def __init__(self, parameters: list[torch.nn.Parameter], before: Trace | None = None) -> None:
        self._parameters = parameters
        self._addresses = [parameter.data_ptr() for parameter in parameters]
        self._versions = [parameter._version for parameter in parameters]
        self._elements: list[dict[int, torch.Tensor]] = (
            before._elements if before and before._addresses == self._addresses else _elements_of(parameters)
        )
        self._values = self._read()
        self._bytes = [values.view(torch.uint8) for values in self._values]  # so that NaN equals itself

    def fits(self) -> bool:
        return (
            self._versions == [parameter._version for parameter in self._parameters]
            and self._addresses == [parameter.data_ptr() for parameter in self._parameters]
            and all(map(torch.equal, self._bytes, [values.view(torch.uint8) for values in self._read()]))
        )

    def moved(self) -> set[int]:
        """Numbers of the tensors that are not what they were."""
        if self.fits():
            return set()
        found = {
            number
            for number, parameter in enumerate(self._parameters)
            if (parameter._version, parameter.data_ptr()) != (self._versions[number], self._addresses[number])
        }
        for elements, was, now in zip(self._elements, self._values, self._read(), strict=True):
            differs = (_bytes_of(was) != _bytes_of(now)).any(dim=1).tolist()
            found.update(number for number, different in zip(elements, differs, strict=True) if different)
        return found

    def _read(self) -> list[torch.Tensor]:
        return [torch.cat(list(elements.values())) for elements in self._elements]


def _elements_of(parameters: Sequence[torch.Tensor]) -> list[dict[int, torch.Tensor]]:
    """A view of the middle element in memory of each parameter on the CPU, by its number, for each type."""
    found: dict[torch.dtype, dict[int, torch.Tensor]] = {}
    for number, parameter in enumerate(parameters):
        if parameter.device.type == "cpu" and parameter.numel():
            detached = parameter.detach()
            middle = detached.storage_offset() + sum(
                (n // 2) * s for n, s in zip(detached.shape, detached.stride(), strict=True)
            )
            found.setdefault(parameter.dtype, {})[number] = detached.as_strided((1,), (1,), middle)
    return list(found.values())


def _bytes_of(values: torch.Tensor) -> torch.Tensor:
    """A row for each of them: as bytes, NaN equals itself."""
    return values.view(torch.uint8).view(len(values), -1)
