"""The parts that know Megatron-Core. Importing this package imports nothing of Megatron."""
