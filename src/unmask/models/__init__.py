"""Denoiser, selector, order scorer, and the folder they live in."""
