"""Pure arithmetic of batch and learning rate: who computes what, and how the rate follows the world."""
