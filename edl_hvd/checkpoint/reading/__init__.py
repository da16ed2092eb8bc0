"""Reading checkpoints: which are listed, their manifests and files, and their tensors."""
