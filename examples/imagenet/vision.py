"""torchvision, for the modules beside this one: it loads beside a CPU build of torch only after a word before."""

from edl_hvd.compat.torchvision_operators import define_missing_operators

define_missing_operators()

import torchvision  # noqa: E402

__all__ = ["torchvision"]
