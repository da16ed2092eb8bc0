"""Makes ``import torchvision`` work where the library of its own operators does not load.

The package index holds torchvision for CUDA. Beside a CPU build of torch the library inside it finds no
CUDA runtime, so torchvision goes on without its operators (non-maximum suppression and its kin, needed for
detection only) and then stumbles in Python over attaching shape functions to two of them that do not
exist. Once the two exist by name, everything that does not call them works: models, data sets, transforms.

Call ``define_missing_operators`` before the first import of torchvision::

    from edl_hvd.compat.torchvision_operators import define_missing_operators

    define_missing_operators()
    import torchvision
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

# As torchvision itself declares them (torchvision/csrc/ops/nms.cpp and quantized/qnms.cpp).
_SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
# A definition lives as long as the object that made it.
_libraries: list[Any] = []


def define_missing_operators() -> bool:
    """Declare the operators torchvision's Python code refers to, where its own library cannot.

    Does nothing where torchvision's library loads, where torchvision is not installed, and the second time.
    Calling a declared operator raises torch's "not implemented" error.

    Returns:
        Whether anything was declared, now or before.
    """
    if _libraries:
        return True
    library = _operator_library()
    if library is None:
        return False

    import torch

    try:
        # torchvision loads the same file again on import, which then costs and changes nothing.
        torch.ops.load_library(library)
    except OSError:
        declaring = torch.library.Library("torchvision", "FRAGMENT")
        for name, schema in _SCHEMAS.items():
            declaring.define(name + schema)
        _libraries.append(declaring)
    return bool(_libraries)


def _operator_library() -> Path | None:
    # Found without importing torchvision, whose import is what fails.
    spec = importlib.util.find_spec("torchvision")
    folders = spec.submodule_search_locations if spec else None
    found = sorted(Path(folders[0]).glob("_C*.so")) if folders else []
    return found[0] if found else None
