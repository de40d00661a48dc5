"""The parity test on a person's own model, batch and layout: `python -m twinkle_megatron.check`, docs/check.md."""
