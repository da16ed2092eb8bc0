"""Any classification model of torchvision, and which of its parameters decay."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from vision import torchvision

from edl_hvd.errors import UsageError


def build_model(arch: str, classes: int, image_size: int) -> torch.nn.Module:
    """A model with fresh weights for ``classes`` classes and square images of ``image_size`` pixels.

    Raises:
        UsageError: The architecture cannot work with images of that size.
    """
    try:
        model = torchvision.models.get_model(arch, weights=None, num_classes=classes, **_options(arch, image_size))
        with torch.no_grad():
            model.eval()(torch.zeros(1, 3, image_size, image_size))
    except (RuntimeError, ValueError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"argument --image-size: found {image_size}, which {arch} does not work with ({reason}); "
            "expected a size the architecture accepts, such as 224"
        ) from error
    return model


def refuses_single_images(model: torch.nn.Module, image_size: int) -> bool:
    """Whether the model cannot be trained with one image: a BatchNorm has nothing to normalise over there."""
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    device = next(model.parameters()).device
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model.train()(torch.zeros(1, 3, image_size, image_size, device=device))
    except ValueError as error:
        return "more than 1 value per channel" in str(error)
    finally:
        model.load_state_dict(kept)
    return False


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for an optimizer: weights decay; biases and the scales and shifts of norms do not."""
    decays = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    stays = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return [{"params": decays, "weight_decay": weight_decay}, {"params": stays, "weight_decay": 0.0}]


def weights_hash(model: torch.nn.Module) -> str:
    """SHA-256 over all parameters and buffers, by name."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + value.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _options(arch: str, image_size: int) -> dict[str, Any]:
    """Further arguments of some architectures."""
    if arch in ("googlenet", "inception_v3"):
        return {"aux_logits": False, "init_weights": True}  # one output, as every other model has
    if arch.startswith("vit_"):
        return {"image_size": image_size}
    if arch.startswith("maxvit"):
        return {"input_size": (image_size, image_size)}
    return {}
