"""Checkpoints to safetensors in the Hugging Face layout, and back."""
