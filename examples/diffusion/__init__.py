"""LoRA of a diffusion transformer over unlike devices."""
