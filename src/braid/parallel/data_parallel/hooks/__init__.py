"""Communication hooks: compressed gradients, and other ways to combine them."""
