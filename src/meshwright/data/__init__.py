"""Corpora, tokenizers, token files and the deterministic order of samples."""
