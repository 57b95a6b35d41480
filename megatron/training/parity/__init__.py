"""Two runs of one model compared tensor by tensor: what each computes is recorded by logical name, merged, and judged."""
