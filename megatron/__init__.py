"""MegaDLMs: pretraining of deep language models."""
