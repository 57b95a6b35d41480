"""Checkpoints by logical tensor: any layout writes, any layout reads. See docs/checkpoint_format.md."""
