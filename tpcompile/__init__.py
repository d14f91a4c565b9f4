"""Tensor parallelism for unmodified PyTorch models, by compilation."""
