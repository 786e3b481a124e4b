"""Training with rare or partial averaging of models instead of gradients."""
