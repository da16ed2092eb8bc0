"""Replacing an attribute of another library for the whole process, unless the user has left that out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from edl_hvd.errors import SettingsError
from edl_hvd.settings import left_out_patches

_Call = TypeVar("_Call", bound=Callable[..., object])

PATCHES = ("averages", "backward", "lazy_dynamo", "schedulers")


def is_made(patch: str) -> bool:
    """Whether a patch is to be made: not if ``EDL_HVD_WITHOUT_PATCHES`` names it.

    Raises:
        SettingsError: The variable names a patch that there is not.
    """
    left_out = left_out_patches()
    unknown = sorted(left_out - set(PATCHES))
    if unknown:
        raise SettingsError(
            f"EDL_HVD_WITHOUT_PATCHES names {', '.join(unknown)}; expected names out of {', '.join(PATCHES)}, "
            "separated by commas"
        )
    return patch not in left_out


def replace(patch: str, owner: object, attribute: str, wrap: Callable[[_Call], _Call]) -> None:
    """Put what ``wrap`` makes of a function into its place.

    Args:
        patch: Name of the patch, one of ``PATCHES``.
        owner: Module or class of another library.
        attribute: Name of the function there.
        wrap: Function that is given the present one, and returns the new one.

    Raises:
        SettingsError: ``EDL_HVD_WITHOUT_PATCHES`` names a patch that there is not.
    """
    if is_made(patch):
        setattr(owner, attribute, wrap(getattr(owner, attribute)))
