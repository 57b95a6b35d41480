"""Seeds by name: one run seed gives every parameter, stream and sample its own, whatever the parallel layout."""

import hashlib


def derive_seed(seed: int, *parts: str | int) -> int:
    """A 63-bit seed that depends on `seed` and every part, the same on all machines and Python versions.

    derive_seed(1234, "init", "decoder.layers.0.mlp.linear_fc1.weight") seeds that parameter's initial values.
    """
    text = "\x1f".join([str(seed), *map(str, parts)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
