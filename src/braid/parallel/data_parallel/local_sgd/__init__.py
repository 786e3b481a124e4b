"""Training with rare averaging of models instead of gradients."""
