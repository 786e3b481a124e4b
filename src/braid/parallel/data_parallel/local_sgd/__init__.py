"""Training that averages models from time to time instead of gradients in every step."""
