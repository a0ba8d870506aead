"""Models: `adapted` makes small ones with LoRA adapters, `flash_linear_attention` stands in for kernels."""
